"""Following a run on a real fleet from the command line: submit it, watch its events, keep what it came to.

The coordinator may be stopped and started again while somebody follows: the stream is asked for again, from the
last event that was seen, so nothing is missed and nothing told twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from coordinator import report
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiment import resolve
from coordinator.operator_client import OperatorClient, Unreachable
from coordinator.progress import Progress
from coordinator.rounds.engine import RoundRecord
from coordinator.rounds.events import LineFile
from edge_client.files import write_durably
from edge_client.wire import arrays

ENDS = ("run_finished", "run_failed", "run_cancelled")
_AGAIN_SECONDS = 1.0
_PATIENCE_SECONDS = 600.0
"""How long a coordinator that does not answer is waited for."""


def submit(
    client: OperatorClient, experiment: str | Mapping[str, Any], sets: Sequence[str]
) -> dict[str, Any]:
    """A new run of an experiment (TOML text, or the same as an object), as the API shows it."""
    run: dict[str, Any] = client.post("/runs", {"experiment": experiment, "sets": list(sets)})
    return run


def follow(
    client: OperatorClient,
    run: str,
    out: Path,
    progress: Progress,
    wait: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Watches a run to its end, leaves in `out` what a simulation leaves there, and returns its report.

    Raises:
        UserError: there is no such run, or `out` cannot be written.
        RunInterrupted: it failed or was cancelled, or the coordinator stays away.
    """
    shown = client.get(f"/runs/{run}")
    experiment = resolve(shown["experiment"], f"run {run}", "devices")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_durably(out / "experiment.toml", experiment.to_toml().encode())
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    for notice in shown["notices"]:
        progress.note(notice)
    lines = report.open_lines(out, None)
    try:
        last = _watch(client, run, lines, progress, experiment.federation.rounds, wait)
    except KeyboardInterrupt:
        raise RunInterrupted(
            f"no longer followed, the run goes on; see it with: fedloop run --follow {run}, "
            f"end it with: fedloop run --cancel {run}"
        ) from None
    finally:
        for file in lines.values():
            file.close()
    if last["event"] != "run_finished":
        raise RunInterrupted(_words(run, last))
    return _keep(client, run, out, experiment.name)


def events_of(
    client: OperatorClient, run: str, wait: Callable[[float], None], give_up: float = _PATIENCE_SECONDS
) -> Iterator[dict[str, Any]]:
    """Every event of a run from its first on, each once, across restarts of the coordinator.

    Raises:
        RunInterrupted: it does not answer for `give_up` seconds of waiting.
    """
    last, waited = 0, 0.0
    while True:
        try:
            for event in client.events(f"/events?run={run}", after=last):
                last, waited = event["id"], 0.0
                yield event
        except Unreachable as error:
            if waited >= give_up:
                raise RunInterrupted(f"{error}\nthe run goes on with: fedloop run --follow {run}") from None
        wait(_AGAIN_SECONDS)
        waited += _AGAIN_SECONDS


def _watch(
    client: OperatorClient,
    run: str,
    lines: Mapping[str, LineFile],
    progress: Progress,
    rounds: int,
    wait: Callable[[float], None],
) -> dict[str, Any]:
    """Writes and shows events until the one that ends the run, which is returned."""
    progress.stage("waiting for the coordinator to prepare the run")
    for event in events_of(client, run, wait):
        lines["events.jsonl"].append(json.dumps(event))
        match event["event"]:
            case "run_started":
                progress.begin(rounds, 0)
            case "run_resumed":
                progress.note(f"the coordinator was started again; it goes on after round {event['round']}")
            case "round_committed":
                record = record_of(event)
                report.append_round(lines["rounds.csv"], record)
                progress.round(record)
            case name if name in ENDS:
                _tell_registered(progress, event)
                return event
    raise AssertionError("the stream of events has no end of its own")


def _tell_registered(progress: Progress, last: Mapping[str, Any]) -> None:
    if "registered" in last:
        progress.note(f"registered as {last['registered']}")
    if "not_registered" in last:
        progress.note(f"the run has finished, but its model was not registered: {last['not_registered']}")


def record_of(event: Mapping[str, Any]) -> RoundRecord:
    """The line of the report in a `round_committed` event; it may hold more, which is left."""
    return RoundRecord(**{field.name: event[field.name] for field in fields(RoundRecord)})


def _keep(client: OperatorClient, run: str, out: Path, name: str) -> dict[str, Any]:
    """Model, curves and report, the report last."""
    model = client.download(f"/runs/{run}/model")
    document: dict[str, Any] = client.get(f"/runs/{run}/report")
    if arrays.sha256(model) != document["final"]["model_sha256"]:
        raise RunInterrupted(
            f"the model that came of run {run} has another hash than its report says; try again with: "
            f"fedloop run --follow {run}; should it stay so, the coordinator's disk has damaged it"
        )
    write_durably(out / "model.safetensors", model)
    report.draw_curves(out / "curves.png", name, document["start"], document["rounds"])
    write_durably(out / "report.json", json.dumps(document, indent=2).encode())
    return document


def _words(run: str, last: Mapping[str, Any]) -> str:
    if last["event"] == "run_failed":
        return f"run {run} failed: {last.get('error', 'no reason was given')}"
    return f"run {run} was cancelled"
