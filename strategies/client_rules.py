"""Client rules: the objective of a client's local steps.

Every rule is SGD with a corrected gradient,

    g = ∇f(w) + mu · (w − w₀) + offset
    v ← momentum · v + g · min(1, clip_grad_norm / (‖g‖ + 1e-6))
    w ← w − lr · v,

where w₀ are the params the round started from, `offset` is constant during the local run, and v is 0 at its start. That is
`torch.optim.SGD` after `clip_grad_norm_`. A runtime implements this one step; a rule sets `mu` and `offset` before training, the
task `momentum` and `clip_grad_norm`, which are usually off. A task may also ask for AdamW, which makes other steps of the clipped g
(`strategies.local_optimizers`). What follows from the trained params, streams to send and state
to keep, is an update transform. Rules that train a model of the client's own take such steps in several
passes (`strategies.personalisation`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strategies.local_optimizers import AdamWState, UnknownOptimizer
from strategies.params import FloatArray, Params, Tensors, difference, elementwise, zeros_like

if TYPE_CHECKING:
    from strategies.update import Aggregate, Streams, Update, UpdateTransform


CLIP_EPSILON = 1e-6
"""Added to a gradient's norm before it is clipped, as PyTorch does."""


@dataclass(frozen=True)
class Correction:
    """How a step differs from plain SGD.

    Attributes:
        mu, offset: terms added to the gradient; `offset` has the names of the trainable tensors, or is None for zero.
        momentum: of the steps of this local run, in [0, 1).
        clip_grad_norm: largest L2 norm of the corrected gradient over all trainable tensors; 0: any.
        fixed: trainable tensors that the steps leave as they are; not with `clip_grad_norm`, which would count their gradients.
        adamw: the state of AdamW, whose steps these are, without momentum; None: they are SGD.
    """

    mu: float = 0.0
    offset: Params | None = None
    momentum: float = 0.0
    clip_grad_norm: float = 0.0
    fixed: frozenset[str] = frozenset()
    adamw: AdamWState | None = None

    def require_sgd(self, runtime: str) -> None:
        """Refuses steps other than SGD's.

        Raises:
            UnknownOptimizer: they are AdamW's.
        """
        if self.adamw is not None:
            raise UnknownOptimizer(f"AdamW takes its steps in PyTorch, but this client trains in {runtime}")

    @property
    def is_stepwise(self) -> bool:
        """Whether the gradient only adds to the weights, so that whoever has taken a plain step may add the two terms later."""
        return not self.momentum and not self.clip_grad_norm

    def clip_factor(self, norm: float) -> float:
        """What a gradient of this L2 norm is multiplied with, as in `torch.nn.utils.clip_grad_norm_`."""
        return min(1.0, self.clip_grad_norm / (norm + CLIP_EPSILON)) if self.clip_grad_norm else 1.0


@dataclass(frozen=True)
class Pass:
    """Local steps in a row; those of a client's last pass make its update.

    Attributes:
        start: params that it starts from; None: those that the pass before ended with, or the global ones.
        epochs: over the client's rows; None: the work that the task asks for.
    """

    correction: Correction
    start: Tensors | None = None
    epochs: int | None = None


class ClientRule:
    """The client and server halves of a rule; by default plain SGD, without streams.

    `name`: in a task message. `broadcast`: the streams that the server sends along with the params.
    """

    name: str
    full_batch: ClassVar[bool] = False
    """Whether a client takes one step over all of its rows."""
    measures_loss: ClassVar[bool] = False
    """Whether a client sends the loss of the model that it received, as stream `RECEIVED`."""
    has_own_model: ClassVar[bool] = False
    """Whether each client has a model of its own, so that clients start from different ones."""

    @property
    def is_plain_training(self) -> bool:
        """Whether a client takes the steps of its task and does no more."""
        return not (self.full_batch or self.measures_loss or self.has_own_model)

    def init(self, trainable: Tensors) -> Streams:
        """The server's streams before round 1."""
        return {}

    def begin(self, broadcast: Streams, client_state: Streams) -> Correction:
        """On the client, before its steps. `client_state` is empty the first time."""
        return Correction()

    @property
    def earlier_epochs(self) -> tuple[int | None, ...]:
        """`Pass.epochs` of each pass before the last."""
        return ()

    def passes(
        self, params: Tensors, trainable: Sequence[str], broadcast: Streams, client_state: Streams
    ) -> tuple[Pass, ...]:
        """On the client, before its steps: what it trains one after the other, from the global `params`."""
        return (Pass(self.begin(broadcast, client_state)),)

    def candidates(self, params: Tensors, broadcast: Streams) -> tuple[Tensors, ...]:
        """On the client: the models of which it trains the one with the least loss on its rows; empty: it trains `params`."""
        return ()

    def draw(self, broadcast: Streams, seed: int) -> int | None:
        """On the client: which of the candidates it trains whatever their losses; None: the losses decide."""
        return None

    def answer(self, broadcast: Streams) -> Streams:
        """On the server: the streams, by name and shape, that a client sends."""
        return broadcast

    def transforms(self, correction: Correction, lr: float) -> tuple[UpdateTransform, ...]:
        """On the client, after its steps: the beginning of its chain. `correction`: of its last pass."""
        return ()

    def shared(self, trainable: Collection[str]) -> tuple[str, ...]:
        """Names of the tensors that an update has; the others never leave the client."""
        return tuple(trainable)

    def keep(self, ended: Sequence[Params]) -> dict[str, Params]:
        """On the client: streams of its next state besides those of the transforms. `ended`: trained tensors after each pass."""
        return {}

    def advance(self, broadcast: Streams, aggregate: Aggregate, num_clients: int) -> Streams:
        """On the server, after the round: the next broadcast. `num_clients` is the whole population."""
        return {}

    def stream_norm(self, broadcast: float, delta: float, num_steps: int, lr: float) -> float:
        """The largest L2 norm, up to rounding, of a stream that an honest client sends with a delta of norm `delta`.

        `broadcast`: norm of the stream of the same name as the server sent it.
        """
        return 0.0


@dataclass(frozen=True)
class PlainSGD(ClientRule):
    """Local SGD on the client's own loss. McMahan 2017, Algorithm 1, ClientUpdate."""

    name: str = "plain"


@dataclass(frozen=True)
class Proximal(ClientRule):
    """Adds mu/2 · ‖w − w₀‖² to the local loss. Li 2020 (FedProx), equation 2. `mu` >= 0."""

    mu: float
    name: str = "proximal"

    def begin(self, broadcast: Streams, client_state: Streams) -> Correction:
        return Correction(mu=self.mu)


@dataclass(frozen=True)
class ControlVariates(ClientRule):
    """SCAFFOLD: gradients corrected by c − cᵢ. Karimireddy 2020, Algorithm 1, option II.

    The server's c and the client's cᵢ travel as stream `control`. cᵢ stays on the client:
    cᵢ⁺ = cᵢ − c + (w₀ − w) / (K · lr), and the client sends Δcᵢ. The server adds |S|/N · mean(Δcᵢ).
    """

    name: str = "control_variates"

    def init(self, trainable: Tensors) -> Streams:
        return {"control": zeros_like(trainable)}

    def begin(self, broadcast: Streams, client_state: Streams) -> Correction:
        control = broadcast["control"]
        own = client_state.get("control") or zeros_like(control)
        return Correction(offset=difference(control, own))

    def transforms(self, correction: Correction, lr: float) -> tuple[UpdateTransform, ...]:
        assert correction.offset is not None
        return (RenewControl(correction.offset, lr),)

    def advance(self, broadcast: Streams, aggregate: Aggregate, num_clients: int) -> Streams:
        share = aggregate.num_updates / num_clients

        def move(control: FloatArray, change: FloatArray) -> FloatArray:
            return (control.astype(np.float64) + share * change).astype(np.float32)

        return {"control": elementwise(move, broadcast["control"], aggregate.extras["control"])}

    def stream_norm(self, broadcast: float, delta: float, num_steps: int, lr: float) -> float:
        """Δcᵢ = −c + (w₀ − w) / (K · lr), so its norm is at most their sum."""
        return broadcast + delta / (num_steps * lr)


@dataclass(frozen=True)
class DynamicRegularizer(ClientRule):
    """FedDyn: the local loss minus ⟨gᵢ, w⟩ plus alpha/2 · ‖w − w₀‖². Acar 2021, Algorithm 1.

    gᵢ, the gradient of the local loss where the client last ended, stays on the client: gᵢ⁺ = gᵢ − alpha · (w − w₀). `alpha` > 0.
    """

    alpha: float
    name: str = "dynamic"

    def begin(self, broadcast: Streams, client_state: Streams) -> Correction:
        own = client_state.get("gradient")
        return Correction(self.alpha, difference(zeros_like(own), own) if own else None)

    def transforms(self, correction: Correction, lr: float) -> tuple[UpdateTransform, ...]:
        return (KeepGradient(self.alpha),)


@dataclass(frozen=True)
class FullBatch(ClientRule):
    """One step over all rows, whatever fits into a batch: w₀ − lr · ∇f(w₀). McMahan 2017, section 2 (FedSGD)."""

    name: str = "full_batch"
    full_batch: ClassVar[bool] = True


RECEIVED = "received"
"""The stream that holds, as `loss` [1], the mean loss of a client's rows before its steps."""


@dataclass(frozen=True)
class MeasuredLoss(ClientRule):
    """Plain SGD by a client that also sends the loss of the model that it received. Li 2019 (q-FedAvg), Algorithm 2."""

    name: str = "measured_loss"
    measures_loss: ClassVar[bool] = True

    def init(self, trainable: Tensors) -> Streams:
        return {RECEIVED: {"loss": np.zeros(1, np.float32)}}

    def advance(self, broadcast: Streams, aggregate: Aggregate, num_clients: int) -> Streams:
        """As it was: what the server sends only says the shape of the answer."""
        return broadcast

    def stream_norm(self, broadcast: float, delta: float, num_steps: int, lr: float) -> float:
        """A loss may be of any size."""
        return math.inf


@dataclass(frozen=True)
class KeepGradient:
    """Keeps gᵢ⁺ of FedDyn on the client; sends nothing of it."""

    alpha: float

    def apply(self, update: Update, state: Streams) -> tuple[Update, dict[str, Params]]:
        own, alpha = state.get("gradient") or zeros_like(update.delta), np.float32(self.alpha)
        renewed = {
            name: np.asarray(own[name] - alpha * moved, np.float32) for name, moved in update.delta.items()
        }
        return update, {"gradient": renewed}


@dataclass(frozen=True)
class RenewControl:
    """Adds Δcᵢ to the update and keeps cᵢ⁺. `offset`: c − cᵢ of the local steps; `lr`: their learning rate."""

    offset: Params
    lr: float

    def apply(self, update: Update, state: Streams) -> tuple[Update, dict[str, Params]]:
        own = state.get("control") or zeros_like(self.offset)
        scale = np.float32(1.0 / (update.num_steps * self.lr))
        renewed = {
            # Subtracted from 0, because negation would turn zeros into −0.
            name: np.asarray((0 - moved) * scale - self.offset[name], np.float32)
            for name, moved in update.delta.items()
        }
        extras = {**update.extras, "control": difference(renewed, own)}
        return replace(update, extras=extras), {"control": renewed}


def to_options(rule: ClientRule) -> dict[str, Any]:
    """The rule as JSON, for a task message; `strategies.personalisation.from_options` reads it. Rules are dataclasses."""
    options: dict[str, Any] = asdict(rule)  # type: ignore[call-overload]  # the base itself has no fields
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
