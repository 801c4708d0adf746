"""The durable state of a simulation in its folder: the checkpoint, `rounds.csv` and `events.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.reports import run_files
from coordinator.reports.progress import Progress
from coordinator.rounds import engine
from coordinator.rounds.checkpoint import Checkpoint, CheckpointStore
from coordinator.rounds.events import Clock, EventLog
from coordinator.rounds.records import RoundRecord, RunState, as_row
from strategies.params import Params


class SimulationStore:
    """Implements `engine.CommitStore`; use as a context manager, which opens and closes the line files.

    Attributes:
        checkpoint: the last committed round of an earlier process, or None.
    """

    def __init__(self, out: Path, progress: Progress, clock: Clock) -> None:
        self._out = out
        self._progress = progress
        self._clock = clock
        self._checkpoints = CheckpointStore(out / "checkpoint")
        self.checkpoint = self._checkpoints.load()
        self.identity: Mapping[str, str] = {}

    def __enter__(self) -> SimulationStore:
        self._files = run_files.open_lines(self._out, self.checkpoint)
        self._events = EventLog(self._files["events.jsonl"], self._clock)
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def emit(self, event: str, **values: Any) -> None:
        self._events(event, **values)

    def emit_resumed(self, checkpoint: Checkpoint, name: str) -> None:
        """Emits that the run resumes, and first the event of the checkpoint's round if the process died before it."""
        if self._files["events.jsonl"].size_bytes == checkpoint.offsets["events.jsonl"]:
            engine.emit_committed(self.emit, checkpoint.record)
        self.emit("run_resumed", experiment=name, round=checkpoint.round)

    def materialize(self, state: RunState) -> RunState:
        return engine.materialize_in_memory(state)

    def commit(
        self, state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]
    ) -> None:
        for file in self._files.values():
            file.sync()
        offsets = {name: file.size_bytes for name, file in self._files.items()}
        row = as_row(record)
        self._checkpoints.commit(
            Checkpoint(state.round, state.params, state.strategy, row, offsets, self.identity, clients)
        )

    def on_committed(self, record: RoundRecord) -> None:
        run_files.append_round(self._files["rounds.csv"], record)
        self._progress.round(record)
        engine.emit_committed(self.emit, as_row(record))
