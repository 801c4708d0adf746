"""An event loop of asyncio whose time is virtual: when nothing is left to do now, it is at once the time of what comes next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "all tasks wait for something that never happens"
        self._loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Only for tasks that wait for time and for each other."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


def run_virtually(work: Coroutine[Any, Any, _T]) -> _T:
    """What a coroutine returns, which begins at time 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
