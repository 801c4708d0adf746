"""Records of a run: scores, one line per round for the report, the state after a round, and checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.json_values import finite
from strategies.params import Params, State, Tensors


@dataclass(frozen=True)
class Score:
    """The global model on held-out rows, None if there are none.

    Attributes:
        clients: accuracy per client with such rows.
        metric: the figure that the rounds are compared by; None if that is the loss, or if the rows do not define it.
    """

    loss: float | None
    accuracy: float | None
    clients: Mapping[str, float]
    metric: float | None = None

    def compared(self, by_metric: bool) -> float | None:
        """What the rounds are compared by, lower is better: the loss, or the metric with its sign changed."""
        if not by_metric:
            return self.loss
        return None if self.metric is None else -self.metric


UNSCORED = Score(None, None, {})
"""Nothing was tested."""


@dataclass(frozen=True)
class RoundRecord:
    """One line of the report. What was not tested is None.

    Attributes:
        accepted: updates that entered the aggregate.
        silent: clients that did not answer, or answered after the round was over.
        client_accuracy_min, client_accuracy_median, client_accuracy_max: over single clients.
        seconds: of the whole round, evaluation and commit included.
        rejections: results by reason, `aggregation.OUTLIER` and `engine.MODEL_NOT_FINITE` among them.
        test_metric: the figure that the rounds are compared by, if it is not the loss.
        simulated_seconds: virtual time that the round took.
        bytes_up_uncompressed: of the tensors of all results, if a code wrote them.
        bytes_down_uncompressed: of the whole model for each client, if a code wrote what it got.
        staleness_mean, staleness_max: of the accepted updates of an asynchronous run: versions that the model had moved on since
            their clients received it.
        epsilon: that the rounds so far have spent; clip_norm: of this round. Under differential privacy only.
    """

    round: int
    selected: int
    accepted: int
    rejected: int
    silent: int
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    client_accuracy_min: float | None
    client_accuracy_median: float | None
    client_accuracy_max: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    rejections: Mapping[str, int]
    test_metric: float | None = None
    simulated_seconds: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    bytes_up_uncompressed: int | None = None
    bytes_down_uncompressed: int | None = None
    epsilon: float | None = None
    clip_norm: float | None = None


@dataclass(frozen=True)
class Best:
    """The best round so far.

    Attributes:
        round: 0 before the first with a finite score.
        loss: its value of `Score.compared`, None before the first.
        waited: scored rounds since then.
        params: its params if the run keeps them.
    """

    round: int = 0
    loss: float | None = None
    waited: int = 0
    params: Tensors | None = None

    def after(self, number: int, loss: float | None, params: Tensors | None) -> Best:
        """The best round once round `number` has this value and these params; of equal values the first."""
        if loss is None:
            return self
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            return Best(number, loss, 0, params)
        return replace(self, waited=self.waited + 1)


@dataclass(frozen=True)
class Training:
    """A client at work in an asynchronous simulation.

    Attributes:
        round: in which it started, from the model that this round began with.
        order: of all starts of the run, counted from 0.
        ends_at: virtual time at which it answers, or is given up if it does not.
        silence: why it will not answer; None: it will.
    """

    client: str
    round: int
    order: int
    ends_at: float
    silence: str | None


@dataclass(frozen=True)
class InFlight:
    """Virtual time after a round of a simulation, and in an asynchronous one the clients at work.

    Attributes:
        seconds: virtual time since the run began.
        started: clients that have started in the run.
        bases: params that they started from, by round.
    """

    seconds: float = 0.0
    started: int = 0
    clients: tuple[Training, ...] = ()
    bases: Mapping[int, Tensors] = field(default_factory=dict)


NOBODY = InFlight()
"""No client is at work."""


@dataclass(frozen=True)
class Held:
    """What clients of a run with a code on the downlink hold (`rounds.downlink`).

    Attributes:
        params: those of the newest version.
        first: round whose model was sent as it is.
        sizes: bytes of the message of each round after it.
        versions: newest version that a client is known to hold, by client.
    """

    params: Tensors
    first: int
    sizes: tuple[int, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)

    def missing_bytes(self, client: str) -> int | None:
        """Bytes of all messages that a client has not got; None if messages alone do not help it."""
        version = self.versions.get(client, 0)
        return sum(self.sizes[version - self.first :]) if version >= self.first else None


@dataclass(frozen=True)
class RunState:
    """Params and strategy state after `round`, the best round until then, the clients at work, and what clients hold."""

    round: int
    params: Tensors
    strategy: State
    best: Best = Best()
    in_flight: InFlight = NOBODY
    held: Held | None = None

    def result(self, keep_best: bool) -> tuple[int, Tensors]:
        """The round whose model is the run's result if the run ends here, and its params."""
        if keep_best and self.best.params is not None:
            return self.best.round, self.best.params
        return self.round, self.params


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round.

    Attributes:
        round: last finished round, 0 before the first.
        record: that round's line of the report.
        offsets: sizes in bytes of the line files at the commit, by file name.
        identity: values that must be the same on resume, such as the data's fingerprint.
    """

    round: int
    params: Tensors
    state: State
    record: Mapping[str, Any]
    offsets: Mapping[str, int]
    identity: Mapping[str, str]
    client_states: Mapping[str, Mapping[str, Params]] = field(default_factory=dict)
    best: Best = Best()
    in_flight: InFlight = NOBODY
    held: Held | None = None

    @property
    def run_state(self) -> RunState:
        """The state from which the run goes on."""
        return RunState(self.round, self.params, self.state, self.best, self.in_flight, self.held)


def as_row(record: RoundRecord) -> dict[str, Any]:
    """The record as JSON values; a non-finite number, such as the loss of a diverged model, becomes None."""
    return {name: finite(value) for name, value in vars(record).items()}


def totals(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rejections by reason and bytes, over all rounds. `uplink`, `downlink`: only of a run with a code there."""
    rejections: Counter[str] = Counter()
    for row in rounds:
        rejections.update(row["rejections"])
    up, down = (sum(row[f"bytes_{way}"] for row in rounds) for way in ("up", "down"))
    return {
        "rejections": dict(sorted(rejections.items())),
        "bytes_up": up,
        "bytes_down": down,
        **_compressed("uplink", up, (row.get("bytes_up_uncompressed") for row in rounds)),
        **_compressed("downlink", down, (row.get("bytes_down_uncompressed") for row in rounds)),
    }


def _compressed(name: str, sent: int, uncompressed: Iterable[int | None]) -> dict[str, Any]:
    """What a code has saved; empty if there was none."""
    plain = sum(each or 0 for each in uncompressed)
    if not sent or not plain:
        return {}
    return {name: {"bytes": sent, "uncompressed_bytes": plain, "times_fewer": round(plain / sent, 2)}}
