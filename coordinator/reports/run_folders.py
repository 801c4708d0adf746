"""The folders of runs: which runs they hold, how far these are, and their figures so far.

A simulation leaves such a folder, and so does `fedloop run` for a run on devices (`operator.run_follower`).
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.reports.folder_state import (
    EVENTS,
    EXPERIMENT,
    LOCK,
    REPORT,
    ROUNDS,
    fleet_run,
    is_finished,
    iterate_events,
)
from coordinator.reports.run_files import read_rounds, read_start
from coordinator.rounds.records import totals
from coordinator.toml_files import read_toml

_STATES = {"run_finished": "finished", "run_failed": "failed", "run_cancelled": "cancelled"}
"""State of a run on devices by the last event that was received of it."""


@dataclass(frozen=True)
class FolderRun:
    """A run in a folder.

    Attributes:
        state: finished, running, interrupted, failed or cancelled; "unfollowed" if a run on devices may go on unseen.
        round: the last committed one.
        r2: of the final model, if it predicts quantities.
        started_at: ISO 8601; None if nothing has happened yet.
        fleet_run: its id at the coordinator, if it is a run on devices.
    """

    folder: Path
    name: str
    state: str
    round: int
    rounds: int
    test_accuracy: float | None
    r2: float | None
    started_at: str | None
    fleet_run: str | None


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, be it one that still prepares its data."""
    return (folder / EXPERIMENT).is_file() and any((folder / name).exists() for name in (ROUNDS, LOCK))


def list_runs(parent: Path) -> list[FolderRun]:
    """The runs in the folders directly below `parent`, or in `parent` itself if it is the folder of one; newest first."""
    folders = [parent] if is_run(parent) else [path for path in _children(parent) if is_run(path)]
    return sorted(map(_read_any, folders), key=lambda run: (run.started_at or "", run.folder), reverse=True)


def read_run(folder: Path) -> FolderRun:
    """The run in `folder`. Raises: UserError: a file of it is damaged."""
    with _naming(folder):
        return _read(folder)


def _read_any(folder: Path) -> FolderRun:
    try:
        return read_run(folder)
    except UserError:
        return FolderRun(folder, folder.name, "damaged", 0, 0, None, None, None, None)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: a file of this run is damaged: {type(error).__name__}: {error}") from None


def _read(folder: Path) -> FolderRun:
    document = read_toml(folder / EXPERIMENT)
    rounds = _rounds(folder)
    total = int(document["federation"]["rounds"])
    first = next(iterate_events(folder), None)
    state = _state(folder)
    return FolderRun(
        folder=folder,
        name=str(document["name"]),
        state=state,
        round=rounds[-1]["round"] if rounds else 0,
        rounds=total,
        test_accuracy=rounds[-1]["test_accuracy"] if rounds else None,
        r2=_r2(folder) if state == "finished" and rounds and rounds[-1]["test_accuracy"] is None else None,
        started_at=first["time"] if first is not None else None,
        fleet_run=fleet_run(folder),
    )


def read_report(folder: Path) -> dict[str, Any]:
    """The report of the run in `folder`; of one that is not finished, its keys as far as they are known.

    Raises:
        UserError: a file of it is damaged.
    """
    run = read_run(folder)
    if run.state == "finished":
        finished: dict[str, Any] = json.loads((folder / REPORT).read_text("utf-8"))
        return {"state": run.state, **finished}
    rounds = _rounds(folder)
    last = rounds[-1] if rounds else {}
    return {
        "state": run.state,
        "experiment": read_toml(folder / EXPERIMENT),
        "start": read_start(folder / EVENTS) if run.fleet_run is None and run.started_at else {},
        "rounds": rounds,
        **totals(rounds),
        "final": {key: last.get(key) for key in ("test_accuracy", "test_loss")},
    }


def _r2(folder: Path) -> float | None:
    """R2 in the report of a finished run; None if it predicts no quantity."""
    metrics = json.loads((folder / REPORT).read_text("utf-8"))["final"].get("metrics") or {}
    return None if metrics.get("r2") is None else float(metrics["r2"])


def _rounds(folder: Path) -> list[dict[str, Any]]:
    return read_rounds(folder / ROUNDS) if (folder / ROUNDS).exists() else []


def _state(folder: Path) -> str:
    if is_finished(folder):
        return "finished"
    if fleet_run(folder) is not None:
        last = list(iterate_events(folder))[-1]
        return _STATES.get(last["event"], "unfollowed")
    return "running" if _is_locked(folder / LOCK) else "interrupted"


def _is_locked(path: Path) -> bool:
    """Whether another process holds the lock file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _children(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
