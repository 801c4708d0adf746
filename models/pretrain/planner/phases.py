"""The phases of planning: reports each as it begins, and keeps its seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from edge_client.processes import process

STEPS = 5


@dataclass
class Phases:
    """Seconds of the phases so far.

    Attributes:
        seconds: of every phase: `seconds` on the clock, and `processor_seconds` of this process, without its workers'.
    """

    report: process.Report
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, what: str) -> Iterator[None]:
        """Reports `what` is done, and times it."""
        self.report(stage="plan", step=len(self.seconds), steps=STEPS, what=what)
        began, used = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.seconds[name] = {
                "seconds": time.perf_counter() - began,
                "processor_seconds": time.process_time() - used,
            }

    def end(self, **fields: Any) -> None:
        self.report(stage="plan", step=STEPS, steps=STEPS, **fields)

    def sentence(self) -> str:
        """Such as "Planned in 20.1 s: pieces 8.0, machine 2.1, search 0.3."."""
        parts = ", ".join(f"{name} {phase['seconds']:.1f}" for name, phase in self.seconds.items())
        return f"Planned in {sum(phase['seconds'] for phase in self.seconds.values()):.1f} s: {parts}."
