"""The loss curve of a training, one JSON object a step, in a file that survives the processes that write it.

    {"step": 12, "loss": 3.1, "lr": 0.004, "rows_per_second": 900.0, "plan": "dp=2", "restart": 0}

`step` counts from 1. A training that resumes from a checkpoint truncates the file there and appends, so the curve has
every step exactly once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.files import write_durably

NAME = "curve.jsonl"

REPORTS = 200
"""Approximate number of progress reports of a training."""


@dataclass(frozen=True)
class Curve:
    """The file at `path`; one process writes it."""

    path: Path

    def cut(self, step: int) -> None:
        """Drops every point after `step`."""
        kept = [json.dumps(point) + "\n" for point in self.points() if point["step"] <= step]
        write_durably(self.path, "".join(kept).encode())

    def add(self, first: int, losses: list[float], rates: list[float], **about: object) -> None:
        """Appends `losses` from step `first` on, durably: a later checkpoint relies on them."""
        lines = [
            json.dumps({"step": first + number, "loss": loss, "lr": rate, **about}) + "\n"
            for number, (loss, rate) in enumerate(zip(losses, rates, strict=True))
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())

    def points(self) -> Iterator[dict[str, Any]]:
        """Every complete line; a killed process may have left half of the last one."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return

    def losses(self) -> list[float]:
        return [float(point["loss"]) for point in self.points()]
