"""The files of a run that grow line by line, `rounds.csv` and `events.jsonl`, and its `schema.json`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from coordinator.rounds.events import LineFile
from coordinator.rounds.records import Checkpoint, RoundRecord, as_row
from edge_client.files import write_durably
from edge_client.wire import schema as schemas

DATA_KEYS = ("fingerprint", "classes", "input_shape", "task", "preview", "schema")
"""What a report says of the data."""

COLUMNS = tuple(field.name for field in fields(RoundRecord))


def open_lines(out: Path, checkpoint: Checkpoint | None) -> dict[str, LineFile]:
    """Both files, truncated to the checkpoint's round.

    A round's own line is appended after its commit and is kept. If the run was killed in between, the line in `rounds.csv`
    is restored from the checkpoint, whose `seconds` ends at the commit; the caller restores the event.
    """
    names = ("rounds.csv", "events.jsonl")
    if checkpoint is None:
        lines = {name: LineFile(out / name, keep_bytes=0) for name in names}
        lines["rounds.csv"].append(_csv_line(COLUMNS))
        return lines
    kept = {name: _line_after(out / name, checkpoint.offsets[name]) for name in names}
    kept["rounds.csv"] = kept["rounds.csv"] or _csv_line(_cells(checkpoint.record))
    lines = {name: LineFile(out / name, keep_bytes=checkpoint.offsets[name]) for name in names}
    for name, line in kept.items():
        if line is not None:
            lines[name].append(line)
    return lines


def append_round(lines: LineFile, record: RoundRecord) -> None:
    """Appends the line of a committed round."""
    lines.append(_csv_line(_cells(as_row(record))))


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The rows of `rounds.csv` as in `report.json`."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: json.loads(text) if text else None for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def read_start(path: Path) -> dict[str, Any]:
    """`test_loss` and `test_accuracy` of the initial model, from the first event."""
    with path.open(encoding="utf-8") as file:
        event = json.loads(file.readline())
    return {key: event[key] for key in ("test_loss", "test_accuracy")}


def _cells(row: Mapping[str, Any]) -> list[str]:
    values = (row.get(name) for name in COLUMNS)  # a checkpoint of an earlier version has fewer
    return ["" if value is None else json.dumps(value) for value in values]


def _csv_line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()


def _line_after(path: Path, offset: int) -> str | None:
    with path.open("rb") as file:
        file.seek(offset)
        line = file.readline()
    return line[:-1].decode() if line.endswith(b"\n") else None


def write_schema(out: Path, document: Mapping[str, Any] | None) -> None:
    """Writes `schema.json`, the data schema that belongs to the model; nothing without one, as of older runs."""
    if document is not None:
        text = schemas.from_document(document).to_json()
        write_durably(out / schemas.SCHEMA_NAME, text.encode())
