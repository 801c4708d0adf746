"""A calibration: the first rounds of an experiment, simulated for real in a temporary folder and measured."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from coordinator.experiments.experiment import resolve
from coordinator.experiments.schema import Experiment
from coordinator.experiments.settings import apply_settings
from coordinator.reports.progress import Progress
from coordinator.rounds.records import RoundRecord
from coordinator.runs.privacy.by_clients import UNKNOWN, Sizes

ROUNDS = 4
"""Rounds of a calibration. The first one warms up, so it does not count."""

_SAMPLE_SECONDS = 0.25


@dataclass(frozen=True)
class Calibration:
    """What the first rounds of a run took.

    Attributes:
        clients: of the whole federation.
        rounds: their records.
        scored: whether each of them scored the model on the held-out rows.
        start_seconds: until the first round began: processes, data, model and its conversion.
        end_seconds: after the last round: final figures and report.
        memory_bytes: the most that all processes together used, shared pages counted once.
        sizes: of updates and clients, if clients add noise.
    """

    clients: int
    rounds: Sequence[RoundRecord]
    scored: Sequence[bool]
    start_seconds: float
    end_seconds: float
    memory_bytes: int
    sizes: Sizes = UNKNOWN


class Simulate(Protocol):
    """Simulates an experiment into a new folder and returns its report."""

    def __call__(self, experiment: Experiment, out: Path, progress: Progress, /) -> Mapping[str, Any]: ...


def calibrate(experiment: Experiment, simulate: Simulate, progress: Progress) -> Calibration:
    """Simulates the first rounds of an experiment. Nothing of it is kept.

    Raises:
        UserError: the experiment cannot run: its data, model or their combination is wrong.
        RunInterrupted: a worker died.
    """
    short = _shorten(experiment)
    watch = _Watch(progress)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedloop-plan-") as folder, _peak_memory() as peak:
        report = simulate(short, Path(folder) / "run", watch)
        ended = time.monotonic()
    rounds = short.federation.rounds
    return Calibration(
        clients=report["clients"],
        rounds=tuple(watch.rounds),
        scored=tuple(short.evaluation.is_due(each.round, rounds) for each in watch.rounds),
        start_seconds=watch.began - began,
        end_seconds=ended - watch.ended,
        memory_bytes=peak[0],
        sizes=Sizes(**report.get("privacy", {}).get("sizes", {})),
    )


def _shorten(experiment: Experiment) -> Experiment:
    """The experiment with few rounds, and without what comes after them and is estimated apart, or would leave files behind."""
    document = experiment.model_dump(mode="json", exclude_none=True)
    rounds = min(ROUNDS, experiment.federation.rounds)
    changed = apply_settings(
        document, [f"federation.rounds={rounds}", "simulation.local_baseline=off", "federation.early_stop=0"]
    )
    changed.pop("record", None)
    changed["simulation"].pop("fine_tune", None)
    changed["model"].pop("register", None)
    return resolve(changed, "experiment", stored=True)


@dataclass
class _Watch:
    """Notes when rounds begin and end, and passes the stages on."""

    shown: Progress
    rounds: list[RoundRecord] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0

    def stage(self, message: str, /) -> None:
        self.shown.stage(message)

    def note(self, message: str, /) -> None: ...

    def begin(self, rounds: int, done: int) -> None:
        self.began = self.ended = time.monotonic()
        self.shown.stage(f"simulating {rounds} rounds to measure them")

    def round(self, record: RoundRecord) -> None:
        self.ended = time.monotonic()
        self.rounds.append(record)

    def trained(self, line: Mapping[str, Any], /) -> None: ...


@contextmanager
def _peak_memory() -> Iterator[list[int]]:
    """Samples the memory of this process and all below it; the most of it is in the list afterwards."""
    peak, over = [0], threading.Event()

    def sample() -> None:
        while True:
            peak[0] = max(peak[0], _memory_bytes())
            if over.wait(_SAMPLE_SECONDS):
                return

    thread = threading.Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _memory_bytes() -> int:
    """Memory of this process and its descendants; a page that several share counts once."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total
