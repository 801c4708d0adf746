"""Trains and evaluates on a client's data: one Trainer over three runtimes.

A local run has the same parts everywhere: the client rule corrects gradients, the schedule orders the examples, a
runtime takes the steps, and a chain of transforms completes the update. Only `Runtime` differs: LiteRT on a small device, PyTorch
or TensorFlow on a larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_client.data.examples import PADDING, QUANTITY_PADDING, Examples, NoExamples
from edge_client.train import schedule
from edge_client.train.evaluation import EVALUATION_ROWS, Evaluation, merge, score
from edge_client.wire.device import TaskMessage
from strategies import local_optimizers, personalisation
from strategies.client_rules import RECEIVED, ClientRule, Correction, Pass, PlainSGD
from strategies.codes import known
from strategies.codes.code import Code
from strategies.codes.compression import Compression
from strategies.local_optimizers import AdamW
from strategies.params import FloatArray, Params, Tensors, elementwise, overlay, select, shape_of
from strategies.strategy import clipping
from strategies.update import Streams, Update, UpdateTransform, apply_all


class BatchTooLarge(ValueError):
    """The task's batches are larger than this build of the model accepts."""


@dataclass(frozen=True)
class TrainTask:
    """One client's training task; exactly one of `epochs` and `steps` is set.

    Attributes:
        seed: for the batch order and any randomness inside the model.
        momentum, clip_grad_norm: of the local steps (`Correction`).
        optimizer: of the local steps, without momentum; None: SGD.
        broadcast: the client rule's streams that accompany the params.
        code: by which the update is written; None: it is sent as it is.
        clip_norm: L2 norm that a longer update is scaled down to before it is written; 0: none.
    """

    seed: int
    batch_size: int
    lr: float
    epochs: int | None = None
    steps: int | None = None
    rule: ClientRule = PlainSGD()  # noqa: RUF009 - a frozen value
    broadcast: Streams = field(default_factory=dict)
    momentum: float = 0.0
    clip_grad_norm: float = 0.0
    optimizer: AdamW | None = None
    code: Code | None = None
    clip_norm: float = 0.0

    def begin(self, client_state: Streams) -> Correction:
        """How the steps of this task differ from plain SGD. `client_state`: what the client has kept."""
        return self._complete(self.rule.begin(self.broadcast, client_state), client_state)

    def passes(self, params: Tensors, trainable: Sequence[str], client_state: Streams) -> tuple[Pass, ...]:
        """What the client trains one after the other, each with the optimizer, the momentum and the clipping of the task."""
        passes = self.rule.passes(params, trainable, self.broadcast, client_state)
        return tuple(
            replace(each, correction=self._complete(each.correction, client_state)) for each in passes
        )

    def _complete(self, correction: Correction, client_state: Streams) -> Correction:
        adamw = None if self.optimizer is None else self.optimizer.begin(client_state)
        return replace(correction, momentum=self.momentum, clip_grad_norm=self.clip_grad_norm, adamw=adamw)

    @staticmethod
    def of(message: TaskMessage, broadcast: Streams) -> TrainTask:
        """The task of a message and its streams."""
        return TrainTask(
            seed=message.seed,
            batch_size=message.batch_size,
            lr=message.lr,
            epochs=message.epochs,
            steps=message.steps,
            rule=personalisation.from_options(message.rule),
            broadcast=broadcast,
            momentum=message.momentum,
            clip_grad_norm=message.clip_grad_norm,
            optimizer=None if message.optimizer is None else local_optimizers.from_options(message.optimizer),
            code=None if message.code is None else known.from_options(message.code),
            clip_norm=message.clip_norm,
        )

    def transforms(self, correction: Correction) -> tuple[UpdateTransform, ...]:
        """What the update passes before it is sent. `correction`: as the rule began."""
        chain = (*self.rule.transforms(correction, self.lr), *clipping(self.clip_norm))
        return chain if self.code is None else (*chain, Compression(self.code, self.seed))


@dataclass(frozen=True)
class LocalResult:
    """An update to send, and the state the client keeps for its next round."""

    update: Update
    client_state: dict[str, Params]


class Runtime(Protocol):
    """A training runtime on params in canonical form: LiteRT, PyTorch or TensorFlow."""

    @property
    def name(self) -> str:
        """`litert`, `torch` or `tensorflow`."""

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the trainable tensors; the others are frozen."""

    def take_steps(
        self, params: Tensors, batches: Iterable[Examples], lr: float, correction: Correction, seed: int
    ) -> tuple[Params, list[float]]:
        """SGD over `batches`, by the steps that `strategies.client_rules` states, except for the tensors that `correction` fixes.

        Returns the trained tensors (trainable ones only, float32, C order) and each batch's mean loss.
        Never writes into `params`. If `correction` says so the steps are AdamW's, and its state is renewed.

        Raises:
            UnknownOptimizer: this runtime does not take such steps.
        """

    def logits(self, params: Tensors, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """[n, classes], or [n, T, classes] for sequences."""


@dataclass(frozen=True)
class Trainer:
    """Trains and evaluates on a client's own data, in one runtime. `order`: which rows each step takes."""

    runtime: Runtime
    order: schedule.Order = schedule.batches

    def train(
        self,
        params: Tensors,
        task: TrainTask,
        data: Examples,
        client_state: Mapping[str, Params] | None = None,
    ) -> LocalResult:
        """Trains from `params`. If they are on disk, the update is computed as it is read.

        Raises:
            NoExamples: `data` is empty.
        """
        if not len(data):
            raise NoExamples("no local examples to train on")
        kept, trainable = client_state or {}, self.runtime.trainable
        if task.rule.full_batch:
            stepped = self._step_over_all(params, task, data)
            return LocalResult(*apply_all(task.transforms(Correction()), stepped, kept))
        extras: dict[str, Params] = {}
        if task.rule.measures_loss:
            extras[RECEIVED] = {"loss": np.array([self.evaluate(params, data).loss], np.float32)}
        if models := task.rule.candidates(params, task.broadcast):
            drawn = task.rule.draw(task.broadcast, task.seed)
            chosen = self.choose(models, data) if drawn is None else drawn
            params, extras[personalisation.CHOSEN] = (
                models[chosen],
                {"model": np.array([chosen], np.float32)},
            )
        passes = task.passes(params, trainable, kept)
        ended: list[Params] = []
        for number, each in enumerate(passes):
            start = each.start
            if start is None:
                start = overlay(params, ended[-1]) if ended else params
            order, seed = _schedule(task, each, len(data), len(passes) - 1 - number, self.order)
            trained, losses = self.runtime.take_steps(
                start, (data.rows(indices) for indices in order), task.lr, each.correction, seed
            )
            ended.append(trained)
        shared = task.rule.shared(trainable)
        update = Update(
            delta=elementwise(_minus, _chosen(trained, shared), _chosen(params, shared)),
            num_examples=len(data),
            num_steps=len(order),
            train_loss=float(np.average(losses, weights=[max(1, len(indices)) for indices in order])),
            extras=extras,
        )
        chain = task.transforms(each.correction)
        update, state = apply_all(chain, update, kept)
        optimizer_state = {} if each.correction.adamw is None else each.correction.adamw.to_streams()
        return LocalResult(update, {**state, **task.rule.keep(ended), **optimizer_state})

    def choose(self, models: Sequence[Tensors], data: Examples) -> int:
        """The model with the least loss on `data`; of equal ones the first."""
        return int(np.argmin([self.evaluate(each, data).loss for each in models]))

    def _step_over_all(self, params: Tensors, task: TrainTask, data: Examples) -> Update:
        """The update of one step over all rows. Gradients of batches are what steps of rate 1 subtract; their mean weighs each
        label alike."""
        batches = [data.rows(slice(at, at + task.batch_size)) for at in range(0, len(data), task.batch_size)]
        labels = [_count_labels(batch) for batch in batches]
        total = max(1, sum(labels))
        delta = {name: np.zeros(shape_of(params, name), np.float64) for name in self.runtime.trainable}
        loss = 0.0
        for batch, count in zip(batches, labels, strict=True):
            if not count:
                continue
            stepped, (batch_loss,) = self.runtime.take_steps(params, [batch], 1.0, Correction(), task.seed)
            loss += batch_loss * count / total
            for name, value in stepped.items():
                delta[name] += (value.astype(np.float64) - params[name]) * (task.lr * count / total)
        return Update({name: value.astype(np.float32) for name, value in delta.items()}, len(data), 1, loss)

    def evaluate(self, params: Tensors, data: Examples, *, keep_logits: bool = False) -> Evaluation:
        """Cross-entropy and accuracy on `data`, computed from logits in float64, the same way in all runtimes."""
        parts = [
            replace(score(logits, part.y), logits=logits if keep_logits else None)
            for start in range(0, len(data), EVALUATION_ROWS)
            for part in [data.rows(slice(start, start + EVALUATION_ROWS))]
            for logits in [self.runtime.logits(params, part.x)]
        ]
        return merge(parts)


def _count_labels(data: Examples) -> int:
    """Labels that the loss counts."""
    counted = data.y > QUANTITY_PADDING / 2 if data.y.dtype.kind == "f" else data.y != PADDING
    return int(np.count_nonzero(counted))


def _schedule(
    task: TrainTask, each: Pass, examples: int, followed_by: int, take: schedule.Order
) -> tuple[list[schedule.Indices], int]:
    """The batches of a pass that so many passes follow, and the seed of the randomness inside the model."""
    seed = task.seed
    if followed_by:
        seed = int(np.random.default_rng([task.seed, followed_by]).integers(2**63))
    epochs, steps = (task.epochs, task.steps) if each.epochs is None else (each.epochs, None)
    rng = np.random.default_rng(seed)
    return list(take(examples, task.batch_size, epochs=epochs, steps=steps, rng=rng)), seed


def _chosen(tensors: Tensors, names: Iterable[str]) -> Tensors:
    return select({name: (tensors, name) for name in names})


def _minus(trained: FloatArray, base: FloatArray) -> FloatArray:
    return np.asarray(trained - base, np.float32)
