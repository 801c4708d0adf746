"""A Strategy has four orthogonal parts, which act at two points of a round.

    state = strategy.init(params, trainable)
    each round:  fold = strategy.start(cohort_size); fold.add(position, strategy.transform(update)) …
                 params, state = strategy.apply(params, state, fold.finish(), num_clients)

Every part is a small pure value; an algorithm (`strategies.presets`) is a composition under a known name. The
client rules have their own module; here are the server's parts:

Aggregators make one delta of a cohort's updates. The weighted mean folds updates as they arrive, in float64 and in a
fixed tree over the cohort's canonical order (`strategies.summation_tree`), so it has the same bits whatever the order
of arrival, and whoever sums a block of `BLOCK` positions (`add_partial`) or any range of them (`strategies.relays`).
Updates on disk are recorded, not read: their mean is computed where the server optimizer reads it, piece by piece in
the same tree (`strategies.params`), so folding them keeps no tensor in memory.

Server optimizers move the global params by the aggregated delta, which is a negated pseudo-gradient (Reddi 2021,
Algorithm 1 and 2). Arithmetic is float64, results and state are float32. Tensors not in the delta (frozen ones) do not
change. If params or delta are on disk, results are computed as they are read, each in its own pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from strategies.client_rules import ClientRule, PlainSGD
from strategies.params import (
    FloatArray,
    Params,
    State,
    Tensors,
    cache_last_piece,
    elementwise,
    flatten,
    overlay,
    select,
    shape_of,
    subtree,
    unflatten,
    zeros_like,
)
from strategies.summation_tree import Nodes, PartialSum, SummationTree, plus, weigh
from strategies.update import Aggregate, Streams, Update, UpdateTransform, apply_all

BLOCK = 8
Weighting = Literal["examples", "uniform"]
Mode = Literal["sync", "async"]
"""Whether the clients of a round all start from its model, or each from the newest one when it becomes free."""


class Fold(Protocol):
    """An aggregation in progress over `cohort_size` canonical positions."""

    def add(self, position: int, update: Update) -> None:
        """Adds the accepted update of the client at `position`."""

    def add_partial(self, block: int, partial: PartialSum, last_block: int | None = None) -> None:
        """Adds the sum of all accepted updates of a block, or of the blocks of one node of the tree up to `last_block`, if the
        aggregator has `partial_sums`."""

    def finish(self) -> Aggregate:
        """The aggregate; positions without an update are skipped. Raises ValueError without any update."""


class Aggregator(Protocol):
    """Starts folds.

    `partial_sums`: how updates are weighted if their blocks may be summed apart; None: it needs each.
    `fewest_updates`: with fewer there is no aggregate.
    """

    @property
    def partial_sums(self) -> Weighting | None: ...

    @property
    def fewest_updates(self) -> int: ...

    def start(self, cohort_size: int) -> Fold: ...


@dataclass(frozen=True)
class WeightedMean:
    """Mean of updates weighted by example count, or unweighted with `weighting="uniform"`.

    In memory it holds the updates of incomplete blocks (one, if results arrive in canonical order) and a float64 model
    for each level of the tree, log2(n / `BLOCK`). Extra streams are always averaged unweighted, as SCAFFOLD's control
    variates require (Karimireddy 2020, Algorithm 1, line 17). McMahan 2017, Algorithm 1.
    """

    weighting: Weighting = "examples"

    @property
    def partial_sums(self) -> Weighting:
        return self.weighting

    @property
    def fewest_updates(self) -> int:
        return 1

    def start(self, cohort_size: int) -> MeanFold:
        return MeanFold(self.weighting, cohort_size)


class MeanFold:
    """The mean of the positions [start, stop) of a cohort, summed in its tree."""

    def __init__(self, weighting: Weighting, stop: int, start: int = 0) -> None:
        self._weighting = weighting
        self._start, self._stop = start, stop
        self._received: dict[int, dict[int, Update]] = {}
        self._closed: dict[int, Nodes] = {}
        self._next_block = start // BLOCK
        self._tree = SummationTree(plus, start)

    def add(self, position: int, update: Update) -> None:
        if not self._start <= position < self._stop:
            raise ValueError(f"position {position} is outside the cohort of {self._stop}")
        block = position // BLOCK
        received = self._received.get(block, {})
        if position in received or block < self._next_block or block in self._closed:
            raise ValueError(f"position {position} was already folded")
        self._received[block] = received | {position: update}
        first = max(block * BLOCK, self._start)
        if len(self._received[block]) == min((block + 1) * BLOCK, self._stop) - first:
            self._close(block)

    def add_partial(self, block: int, partial: PartialSum, last_block: int | None = None) -> None:
        blocks = range(block, (block if last_block is None else last_block) + 1)
        for each in blocks:
            if not self._start <= each * BLOCK < self._stop:
                raise ValueError(f"block {each} is outside the cohort of {-(-self._stop // BLOCK)} blocks")
            if each in self._received or each < self._next_block or each in self._closed:
                raise ValueError(f"updates of block {each} were already folded")
        for each in blocks[1:]:
            self._closed[each] = ()
        self._add_nodes(block, [(block * BLOCK, partial)])

    def nodes(self) -> Nodes:
        """The sums of the largest nodes of the tree within [start, stop), each with a position in it."""
        while self._next_block * BLOCK < self._stop:
            self._close(self._next_block)
        return self._tree.nodes(self._stop)

    def finish(self) -> Aggregate:
        return mean_of_nodes(self.nodes())

    def _close(self, block: int) -> None:
        tree = SummationTree(plus, self._start)
        for position, update in sorted(self._received.pop(block, {}).items()):
            tree.add(position, weigh(update, self._weighting))
        self._add_nodes(block, tree.nodes(min((block + 1) * BLOCK, self._stop)))

    def _add_nodes(self, block: int, nodes: Nodes) -> None:
        """Adds to the tree every block whose turn has come."""
        self._closed[block] = nodes
        while self._next_block in self._closed:
            for position, partial in self._closed.pop(self._next_block):
                self._tree.add(position, partial)
            self._next_block += 1


def mean_of_nodes(nodes: Nodes, divisor: float | None = None) -> Aggregate:
    """The mean of a cohort, given the sums of nodes of its tree in order. Raises ValueError without any update.

    `divisor`: of the sum of the deltas; None: the sum of the weights.
    """
    tree = SummationTree(plus)
    for position, partial in nodes:
        tree.add(position, partial)
    total = tree.total()
    if total is None:
        raise ValueError("no update to aggregate: every position of the cohort was skipped")
    return _mean(total, total.weight if divisor is None else divisor)


def _mean(total: PartialSum, divisor: float) -> Aggregate:
    return Aggregate(
        delta=elementwise(lambda value: value / divisor, total.delta),
        extras={
            stream: elementwise(lambda value: value / total.num_updates, tensors)
            for stream, tensors in total.extras.items()
        },
        num_updates=total.num_updates,
        num_examples=total.num_examples,
        train_loss=total.loss_sum / total.num_examples,
    )


class ServerOptimizer(Protocol):
    """`init` creates the state for trainable params; `step` applies one aggregated delta.

    `share`: of the whole population in the aggregate.
    """

    def init(self, trainable: Tensors) -> State: ...

    def step(self, params: Tensors, delta: Tensors, state: State, share: float) -> tuple[Tensors, State]: ...


@dataclass(frozen=True)
class SGD:
    """x ← x + server_lr · v with v ← momentum · v + Δ.

    `momentum = 0, server_lr = 1` is FedAvg (McMahan 2017); with momentum FedAvgM (Hsu 2019, section 4.3). With `nesterov` the step is
    x ← x + server_lr · (Δ + momentum · v), as in `torch.optim.SGD` (Sutskever 2013).
    """

    server_lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def init(self, trainable: Tensors) -> State:
        if not self.momentum:
            return State()
        return State(arrays=flatten({"momentum": zeros_like(trainable)}))

    def step(self, params: Tensors, delta: Tensors, state: State, share: float) -> tuple[Tensors, State]:
        if not self.momentum:
            return overlay(params, elementwise(self._moved, delta, params)), state
        previous = subtree(state.arrays, "momentum")
        velocity = elementwise(lambda d, v: self.momentum * v.astype(np.float64) + d, delta, previous)
        step = velocity
        if self.nesterov:
            delta = cache_last_piece(delta)
            step = elementwise(lambda d, v: d + self.momentum * v, delta, velocity)
        moved = elementwise(self._moved, step, params)
        return overlay(params, moved), State(arrays=flatten({"momentum": elementwise(_float32, velocity)}))

    def _moved(self, velocity: FloatArray, x: FloatArray) -> FloatArray:
        return _float32(x.astype(np.float64) + self.server_lr * velocity)


AdaptiveKind = Literal["adagrad", "adam", "yogi"]


@dataclass(frozen=True)
class Adaptive:
    """x ← x + server_lr · m / (√v + tau), Reddi 2021, Algorithm 2.

    m ← beta1·m + (1−beta1)·Δ; v by `kind`: adagrad v + Δ²; adam beta2·v + (1−beta2)·Δ²;
    yogi v − (1−beta2)·Δ²·sign(v − Δ²). As in the paper there is no bias correction and v starts at tau².

    With `flower_form` v starts at 0 and Adam's step is scaled by √(1−beta2^(t+1)) / (1−beta1^(t+1)) in
    round t = 1, 2, …, as in `flwr.serverapp.strategy` 1.41, for parity with runs made there.
    """

    kind: AdaptiveKind
    server_lr: float
    beta1: float
    beta2: float
    tau: float
    flower_form: bool = False

    def init(self, trainable: Tensors) -> State:
        start = 0.0 if self.flower_form else self.tau**2
        second = {name: np.full(shape_of(trainable, name), start, np.float32) for name in trainable}
        return State(arrays=flatten({"first": zeros_like(trainable), "second": second}), values={"step": 0})

    def step(self, params: Tensors, delta: Tensors, state: State, share: float) -> tuple[Tensors, State]:
        step = int(state.values["step"] or 0) + 1
        rate = self.server_lr * self._bias_correction(step)

        def move(m: FloatArray, v: FloatArray, x: FloatArray) -> FloatArray:
            return _float32(x.astype(np.float64) + rate * m / (np.sqrt(v) + self.tau))

        delta = cache_last_piece(delta)  # a step reads each piece twice, for m and for v
        m = elementwise(self._first_moment, delta, subtree(state.arrays, "first"))
        v = elementwise(self._second_moment, delta, subtree(state.arrays, "second"))
        moved = overlay(params, elementwise(move, m, v, params))
        arrays = flatten({"first": elementwise(_float32, m), "second": elementwise(_float32, v)})
        return moved, State(arrays=arrays, values={"step": step})

    def _first_moment(self, delta: FloatArray, first: FloatArray) -> FloatArray:
        return self.beta1 * first.astype(np.float64) + (1 - self.beta1) * delta

    def _second_moment(self, delta: FloatArray, second: FloatArray) -> FloatArray:
        return _SECOND_MOMENT[self.kind](second.astype(np.float64), delta, self.beta2)

    def _bias_correction(self, step: int) -> float:
        if not (self.flower_form and self.kind == "adam"):
            return 1.0
        return float(np.sqrt(1 - self.beta2 ** (step + 1)) / (1 - self.beta1 ** (step + 1)))


_Moment = Callable[[np.ndarray, np.ndarray, float], np.ndarray]
_SECOND_MOMENT: dict[AdaptiveKind, _Moment] = {
    "adagrad": lambda v, d, beta2: v + d**2,
    "adam": lambda v, d, beta2: beta2 * v + (1 - beta2) * d**2,
    "yogi": lambda v, d, beta2: v - (1 - beta2) * d**2 * np.sign(v - d**2),
}


def _float32(values: FloatArray) -> FloatArray:
    return values.astype(np.float32)


@dataclass(frozen=True)
class ClipNorm:
    """Scales a delta whose L2 norm over all tensors exceeds `max_norm` down to it. McMahan 2018, section 3.1."""

    max_norm: float

    def apply(self, update: Update, state: Streams) -> tuple[Update, dict[str, Params]]:
        if update.norm <= self.max_norm:
            return update, {}
        factor = np.float32(self.max_norm / update.norm)
        return replace(update, delta=elementwise(lambda value: value * factor, update.delta)), {}


def clipping(norm: float) -> tuple[UpdateTransform, ...]:
    """The transforms of option `clip_norm`."""
    return (ClipNorm(norm),) if norm > 0 else ()


@dataclass(frozen=True)
class Strategy:
    """A federated algorithm: client rule, update transforms, aggregator, server optimizer.

    Attributes:
        modes: how its rounds may follow each other, the usual way first.
        mixes_models: whether a stale update counts as the difference of the client's model to the newest one, not to the one that the
            client received.
        conflicts: options of local training (`local.momentum`) that it does not go with, and why.
        local_defaults: options of local training that it sets unless the experiment does.
        class_models: params, before round 1, of device classes whose model is not the run's own.
    """

    name: str
    client_rule: ClientRule = PlainSGD()  # noqa: RUF009 - a frozen value
    transforms: tuple[UpdateTransform, ...] = ()
    aggregator: Aggregator = WeightedMean()
    server_optimizer: ServerOptimizer = SGD()
    modes: tuple[Mode, ...] = ("sync", "async")
    mixes_models: bool = False
    conflicts: Mapping[str, str] = field(default_factory=dict, hash=False)
    local_defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    class_models: Streams = field(default_factory=dict, hash=False)

    def init(self, params: Tensors, trainable: Collection[str]) -> State:
        """State before round 1, for the tensors of `params` named in `trainable`: those that clients send."""
        learned = select({name: (params, name) for name in params if name in trainable})
        optimizer = self.server_optimizer.init(learned)
        return _state(optimizer, self.client_rule.init(learned), self.class_models)

    def broadcast(self, state: State) -> Streams:
        """The streams that accompany the params of the coming round, such as SCAFFOLD's control variate."""
        return unflatten(subtree(state.arrays, "rule"))

    def models(self, state: State) -> Streams:
        """The params of each device class whose model is not the run's own."""
        return unflatten(subtree(state.arrays, "models"))

    def start(self, cohort_size: int) -> Fold:
        """A fold over the canonical positions of a cohort."""
        return self.aggregator.start(cohort_size)

    def transform(self, update: Update) -> Update:
        """The update after every transform, in order."""
        return apply_all(self.transforms, update, {})[0]

    def apply(
        self, params: Tensors, state: State, aggregate: Aggregate, num_clients: int
    ) -> tuple[Tensors, State]:
        """Params and state after the round. `num_clients` is the whole population, not the cohort.

        If their inputs are on disk, both are computed as they are read.
        """
        before = State(subtree(state.arrays, "optimizer"), state.values)
        share = aggregate.num_updates / num_clients
        moved, after = self.server_optimizer.step(params, aggregate.delta, before, share)
        streams = self.client_rule.advance(self.broadcast(state), aggregate, num_clients)
        models = {name: _add(params, aggregate.extras[name]) for name, params in self.models(state).items()}
        return moved, _state(after, streams, models)


def _add(params: Tensors, delta: Tensors) -> Tensors:
    return SGD().step(params, delta, State(), 1.0)[0]


def _state(optimizer: State, streams: Streams, models: Streams) -> State:
    parts = {"optimizer": optimizer.arrays, "rule": flatten(streams), "models": flatten(models)}
    return State(flatten(parts), optimizer.values)
