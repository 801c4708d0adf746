"""Personalised models: client rules by which each client has a model of its own.

Either some tensors are local: a client trains them and keeps them, and its update holds only the others, which are shared. The
global model keeps their initial values, from which every new client starts. Or a client trains a whole model of its own beside the
global one. What a client keeps is its client state; nothing of it is sent, and nothing that the server computes depends on local
tensors but through the shared ones.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np

from strategies.client_rules import (
    ClientRule,
    ControlVariates,
    Correction,
    DynamicRegularizer,
    FullBatch,
    MeasuredLoss,
    Pass,
    PlainSGD,
    Proximal,
)
from strategies.params import FloatArray, Params, Tensors, elementwise, materialize, overlay, select
from strategies.update import Aggregate, Streams

LOCAL = "local"
"""The stream of a client's local tensors in its state."""
PERSONAL = "personal"
"""The stream of a client's own model in its state."""


class NothingToShare(ValueError):
    """Patterns match no trainable tensor, or all of them; the message names the tensors."""


def find_local(patterns: Collection[str], trainable: Collection[str]) -> tuple[str, ...]:
    """Names of the trainable tensors that match a pattern, such as `fc.*`; upper and lower case differ.

    Raises:
        NothingToShare: none matches, or all do.
    """
    found = tuple(name for name in trainable if any(fnmatchcase(name, each) for each in patterns))
    if not found:
        raise NothingToShare(f"no trained tensor matches; there are {', '.join(trainable)}")
    if len(found) == len(trainable):
        raise NothingToShare(
            f"every trained tensor matches, and none is left to federate; there are {', '.join(trainable)}"
        )
    return found


def unmatched(patterns: Collection[str], trainable: Collection[str]) -> list[str]:
    """The patterns that no trainable tensor matches."""
    return [each for each in patterns if not any(fnmatchcase(name, each) for name in trainable)]


class PersonalRule(ClientRule, ABC):
    """A rule by which each client has a model of its own."""

    has_own_model: ClassVar[bool] = True

    @abstractmethod
    def personal(self, params: Tensors, client_state: Streams) -> Tensors:
        """The client's own model. `params`: the global one."""


class LocalRule(PersonalRule):
    """A rule by which the trainable tensors that match a pattern in `local` stay on the client."""

    local: tuple[str, ...]

    def shared(self, trainable: Collection[str]) -> tuple[str, ...]:
        kept = set(find_local(self.local, trainable))
        return tuple(name for name in trainable if name not in kept)

    def keep(self, ended: Sequence[Params]) -> dict[str, Params]:
        trained = ended[-1]
        return {LOCAL: {name: trained[name] for name in find_local(self.local, trained)}}

    def personal(self, params: Tensors, client_state: Streams) -> Tensors:
        return overlay(params, client_state.get(LOCAL, {}))


@dataclass(frozen=True)
class LocalTensors(LocalRule):
    """SGD on all tensors at once. Arivazhagan 2019 (FedPer), Algorithm 1; Li 2021 (FedBN), Algorithm 1."""

    local: tuple[str, ...]
    name: str = "local_tensors"

    def passes(
        self, params: Tensors, trainable: Sequence[str], broadcast: Streams, client_state: Streams
    ) -> tuple[Pass, ...]:
        return (Pass(Correction(), self.personal(params, client_state)),)


@dataclass(frozen=True)
class HeadThenBody(LocalRule):
    """First steps on the local tensors alone, then steps on the shared ones alone. Collins 2021 (FedRep), Algorithm 1.

    The task's work is that of the shared tensors. `head_epochs` >= 1.
    """

    local: tuple[str, ...]
    head_epochs: int
    name: str = "head_then_body"

    @property
    def earlier_epochs(self) -> tuple[int | None, ...]:
        return (self.head_epochs,)

    def passes(
        self, params: Tensors, trainable: Sequence[str], broadcast: Streams, client_state: Streams
    ) -> tuple[Pass, ...]:
        head = frozenset(find_local(self.local, trainable))
        own = self.personal(params, client_state)
        body = frozenset(trainable) - head
        return Pass(Correction(fixed=body), own, self.head_epochs), Pass(Correction(fixed=head))


@dataclass(frozen=True)
class PersonalModel(PersonalRule):
    """Beside the update, v ← v − lr · (∇f(v) + mu · (v − w)) with the client's own v and the global w. Li 2021 (Ditto), Algorithm 1.

    A new client's v starts from the w that it receives. `mu` is the paper's λ, >= 0.
    """

    mu: float
    name: str = "personal_model"

    @property
    def earlier_epochs(self) -> tuple[int | None, ...]:
        return (None,)

    def passes(
        self, params: Tensors, trainable: Sequence[str], broadcast: Streams, client_state: Streams
    ) -> tuple[Pass, ...]:
        # A step pulls towards where its pass started, v₀: mu · (v − w) = mu · (v − v₀) + mu · (v₀ − w).
        offset = None
        if own := client_state.get(PERSONAL):
            received = select({name: (params, name) for name in own})
            offset = materialize(elementwise(self._pull, own, received))
        personal = Pass(Correction(self.mu, offset), self.personal(params, client_state))
        return personal, Pass(Correction(), params)

    def keep(self, ended: Sequence[Params]) -> dict[str, Params]:
        return {PERSONAL: ended[0]}

    def personal(self, params: Tensors, client_state: Streams) -> Tensors:
        return overlay(params, client_state.get(PERSONAL, {}))

    def _pull(self, own: FloatArray, received: FloatArray) -> FloatArray:
        return np.asarray(np.float32(self.mu) * (own - received), np.float32)


CHOSEN = "chosen"
"""The stream that holds, as `model` [1], which model a client has trained."""


def cluster_stream(model: int) -> str:
    """The stream of model 1, 2, …; model 0 is the params."""
    return f"model_{model + 1}"


@dataclass(frozen=True)
class ClusterModels(PersonalRule):
    """Plain SGD from the model that fits the client's rows best. Ghosh 2020 (IFCA), Algorithm 1.

    The models other than the params begin as the params with the values of each tensor in another order: fresh ones with the same
    distribution, so that they differ. Until a round has changed them each client draws one by its seed, unlike in the paper: by their
    losses, which are then an accident, all clients may choose the same model and never leave it. The server says which it is in stream
    `CHOSEN`: 0 at the start, then 1.
    """

    clusters: int
    name: str = "cluster_models"

    def init(self, trainable: Tensors) -> Streams:
        start = materialize(trainable)
        streams: dict[str, Params] = {CHOSEN: {"model": np.zeros(1, np.float32)}}
        for model in range(1, self.clusters):
            streams[cluster_stream(model)] = {
                name: _permuted(value, [model, zlib.crc32(name.encode())]) for name, value in start.items()
            }
        return streams

    def candidates(self, params: Tensors, broadcast: Streams) -> tuple[Tensors, ...]:
        others = [broadcast[cluster_stream(model)] for model in range(1, self.clusters)]
        return (params, *(overlay(params, each) for each in others))

    def draw(self, broadcast: Streams, seed: int) -> int | None:
        if broadcast[CHOSEN]["model"][0]:
            return None
        return int(np.random.default_rng(seed).integers(self.clusters))

    def answer(self, broadcast: Streams) -> Streams:
        return {CHOSEN: broadcast[CHOSEN]}

    def advance(self, broadcast: Streams, aggregate: Aggregate, num_clients: int) -> Streams:
        return broadcast

    def stream_norm(self, broadcast: float, delta: float, num_steps: int, lr: float) -> float:
        return math.inf

    def personal(self, params: Tensors, client_state: Streams) -> Tensors:
        return params


def _permuted(value: FloatArray, seed: Sequence[int]) -> FloatArray:
    return np.random.default_rng(seed).permutation(value.ravel()).reshape(value.shape)


# -- all client rules, as a task message names them --


class UnknownRule(ValueError):
    """A task names an unknown client rule, or an invalid option of one."""


def from_options(options: Mapping[str, Any]) -> ClientRule:
    """The rule named in a task message.

    Raises:
        UnknownRule: the name is unknown; the device's software may be older than the coordinator's.
    """
    name = options.get("name")
    if not isinstance(name, str) or name not in _RULES:
        raise UnknownRule(f"client rule {name!r:.60} is unknown here; known: {', '.join(_RULES)}")
    parsers = _OPTIONS.get(name, {})
    return _RULES[name](**{key: parse(name, key, options.get(key)) for key, parse in parsers.items()})


def _number(rule: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UnknownRule(
            f"client rule {rule!r} comes with {key} = {value!r:.40}, expected a number, 0 or more"
        )
    return float(value)


def _count(rule: str, key: str, value: object) -> int:
    number = _number(rule, key, value)
    if number != int(number) or number < 1:
        raise UnknownRule(
            f"client rule {rule!r} comes with {key} = {value!r:.40}, expected a whole number, 1 or more"
        )
    return int(number)


def _patterns(rule: str, key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise UnknownRule(
            f"client rule {rule!r} comes with {key} = {value!r:.40}, expected patterns of names of tensors"
        )
    return tuple(value)


_RULES: dict[str, Callable[..., ClientRule]] = {
    "plain": PlainSGD,
    "proximal": Proximal,
    "control_variates": ControlVariates,
    "dynamic": DynamicRegularizer,
    "full_batch": FullBatch,
    "measured_loss": MeasuredLoss,
    "local_tensors": LocalTensors,
    "head_then_body": HeadThenBody,
    "personal_model": PersonalModel,
    "cluster_models": ClusterModels,
}
_OPTIONS: dict[str, dict[str, Callable[[str, str, object], Any]]] = {
    "proximal": {"mu": _number},
    "dynamic": {"alpha": _number},
    "local_tensors": {"local": _patterns},
    "head_then_body": {"local": _patterns, "head_epochs": _count},
    "personal_model": {"mu": _number},
    "cluster_models": {"clusters": _count},
}
"""Options of a rule by name, and what reads each."""
