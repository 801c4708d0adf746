"""Following a run on a real fleet from the command line: submit it, watch its events, save its results.

The coordinator may restart meanwhile: the follower reconnects to the stream after the last event it received, so it
misses no event and reports none twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from coordinator.document_checks import to_user_error
from coordinator.errors import RunInterrupted
from coordinator.experiments.experiment import check
from coordinator.experiments.schema import Experiment
from coordinator.operator.client import OperatorClient, Refused, Unreachable
from coordinator.output_folders import begin
from coordinator.reports import run_files
from coordinator.reports.curves import draw_curves, loss_name
from coordinator.reports.progress import Progress
from coordinator.reports.trace import write_trace
from coordinator.rounds.events import LineFile
from coordinator.rounds.records import RoundRecord
from coordinator.short_ids import short_id
from edge_client.files import write_durably
from edge_client.wire import arrays
from edge_client.wire.strict import printable

ENDS = ("run_finished", "run_failed", "run_cancelled")
UNAVAILABLE = (503, 507)
"""The coordinator answers, but waits for its disk or database."""
_RETRY_SECONDS = 1.0
_PATIENCE_SECONDS = 600.0
"""How long to wait for a coordinator that does not answer."""


def follow(
    client: OperatorClient,
    run: str,
    out: Path,
    progress: Progress,
    wait: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Watches a run to its end, writes the files of a simulation into `out`, and returns its report.

    Raises:
        UserError: there is no such run, or `out` cannot be written.
        RunInterrupted: it failed or was cancelled, or the coordinator stays unreachable.
    """
    shown = client.get(f"/runs/{run}")
    experiment = _experiment(shown["experiment"], run)
    begin(out, "experiment.toml", experiment.to_toml())
    notices = list(shown["notices"])
    for notice in notices:
        progress.note(notice)
    lines = run_files.open_lines(out, None)
    try:
        last = _watch(client, run, lines, progress, experiment.federation.rounds, notices, wait)
    except KeyboardInterrupt:
        raise RunInterrupted(
            f"stopped following; the run continues. Follow it with: fedloop run --follow {short_id(run)}, "
            f"cancel it with: fedloop run --cancel {short_id(run)}"
        ) from None
    finally:
        for file in lines.values():
            file.close()
    if last["event"] == "run_failed":
        raise RunInterrupted(f"run {short_id(run)} failed: {last.get('error', 'no reason was given')}")
    if last["event"] == "run_cancelled":
        raise RunInterrupted(f"run {short_id(run)} was cancelled")
    write_trace(out, experiment.record)
    return _save_results(client, run, out, experiment.name)


def _experiment(document: Mapping[str, Any], run: str) -> Experiment:
    """The experiment of a run, which the coordinator has checked: a strategy installed there need not be installed here."""
    experiment, problems = check(document, "devices", stored=True)
    if experiment is None:
        raise to_user_error(f"run {run}", problems)
    return experiment


def events_of(
    client: OperatorClient,
    run: str,
    wait: Callable[[float], None],
    patience_seconds: float = _PATIENCE_SECONDS,
) -> Iterator[dict[str, Any]]:
    """Every event of a run, each once, across restarts of the coordinator.

    Raises:
        RunInterrupted: it does not answer for `patience_seconds`.
    """
    last, waited = 0, 0.0
    while True:
        try:
            for event in client.events(f"/events?run={run}", after=last):
                last, waited = event["id"], 0.0
                yield event
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.status not in UNAVAILABLE:
                raise
            if waited >= patience_seconds:
                raise RunInterrupted(
                    f"{error}\nfollow the run again with: fedloop run --follow {short_id(run)}"
                ) from None
        wait(_RETRY_SECONDS)
        waited += _RETRY_SECONDS


def events_until_end(client: OperatorClient, run: str) -> Iterator[dict[str, Any]]:
    """As `events_of`, up to the event that ends the run."""
    for event in events_of(client, run, time.sleep):
        yield event
        if has_ended(client, run, event):
            return


def has_ended(client: OperatorClient, run: str, event: Mapping[str, Any]) -> bool:
    """Whether the run ended with this event, and was not resumed since."""
    if event["event"] not in ENDS:
        return False
    ended_at = client.get(f"/runs/{run}")["finished_at"]
    # Events have times in milliseconds, runs in microseconds.
    return ended_at is not None and (
        datetime.fromisoformat(ended_at) - datetime.fromisoformat(event["time"])
    ) < timedelta(milliseconds=1)


def _watch(
    client: OperatorClient,
    run: str,
    lines: Mapping[str, LineFile],
    progress: Progress,
    rounds: int,
    notices: Sequence[str],
    wait: Callable[[float], None],
) -> dict[str, Any]:
    """Writes and shows events until the one that ends the run; returns that. `notices` have been shown already."""
    progress.stage("waiting for the coordinator to prepare the run")
    for event in events_of(client, run, wait):
        lines["events.jsonl"].append(json.dumps(event))
        match event["event"]:
            case "run_started":
                for notice in client.get(f"/runs/{run}")["notices"]:  # the prepared run may have more
                    if notice not in notices:
                        progress.note(notice)
                progress.begin(rounds, 0)
            case "run_resumed":
                progress.note(f"the coordinator restarted; the run continues after round {event['round']}")
            case "run_stalled":
                progress.note(f"the run waits, and will continue by itself: {event['reason']}")
            case "round_waiting":
                for line in format_waiting(event):
                    progress.note(line)
            case "round_committed":
                record = RoundRecord(
                    **{field.name: event[field.name] for field in fields(RoundRecord) if field.name in event}
                )
                run_files.append_round(lines["rounds.csv"], record)
                progress.round(record)
            case "run_taken_up":
                progress.note(f"the run was resumed behind round {event['round']}")
            case _ if has_ended(client, run, event):
                if "registered" in event:
                    progress.note(f"registered as {event['registered']}")
                if reason := event.get("not_registered"):
                    progress.note(f"the run has finished, but its model was not registered: {reason}")
                return event
    raise AssertionError("the stream of events has no end of its own")


def format_waiting(event: Mapping[str, Any]) -> Iterator[str]:
    """How many devices can take part in a waiting round, how many it wants, when it begins, and why others cannot."""
    yield _format_counts(event)
    for each in event.get("blocked", ()):
        yield f"  {printable(each['name'])} ({short_id(each['device'])}): {printable('; '.join(each['reasons']))}"
    if event.get("unnamed"):
        yield f"  and {event['unnamed']} more; why one of them cannot: fedloop device why DEVICE"


def _format_counts(event: Mapping[str, Any]) -> str:
    eligible, wanted, enrolled = event["eligible"], event["wanted"], event["enrolled"]
    if not enrolled:
        return (
            f"round {event['round']} waits: no device is enrolled; admit one with the command that `fedloop device token` "
            "prints, typed on the device"
        )
    counts = (
        f"{eligible} of {enrolled} enrolled device{'s' * (enrolled != 1)} can take part, {wanted} are wanted"
    )
    if eligible >= event["least"] and event["seconds"]:
        start = f"it begins with the eligible ones in {event['seconds']} s (devices.patience_seconds)"
    else:
        start = f"it begins when {event['least']} can"
    return f"round {event['round']} waits: {counts}; {start}"


def _save_results(client: OperatorClient, run: str, out: Path, name: str) -> dict[str, Any]:
    model = client.download(f"/runs/{run}/model")
    document: dict[str, Any] = client.get(f"/runs/{run}/report")
    if arrays.sha256(model) != document["final"]["model_sha256"]:
        raise RunInterrupted(
            f"the model of run {short_id(run)} does not have the hash in its report; try again with: "
            f"fedloop run --follow {short_id(run)}; if that does not help, the coordinator's disk has damaged it"
        )
    write_durably(out / "model.safetensors", model)
    run_files.write_schema(out, document["data"].get("schema"))
    draw_curves(
        out / "curves.png",
        name,
        document["start"],
        document["rounds"],
        loss_name(document["data"].get("task")),
    )
    write_durably(out / "report.json", json.dumps(document, indent=2).encode())
    return document
