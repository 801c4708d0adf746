"""A task: what one client of a cohort does in a round."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.wire.messages import TaskMessage


@dataclass(frozen=True)
class Task:
    """One position of a cohort and the message to its client."""

    position: int
    message: TaskMessage
