"""The folder of a job: what its process needs, what it reports, and what it leaves.

job.json         kind, document, source: written before the process starts
init.safetensors params of a registered version to start from, if the document names one
init/            instead, a registered folder of Hugging Face
events.jsonl     what the process reports, an event a line
log.txt          standard error of the process, and of what it starts
outcome.json     `{"error": …}`: how the process ended, null for success
out/             the folder of results, as the command's --out
tmp/             home and temporary files of the process
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from coordinator.datacenter.documents import (
    CONFIG,
    EXPERIMENT,
    LINEAGE,
    MODEL,
    PARAMS,
    PIPELINE,
    REPORT,
    TFLITE,
)
from edge_client.files import write_durably
from edge_client.wire.rollouts import MANIFEST_NAME
from edge_client.wire.schema import SCHEMA_NAME

JOB, EVENTS, LOG, OUTCOME, OUT = "job.json", "events.jsonl", "log.txt", "outcome.json", "out"

RESULTS = (
    REPORT, CONFIG, EXPERIMENT, PIPELINE, MODEL, PARAMS, TFLITE, LINEAGE, MANIFEST_NAME, SCHEMA_NAME, "curves.png",
    "pareto.png", "rounds.csv",
)  # fmt: skip
"""Files in `out` that may be fetched. No other ones: the folder holds rows of data too."""

_TAIL_BYTES = 65_536
_SPLIT = (
    "step_seconds", "rows_per_second", "tokens_per_second", "mean_seconds", "exposed_share", "bubble_share",
    "loader_share", "mfu",
)  # fmt: skip
"""Figures of `profile/profile.json` that go with a report."""


@dataclass(frozen=True)
class Task:
    """What the process of a job does, as `job.json` says.

    Attributes:
        source: folder with the trained model that it starts from.
    """

    kind: str
    document: dict[str, Any]
    source: Path | None
    data_dir: Path | None


def write_task(folder: Path, task: Task) -> None:
    """Writes `job.json`; removes the outcome of an earlier attempt."""
    paths = {
        key: str(path) if path else None
        for key, path in (("source", task.source), ("data_dir", task.data_dir))
    }
    write_durably(folder / JOB, json.dumps({**vars(task), **paths}, indent=2).encode())
    (folder / OUTCOME).unlink(missing_ok=True)


def read_task(folder: Path) -> Task:
    """The task in `job.json`."""
    values = json.loads((folder / JOB).read_text("utf-8"))
    paths = {key: Path(values[key]) if values[key] else None for key in ("source", "data_dir")}
    return Task(values["kind"], values["document"], **paths)


def write_outcome(folder: Path, error: str | None) -> None:
    """Writes how the process ended."""
    write_durably(folder / OUTCOME, json.dumps({"error": error}).encode())


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """The outcome; None if the process ended without one."""
    try:
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return outcome


def events(folder: Path, after: int, limit: int) -> list[dict[str, Any]]:
    """At most `limit` events behind the first `after` ones, each with its number as `id`."""
    numbered = enumerate(_objects(folder / EVENTS), 1)
    return [{"id": number, **event} for number, event in islice(numbered, after, after + limit)]


def progress(folder: Path) -> dict[str, Any]:
    """The last stage, and the last figures: `done` of `total` rounds, steps or epochs, `loss`, `accuracy`; empty before the first."""
    try:
        with (folder / EVENTS).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    found: dict[str, Any] = {}
    for line in reversed(lines):
        event = _parse(line)
        if event is None:
            continue
        for key, value in _figures(event).items():
            found.setdefault(key, value)
        if event["event"] == "started" or {"stage", "done", "total"} <= found.keys():
            break
    return found


def curve(folder: Path, points: int) -> list[dict[str, Any]]:
    """At most about `points` points of a training's or a simulation's curves, by `step` or `round`, evenly spaced."""
    steps = folder / OUT / "curve.jsonl"
    if steps.exists():
        rows = list(_objects(steps))
    else:
        rounds = (event for event in _objects(folder / EVENTS) if event["event"] == "round")
        rows = list({row["round"]: row for row in rounds}.values())  # a resumed simulation repeats some
    every = -(-len(rows) // points) if rows else 1
    return [row for number, row in enumerate(rows) if number % every == 0 or number == len(rows) - 1]


def report(folder: Path) -> dict[str, Any] | None:
    """The report of a finished job, with the figures of its profile; None without one."""
    try:
        found: dict[str, Any] = json.loads((folder / OUT / REPORT).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if "profile" in found and (measured := profile(folder)) is not None:
        found["profile"] = measured
    return found


def profile(folder: Path) -> dict[str, Any] | None:
    """Where a training's time goes, as soon as its profiled steps have run; None before, or without a profile."""
    try:
        measured = json.loads((folder / OUT / "profile" / "profile.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return {key: measured[key] for key in _SPLIT if key in measured}


def results(folder: Path) -> dict[str, int]:
    """The files that may be fetched, with their sizes in bytes."""
    paths = ((name, folder / OUT / name) for name in RESULTS)
    return {name: path.stat().st_size for name, path in paths if path.is_file()}


def _figures(event: Mapping[str, Any]) -> dict[str, Any]:
    match event["event"]:
        case "stage":
            return {"stage": event["message"]}
        case "rounds":
            return {"unit": "round", "done": event["done"], "total": event["total"]}
        case "round":
            known = (("loss", "train_loss"), ("accuracy", "test_accuracy"))
            figures = {key: event[name] for key, name in known if event.get(name) is not None}
            return {"unit": "round", "done": event["round"], **figures}
        case "progress":
            unit = "step" if "steps" in event else "epoch"
            if f"{unit}s" not in event:
                return {}
            figures = {"loss": event["loss"]} if event.get("loss") is not None else {}
            return {"unit": unit, "done": event[unit], "total": event[f"{unit}s"], **figures}
    return {}


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file of JSON lines."""
    try:
        with path.open("rb") as file:
            for line in file:
                if (value := _parse(line)) is not None:
                    yield value
    except FileNotFoundError:
        return


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line as an object; None if it is cut or empty."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
