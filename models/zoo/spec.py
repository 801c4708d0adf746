"""ModelSpec: a model's architecture and sizes, without its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from models.labels import MIN_QUANTITY
from models.tasks import TaskKind
from models.zoo.layout import Layout

InputDtype = Literal["float32", "int32"]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def masked_cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the labels that are not `PADDING`. `logits`: [B, (T,) C], `y`: int [B, (T)].

    Written with a compared one-hot, because gather and `one_hot` do not convert to LiteRT builtins.
    """
    one_hot = (y.unsqueeze(-1) == torch.arange(logits.shape[-1], device=logits.device)).to(logits.dtype)
    return -(one_hot * F.log_softmax(logits, -1)).sum() / one_hot.sum()


def squared_error(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error over the labels that are not padding. `outputs`: [B, 1], `y`: float [B].

    Written without a choice between values, whose gradient some runtimes lack.
    """
    counted = (y > MIN_QUANTITY).to(outputs.dtype)
    errors = (outputs.squeeze(-1) - y * counted) * counted
    return torch.square(errors).sum() / counted.sum()


class VocabularyUnknown(ValueError):
    """Inputs are token ids, and their number is unknown."""


@dataclass(frozen=True)
class Spec:
    """An architecture of any framework with its sizes filled in.

    Attributes:
        name: as in the experiment file.
        module: creates the untrained model.
        input_shape: of one example, without the batch.
        input_dtype: float32 features, or int32 token ids.
        classes: size of the last logits axis; 1 for `regression`.
        task: `classification` has labels [B], `next_token` has labels [B, T]; int32, `PADDING` is masked.
            `regression` has float32 labels [B].
        options: as passed, for the record.
    """

    name: str
    module: Callable[[], Any]
    input_shape: tuple[int, ...]
    classes: int
    input_dtype: InputDtype = "float32"
    task: TaskKind = "classification"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab(self) -> int | None:
        """Number of token ids of an int32 input, 0 to vocab - 1; None: as many as classes where labels are tokens,
        otherwise unknown."""
        raise NotImplementedError

    @property
    def logits_shape(self) -> tuple[int, ...]:
        """Shape of the logits of one example."""
        return (*self.input_shape, self.classes) if self.task == "next_token" else (self.classes,)

    @property
    def tokens(self) -> int:
        """Number of token ids of an int32 input; where unknown, the two that every model accepts."""
        return self.vocab or (self.classes if self.task == "next_token" else 2)

    @property
    def described_vocab(self) -> int | None:
        """The number of token ids for a manifest; None where inputs are no ids.

        Raises:
            VocabularyUnknown: inputs are ids, and their number is unknown.
        """
        if self.input_dtype != "int32":
            return None
        if self.vocab is None and self.task != "next_token":
            raise VocabularyUnknown(
                f"model {self.name!r} takes token ids, and how many it takes cannot be determined, as it looks them up in no "
                "embedding: take nn.Embedding or keras.layers.Embedding, or return a models.zoo.ModelSpec with vocab"
            )
        return self.tokens

    def described(self) -> dict[str, Any]:
        """The spec as job files describe it."""
        return {
            "name": self.name,
            "options": dict(self.options),
            "input_shape": list(self.input_shape),
            "classes": self.classes,
            "input_dtype": self.input_dtype,
            "task": self.task,
        }


@dataclass(frozen=True)
class ModelSpec(Spec):
    """A torch model; random weights come from torch's default generator.

    Attributes:
        loss: mean loss per counted label from (logits, labels); must be traceable for training with LiteRT.
        tensorflow_twin: creates the same architecture in TensorFlow (see `models.zoo.tensorflow.twins`).
        layout: how the module may be split over processes; None: not at all.
        mask_token: the mask of a model that predicts masked tokens, and can be trained on nothing else; None: of others.
        frozen: what identifies the params that no training changes, where only few are trained (`models.zoo.adapted`); "":
            every param is trained.
    """

    module: Callable[[], nn.Module]
    loss: Loss = masked_cross_entropy
    tensorflow_twin: Callable[[], Any] | None = None
    vocab: int | None = None
    layout: Layout | None = None
    mask_token: int | None = None
    frozen: str = ""

    @property
    def masked(self) -> bool:
        """Whether it predicts masked tokens."""
        return self.mask_token is not None

    def of_quantity(self) -> ModelSpec:
        """The same architecture with one output that predicts a quantity, trained with squared error unless it has a loss of its own."""
        loss = squared_error if self.loss is masked_cross_entropy else self.loss
        return replace(self, task="regression", loss=loss)

    def build(self, seed: int) -> nn.Module:
        """A fresh module; the same seed gives the same weights. Does not change torch's global generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.module()

    def example_batch(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A deterministic (x, y) of the right shapes and dtypes: sines in [0, 1], or consecutive tokens."""
        numbers = torch.arange(batch_size * math.prod(self.input_shape)).reshape(
            batch_size, *self.input_shape
        )
        x = ((numbers * 7) % self.tokens).int() if self.input_dtype == "int32" else numbers.sin() * 0.5 + 0.5
        label_shape = (batch_size, *self.input_shape) if self.task == "next_token" else (batch_size,)
        y = torch.arange(math.prod(label_shape)).reshape(label_shape) % self.classes
        return x, y.float() if self.task == "regression" else y.int()
