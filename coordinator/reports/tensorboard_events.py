"""TensorBoard's event files, written with its own messages and records and without a framework."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from edge_client.files import make_durably

if TYPE_CHECKING:
    from coordinator.reports.trackers import Point

FILE = "events.out.tfevents.fedloop"
"""Always the same name, so that writing a run again replaces it."""


def write(folder: Path, points: Iterable[Point]) -> None:
    """Writes the event file of one run: a scalar for each figure and round, or step."""
    folder.mkdir(parents=True, exist_ok=True)

    def fill(path: Path) -> None:
        with path.open("wb") as file:
            _write_records(file, points)

    make_durably(folder / FILE, fill)


def _write_records(file: IO[bytes], points: Iterable[Point]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    records = RecordWriter(file)
    for number, point in enumerate(points):
        if number == 0:
            records.write(Event(wall_time=point.seconds, file_version="brain.Event:2").SerializeToString())
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.figures.items()]
        event = Event(wall_time=point.seconds, step=point.round, summary=Summary(value=values))
        records.write(event.SerializeToString())
