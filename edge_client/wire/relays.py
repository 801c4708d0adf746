"""What a relay and the coordinator say to each other, besides the device API, which the relay also uses (wire 1.4).

A relay is an enrolled device. It forwards the requests of its devices with the header `x-fedloop-device`, and answers one of them
itself: an upload of a run whose updates go through relays. It keeps such an update, and the coordinator gets its figures.

    GET  /relay/tasks/{task}             for a device: what its result must contain                ► RelayedTask
    POST /relay/tasks/{task}/accepted    for a device: the relay has its update on disk            Figures ►
    POST /relay/tasks/{task}/rejected    for a device: the relay has rejected its update             Refused ►
    POST /relay/certificate              the certificate with which it answers its devices         CertificateRequest ► Certificate

Once the round is closed, the relay's next check-in gets a task of kind `fold` (`FoldRequest`), whose result it uploads as any other: the
tensors are `<n>/delta/<tensor>` and `<n>/<stream>/<tensor>`, float64, for the n-th result of `strategies.relays.fold_part`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_client.wire.device import TaskOffer
from edge_client.wire.strict import bounded

ON_BEHALF = "x-fedloop-device"
"""Header that names the device whose request a relay makes."""

URL_LABEL = "relay_url"
"""Label of a relay's check-in: where its devices reach it."""

RELAY_PORT = 8444
"""On which a relay listens if nothing else is said."""

_PEM: Mapping[str, Any] = {"max_characters": 8192}


@dataclass(frozen=True)
class CertificateRequest:
    """`csr`: PEM, for the key of the relay's server; the coordinator chooses the names."""

    csr: str = field(metadata=_PEM)


@dataclass(frozen=True)
class Certificate:
    """`certificate`: PEM, signed by the CA that devices trust."""

    certificate: str


@dataclass(frozen=True)
class RelayedTask:
    """A train task of a device of the relay.

    Attributes:
        offer: as the device got it.
        kept: whether the relay keeps its update; otherwise it forwards it.
        expected: an `Expected` as JSON.
    """

    offer: TaskOffer
    kept: bool
    expected: Mapping[str, Any]


@dataclass(frozen=True)
class Figures:
    """An update that the relay has checked and keeps; all but its tensors.

    Attributes:
        sha256: of the update as it is kept.
        sent_sha256, sent_bytes: of what the device has sent.
        norm: L2 norm of the delta; `streams`: of the other streams.
    """

    sha256: str
    sent_sha256: str
    sent_bytes: int = bounded(0, 1, 2**53)
    num_examples: int = bounded(0, 1, 2**53)
    num_steps: int = bounded(0, 1, 2**53)
    train_loss: float = 0.0
    norm: float = bounded(0.0, 0.0, float("inf"))
    streams: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """An update to fold: its position in the cohort, and the task that it answers."""

    position: int
    task: str


@dataclass(frozen=True)
class FoldRequest:
    """What a relay is to fold: the positions [start, stop) of the cohort, of which `members` count.

    `strategy`, `options`: by name, for its transforms and its aggregator. `weight_limit`: most examples that an update counts for.
    """

    strategy: str
    options: Mapping[str, Any]
    start: int
    stop: int
    weight_limit: int | None
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Refused:
    """POST /relay/tasks/{task}/rejected, for a device: the relay has rejected its update. `reason` is a stable code."""

    reason: str
    words: str = field(metadata={"for_people": True})
