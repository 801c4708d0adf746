"""Secure aggregation between a device and its coordinator: what a task says of it, and its messages (wire 1.4).

    POST /tasks/{task}/secure    the device's message of a stage    SecureMessage ► SecureReply

    keys           its public keys, with its certificate      ► the key list, with the certificates of its neighbours
    shares         encrypted shares of its secrets            ► those that its neighbours encrypted for it
    input          nothing: the masked vector is an upload    ► who is in the sum
    confirmation   its signature of that                      ► those of its neighbours
    reveal         shares of what is left to unmask           ► an empty message: the device is done

The messages themselves are those of `strategies.secagg`. The coordinator answers once the stage is over for the whole group; until then,
with nothing after `wait_seconds`, and the device asks again with the same message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from edge_client.wire.device import TaskMessage
from edge_client.wire.strict import bounded, parse_message
from strategies.privacy.noise.distributed import DistributedNoise, GroupNoise, Kind
from strategies.privacy.noised_vector import NoisedVector, count_values
from strategies.secagg.messages import HEADER_BYTES
from strategies.secagg.ring import FixedPoint, Ring
from strategies.secagg.terms import Terms
from strategies.secagg.threshold import FEWEST_CLIENTS, LEAST_THRESHOLD, MOST_CLIENTS
from strategies.secagg.vector import Shapes, UpdateVector


class SumVector(Protocol):
    """What the terms of a sum depend on: the ring of its vectors, and how many residues they have."""

    @property
    def ring(self) -> Ring: ...

    @property
    def length(self) -> int: ...


Stage = Literal["keys", "shares", "input", "confirmation", "reveal"]
STAGES: tuple[Stage, ...] = get_args(Stage)

_LONG: Mapping[str, Any] = {"max_characters": 100_000}
_PEM: Mapping[str, Any] = {"max_characters": 8192}


@dataclass(frozen=True)
class NoiseShare:
    """The share of noise that a device adds to its update before it masks it (`strategies.privacy.noise.distributed`).

    Attributes:
        noise_multiplier: standard deviation of the noise in a sum of the fewest clients, as a multiple of the task's `clip_norm`.
        rotation_seed: of the round's rotation of the group's updates, known to all.
    """

    kind: Kind
    noise_multiplier: float = bounded(1.0, 1e-6, 1e9)
    rotation_seed: int = bounded(0, 0, 2**32 - 1)


@dataclass(frozen=True)
class SecureTask:
    """What a train task says of secure aggregation (`TaskMessage.secure`).

    Attributes:
        group: number of the device's group in the round.
        clients: of the group. `degree`, `threshold`: as in `strategies.secagg.terms.Terms`.
        clip_norm: L2 norm to which the device scales down a longer update.
        value_bits, most_weight: as in `strategies.secagg.ring.FixedPoint`.
        noise: None: the sum has none.
    """

    group: int = bounded(0, 0, 2**31)
    clients: int = bounded(FEWEST_CLIENTS, FEWEST_CLIENTS, MOST_CLIENTS)
    degree: int = bounded(2, 2, MOST_CLIENTS)
    threshold: float = bounded(LEAST_THRESHOLD, LEAST_THRESHOLD, 1.0)
    clip_norm: float = bounded(1.0, 1e-30, 1e9)
    value_bits: int = bounded(16, 2, 32)
    most_weight: int = bounded(1, 1, 2**53)
    noise: NoiseShare | None = None

    @staticmethod
    def of(message: TaskMessage) -> SecureTask | None:
        """That of a task; None if its update is sent in the open.

        Raises:
            InvalidDocument: it is no such object.
        """
        if message.secure is None:
            return None
        return parse_message(SecureTask, message.secure, "task.secure")

    @property
    def point(self) -> FixedPoint:
        return FixedPoint(self.clients, self.clip_norm, self.value_bits, self.most_weight)

    def vector(self, shapes: Shapes) -> UpdateVector | NoisedVector:
        """How an update with tensors of these shapes is encoded.

        Raises:
            ValueError: the ring does not hold the noise.
        """
        if self.noise is None:
            return UpdateVector(shapes, self.point)
        group = GroupNoise(
            self.noise.kind, self.clip_norm, self.noise.noise_multiplier, self.value_bits, self.threshold
        )
        noise = DistributedNoise.in_group(group, self.clients, count_values(shapes))
        return NoisedVector(shapes, noise, self.noise.rotation_seed)

    def terms(self, run: str, number: int, base: str, vector: SumVector) -> Terms:
        """The terms of the group's sum in round `number`, whose model has the hash `base`."""
        return Terms(
            run=run,
            round=number,
            model_sha256=base,
            group=self.group,
            clients=self.clients,
            length=vector.length,
            ring_bits=vector.ring.bits,
            degree=self.degree,
            threshold=self.threshold,
        )

    def masked_bytes(self, vector: SumVector) -> int:
        """Size of a masked vector as it is uploaded."""
        return HEADER_BYTES + -(-vector.length * vector.ring.bits // 8)


@dataclass(frozen=True)
class SecureMessage:
    """POST /tasks/{task}/secure.

    Attributes:
        message: base64; empty for `input`.
        certificate: with the keys: the device's own, PEM, whose key has signed them.
        wait_seconds: how long the coordinator may hold the request.
    """

    stage: Stage
    message: str = field(metadata=_LONG)
    certificate: str = field(default="", metadata=_PEM)
    wait_seconds: float = bounded(0.0, 0.0, 60.0)


@dataclass(frozen=True)
class SecureReply:
    """The answer. `message`: base64; None: the stage is not over. `certificates`: with the key list, PEM by device."""

    message: str | None = None
    certificates: Mapping[str, str] = field(default_factory=dict)
