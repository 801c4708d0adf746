"""The loss curve of a training, one JSON object a step, in a file that survives the processes that write it.

    {"step": 12, "loss": 3.1, "lr": 0.004, "rows_per_second": 900.0, "plan": "dp=2", "restart": 0, "validation_loss": 3.2}

`step` counts from 1; `validation_loss` is there where the model was scored after the step. A training that resumes from a checkpoint truncates the file there and appends, so the curve has
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

    def add(
        self,
        first: int,
        losses: list[float],
        rates: list[float],
        validation_loss: float | None = None,
        *,
        durable: bool = True,
        **about: object,
    ) -> None:
        """Appends `losses` from step `first` on. Before a checkpoint, which relies on all of them, it must be `durable`.

        `validation_loss`: after the last of these steps.
        """
        points = [
            {"step": first + number, "loss": loss, "lr": rate, **about}
            for number, (loss, rate) in enumerate(zip(losses, rates, strict=True))
        ]
        if validation_loss is not None:
            points[-1]["validation_loss"] = validation_loss
        lines = [json.dumps(point) + "\n" for point in points]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            if durable:
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

    def validation_losses(self) -> dict[int, float]:
        """By step, where the model was scored."""
        return {
            int(point["step"]): float(point["validation_loss"])
            for point in self.points()
            if point.get("validation_loss") is not None
        }
