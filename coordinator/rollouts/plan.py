"""Who is in a rollout, and in which phase: fixed when it is made.

    devices ─► those that the filter admits ─► in the order of salted hashes ─► cut at 1, 10, 50, 100 %

The order is that of sha256(salt, id): as good as random, the same on every machine, and another one for every
rollout, so that not always the same devices go first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from coordinator.errors import UserError
from coordinator.fleets.matching import Candidate
from edge_client.wire.device import negotiated, version

DEFAULT_PHASES = (1.0, 10.0, 50.0, 100.0)
MOST_DEVICES = 100_000
"""Of a rollout: as many as one signed document names (`edge_client.wire.rollouts.LARGEST_DOCUMENT_BYTES`)."""
RELEASES_SINCE = (1, 3)
"""The wire version that brought releases."""


@dataclass(frozen=True)
class Filter:
    """Which devices a rollout is for. What is left empty admits all.

    Attributes:
        groups: one of these, as given with the enrolment token.
        labels: all of these, as the device reports them.
        device_classes: one of these.
        runtimes: at least one of these works on it.
        ids: one of these.
    """

    groups: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    device_classes: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()


def admits(wanted: Filter, device: Candidate) -> bool:
    """Whether the device is one of these. It must have checked in once, with a version of the wire that knows releases."""
    report = device.report
    if device.state != "active" or report is None or not knows_releases(report.wire):
        return False
    return (
        (not wanted.groups or device.group in wanted.groups)
        and (not wanted.ids or device.id in wanted.ids)
        and (not wanted.device_classes or report.device_class in wanted.device_classes)
        and (not wanted.runtimes or any(name in report.runtimes for name in wanted.runtimes))
        and all(report.labels.get(key) == value for key, value in wanted.labels.items())
    )


def knows_releases(wire: str) -> bool:
    """Whether a device that speaks this version, as it says, hears of releases."""
    try:
        agreed = negotiated(version(wire))
    except ValueError:
        return False
    return agreed is not None and agreed >= RELEASES_SINCE


def require_phases(percents: Sequence[float]) -> tuple[float, ...]:
    """Growing shares of the members in percent, the last at most 100.

    Raises:
        UserError: they are not.
    """
    rising = all(before < after for before, after in pairwise(percents))
    if not percents or not rising or not 0 < percents[0] <= percents[-1] <= 100 or len(percents) > 50:
        raise UserError(
            f"phases {','.join(f'{each:g}' for each in percents[:60])!r}: expected growing percentages above 0 "
            "and up to 100, such as 1,10,50,100"
        )
    return tuple(float(each) for each in percents)


def phases(devices: Iterable[str], percents: Sequence[float], salt: str) -> list[list[str]]:
    """The members of each phase, without those of the phases before it; in all, the last percentage of `devices`.

    Phase k ends at the ceiling of its share, so that the first has a device wherever there is one. In a small
    fleet a later phase may be empty.
    """
    ordered = sorted(set(devices), key=lambda device: _key(salt, device))
    ends = [math.ceil(len(ordered) * percent / 100) for percent in percents]
    return [ordered[start:end] for start, end in pairwise([0, *ends])]


def _key(salt: str, device: str) -> tuple[bytes, str]:
    return hashlib.sha256(f"{salt}:{device}".encode()).digest(), device
