"""The pointer of one model: which slot is active, on trial or not, what failed, what was last reported.

Field names are the keys of `pointer.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from edge_client.wire.device import ReleaseEvaluation, ReleaseReport

SlotName = Literal["a", "b"]

FORMAT = 2


@dataclass(frozen=True)
class Slot:
    """A complete version that passed its self-test here.

    Attributes:
        rollout: the rollout that installed it.
        proved: it passed its trial and needs no other.
        manifest_sha256: as signed; the manifest holds the hash of the model file. Empty: installed by older software.
    """

    version: int
    rollout: str
    golden_accuracy: float | None = None
    evaluation: ReleaseEvaluation | None = None
    proved: bool = False
    manifest_sha256: str = ""


@dataclass(frozen=True)
class Failure:
    version: int
    code: str
    words: str


@dataclass(frozen=True)
class Pointer:
    """The state of one model on this device.

    Attributes:
        active: the slot that runs; None: no version runs.
        a, b: the versions they hold; None: nothing that can run.
        trial_starts: daemon starts since the active version was activated; None: it is not on trial.
        failed: versions that are not tried again unless forced, oldest first.
        last: the last report about a version other than the active one, or why the active one is kept against an order.
    """

    model: str
    active: SlotName | None = None
    a: Slot | None = None
    b: Slot | None = None
    trial_starts: int | None = None
    failed: tuple[Failure, ...] = ()
    last: ReleaseReport | None = None
    format: int = FORMAT

    @property
    def running(self) -> Slot | None:
        """The version in the active slot."""
        return self.slot(self.active) if self.active is not None else None

    @property
    def spare_name(self) -> SlotName:
        """The slot that the next installation writes."""
        return "b" if self.active == "a" else "a"

    @property
    def spare(self) -> Slot | None:
        return self.slot(self.spare_name)

    def slot(self, name: SlotName) -> Slot | None:
        return self.a if name == "a" else self.b

    def with_slot(self, name: SlotName, slot: Slot | None) -> Pointer:
        return replace(self, a=slot) if name == "a" else replace(self, b=slot)

    def failure(self, version: int) -> Failure | None:
        return next((each for each in self.failed if each.version == version), None)
