"""Who watches a long job, and what they hear."""

from __future__ import annotations

from typing import Protocol

from coordinator.rounds.engine import RoundRecord


class Progress(Protocol):
    """Hears how a run goes on."""

    def stage(self, words: str) -> None: ...

    def note(self, words: str) -> None: ...

    def step(self, done: int, total: int) -> None: ...

    def begin(self, rounds: int, done: int) -> None: ...

    def round(self, record: RoundRecord) -> None: ...


class Quiet:
    """Progress that nobody watches."""

    def stage(self, words: str) -> None: ...

    def note(self, words: str) -> None: ...

    def step(self, done: int, total: int) -> None: ...

    def begin(self, rounds: int, done: int) -> None: ...

    def round(self, record: RoundRecord) -> None: ...
