"""The state of a run, read from the files in its folder."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coordinator.errors import UserError

EXPERIMENT, REPORT, EVENTS, ROUNDS = "experiment.toml", "report.json", "events.jsonl", "rounds.csv"
LOCK = ".lock"


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has its report, and that is of as many rounds as its experiment asks for."""
    try:
        report = json.loads((folder / REPORT).read_text("utf-8"))
        planned = tomllib.loads((folder / EXPERIMENT).read_text("utf-8"))
    except FileNotFoundError:
        return False
    return bool(report["experiment"]["federation"]["rounds"] == planned["federation"]["rounds"])


def fleet_run(folder: Path) -> str | None:
    """The id at its coordinator of the run in `folder`; None if that is a simulation."""
    first = next(iterate_events(folder), {})
    return str(first["run"]) if "run" in first else None


def committed_round(folder: Path) -> int:
    """The last committed round of the simulation in `folder`; 0 before the first."""
    try:
        return int(json.loads((folder / "checkpoint" / "checkpoint.json").read_bytes())["round"])
    except FileNotFoundError:
        return 0


def iterate_events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of the run in `folder`, oldest first; without a last line that is still being written.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with (folder / EVENTS).open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UserError(f"{folder / EVENTS}: the file is damaged: {error}") from None


def learnt_nothing(report: Mapping[str, Any]) -> bool:
    """Whether a run had rounds and none changed its model."""
    rounds = report["rounds"]
    return bool(rounds) and not any(row["accepted"] for row in rounds)
