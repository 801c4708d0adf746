"""Devices that do with releases what a daemon does, over the device API, and a repository of releases in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.errors import Refusal
from coordinator.releases.repository import Release
from coordinator.releases.roles import ReleaseName
from edge_client.wire.device import ReleaseEvaluation, ReleaseOffer, ReleaseReport
from edge_client.wire.rollouts import NO_MODEL, Rollouts
from edge_client.wire.strict import parse
from tests.support.device_world import TestDevice


class MemoryReleases:
    """What exists, and who gets what, as the repository says it. `refuses`: signing fails, as with a lost key."""

    def __init__(self, *released: tuple[str, int]) -> None:
        self.released = [*released]
        self.tasks: dict[tuple[str, int], str] = {}
        self.documents: dict[str, Rollouts] = {}
        self.refuses = False

    def releases(self) -> Sequence[Release]:
        return [Release(ReleaseName(*each), "0" * 64, "0" * 64, 1) for each in self.released]

    def task_of(self, model: str, version: int) -> str | None:
        return (
            self.tasks.get((model, version), "classification") if (model, version) in self.released else None
        )

    def set_rollouts(self, model: str, document: Mapping[str, Any]) -> None:
        if self.refuses:
            raise Refusal(409, "no_key", "the online key is not here")
        plain = {**document, "rollouts": [dict(each) for each in document["rollouts"]]}
        self.documents[model] = parse(Rollouts, plain, "document")

    def says(self, offer: ReleaseOffer, device: str) -> bool:
        """Whether exactly this is signed for the device."""
        return any(
            (each.rollout, each.version, each.action, each.force)
            == (offer.rollout, offer.version, offer.action, offer.force)
            and each.is_for(device)
            for each in self.documents[offer.model].rollouts
        )


@dataclass
class RolloutDevice:
    """Installs what it is offered, if that is signed.

    Attributes:
        active: (rollout, version) that runs; None: no model yet.
        spare: what the other slot holds.
        accuracy: of each version on its 40 rows; versions not named have 0.9.
        broken: versions that fail their self-test here.
        offers: everything it was told, in order.
    """

    client: TestDevice
    releases: MemoryReleases
    model: str = "digits"
    active: tuple[str, int] | None = None
    spare: tuple[str, int] | None = None
    accuracy: Mapping[int, float] = field(default_factory=dict)
    broken: frozenset[int] = frozenset()
    failed: set[int] = field(default_factory=set)
    offers: list[ReleaseOffer] = field(default_factory=list)
    last: ReleaseReport | None = None
    kept: str = ""

    @property
    def id(self) -> str:
        return self.client.id

    @property
    def version(self) -> int | None:
        return None if self.active is None else self.active[1]

    def check_in(self) -> tuple[ReleaseOffer, ...]:
        """Reports, and does what it is told to."""
        answer = self.client.check_in(wire="1.3", releases=self.reports())
        for offer in answer.releases:
            self.offers.append(offer)
            if self.releases.says(offer, self.id):
                self._follow(offer)
        return answer.releases

    def reports(self) -> tuple[ReleaseReport, ...]:
        result = () if self.last is None else (self.last,)
        if self.active is None:
            return result
        rollout, version = self.active
        figures = ReleaseReport(
            rollout,
            self.model,
            version,
            "active",
            self.kept,
            golden_accuracy=self._of(version),
            evaluation=self._compared(version),
        )
        return (figures, *result)

    def _follow(self, offer: ReleaseOffer) -> None:
        held = [each[1] for each in (self.active, self.spare) if each is not None]
        if offer.version == NO_MODEL and any((self.model, each) in self.releases.released for each in held):
            self.kept = "not_withdrawn"
        elif offer.version == NO_MODEL:
            left, self.active, self.spare = self.active, None, None
            self.last = left and ReleaseReport(left[0], self.model, left[1], "rolled_back", "told")
        elif self.active is not None and self.active[1] == offer.version:
            self.active, self.last = (offer.rollout, offer.version), None
        elif offer.action == "roll_back":
            left = self.active  # what the other slot does not hold is fetched
            self.active, self.spare = (offer.rollout, offer.version), left
            self.last = left and ReleaseReport(left[0], self.model, left[1], "rolled_back", "told")
        elif offer.version in self.failed and not offer.force:
            self.last = ReleaseReport(
                offer.rollout, self.model, offer.version, "failed", "self_test", "before"
            )
        elif offer.version in self.broken:
            self.failed.add(offer.version)
            self.last = ReleaseReport(
                offer.rollout, self.model, offer.version, "failed", "self_test", "golden answers differ"
            )
        else:
            self.failed.discard(offer.version)
            self.active, self.spare = (offer.rollout, offer.version), self.active
            self.last = None

    def _compared(self, version: int) -> ReleaseEvaluation | None:
        before = None if self.spare is None else self._of(self.spare[1])
        right = self._of(version)
        return ReleaseEvaluation(
            40,
            round(40 * right),
            40 * (1 - right),
            None if before is None else round(40 * before),
            None if before is None else 40 * (1 - before),
        )

    def _of(self, version: int) -> float:
        return self.accuracy.get(version, 0.9)
