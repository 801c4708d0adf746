"""The members of a rollout and their phases, fixed when it is created.

    devices ─► those that the filter admits ─► in the order of salted hashes ─► cut at 1, 10, 50, 100 %

The order is that of sha256(salt, id): effectively random, the same on every machine, and different for every rollout, so
that the first phase does not always hit the same devices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from coordinator.errors import UserError
from coordinator.scheduling.matching import Candidate
from edge_client.wire.device import CheckIn, supports

DEFAULT_PHASES = (1.0, 10.0, 50.0, 100.0)
MAX_DEVICES = 100_000
"""In one rollout: as many as one signed document can name (`edge_client.wire.rollouts.LARGEST_DOCUMENT_BYTES`)."""
RELEASES_SINCE = (1, 3)
"""The wire version that introduced releases."""


FilterText = Annotated[str, Field(max_length=200, pattern="^[^\\x00]*$")]
"""PostgreSQL has no text with NUL."""


@dataclass(frozen=True)
class Filter:
    """Which devices a rollout is for. An empty field admits all.

    Attributes:
        groups: one of these, from the device's enrolment token.
        labels: all of these, as the device reports them.
        device_classes: one of these.
        runtimes: at least one of these works on it; `litert` and `tflite-runtime` run released models.
        ids: one of these.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - for requests to the API

    groups: tuple[FilterText, ...] = ()
    labels: Mapping[FilterText, FilterText] = field(default_factory=dict)
    device_classes: tuple[FilterText, ...] = ()
    runtimes: tuple[FilterText, ...] = ()
    ids: tuple[FilterText, ...] = ()


def admits(wanted: Filter, device: Candidate) -> bool:
    """Whether the filter admits the device, which must have checked in with a wire version that supports releases."""
    report = device.report
    if device.state != "active" or report is None or not supports_releases(report.wire):
        return False
    return (
        (not wanted.groups or device.group in wanted.groups)
        and (not wanted.ids or device.id in wanted.ids)
        and (not wanted.device_classes or report.device_class in wanted.device_classes)
        and (not wanted.runtimes or not _runtimes(report).isdisjoint(wanted.runtimes))
        and all(report.labels.get(key) == value for key, value in wanted.labels.items())
    )


def _runtimes(report: CheckIn) -> set[str]:
    """The runtimes that work on the device, with the one that runs released models in place of the one that trains."""
    if not report.release_runtime:
        return set(report.runtimes)
    return {name for name in report.runtimes if name != "litert"} | {report.release_runtime}


def supports_releases(wire: str) -> bool:
    """Whether a device with this wire version supports releases."""
    return supports(wire, RELEASES_SINCE)


def require_phases(percents: Sequence[float]) -> tuple[float, ...]:
    """The same increasing percentages of the members, the last at most 100.

    Raises:
        UserError: they are not increasing, or not in (0, 100].
    """
    rising = all(before < after for before, after in pairwise(percents))
    if not percents or not rising or not 0 < percents[0] <= percents[-1] <= 100 or len(percents) > 50:
        raise UserError(
            f"phases {','.join(f'{each:g}' for each in percents[:60])!r}: expected increasing percentages above 0 "
            "and up to 100, such as 1,10,50,100"
        )
    return tuple(float(each) for each in percents)


def phases(devices: Iterable[str], percents: Sequence[float], salt: str) -> list[list[str]]:
    """The members that each phase adds; together they are the last percentage of `devices`.

    Phase k ends at the ceiling of its share, so the first phase has a device whenever there is one. In a small fleet a
    later phase may be empty.
    """
    ordered = sorted(
        set(devices), key=lambda device: (hashlib.sha256(f"{salt}:{device}".encode()).digest(), device)
    )
    ends = [math.ceil(len(ordered) * percent / 100) for percent in percents]
    return [ordered[start:end] for start, end in pairwise([0, *ends])]
