"""Stragglers of a simulated round: clients too slow for all of their local work. Li 2020 (FedProx), section 5.2.

When a round's time is over, a straggler has done a part of its epochs (or steps), which is drawn. Its update is taken as it is then,
or it counts as not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.rounds.plan import Task, generator
from edge_client.wire.device import TaskMessage


@dataclass(frozen=True)
class Stragglers:
    """`share`: of the clients of each round, to the nearest client; `drops`: whether their updates are left out."""

    share: float
    drops: bool
    seed: int

    def slow_down(self, tasks: Sequence[Task]) -> dict[int, Task]:
        """What the stragglers among the clients of a round do instead of their tasks, by position."""
        if not tasks:
            return {}
        rng = generator(self.seed, "stragglers", tasks[0].message.round)
        chosen = rng.choice(len(tasks), round(self.share * len(tasks)), replace=False)
        return {tasks[at].position: self._shorten(tasks[at]) for at in sorted(chosen.tolist())}

    def _shorten(self, task: Task) -> Task:
        message = task.message
        rng = generator(self.seed, f"straggler {message.client}", message.round)
        return replace(task, message=_with_part(message, rng.random()))


def _with_part(message: TaskMessage, part: float) -> TaskMessage:
    """The message with fewer epochs or steps, at least 1. `part`: in [0, 1)."""
    if message.epochs is not None:
        return replace(message, epochs=_part_of(message.epochs, part))
    assert message.steps is not None
    return replace(message, steps=_part_of(message.steps, part))


def _part_of(whole: int, part: float) -> int:
    """A number from 1 to `whole` - 1."""
    return 1 + int(part * (whole - 1))
