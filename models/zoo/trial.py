"""A trial of a model before training: it must accept the data's examples and return outputs of the right shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import user_code

if TYPE_CHECKING:
    from models.zoo.spec import ModelSpec

_ROWS = 2


class ModelUnfit(ValueError):
    """The model fails on examples of the data's shape, or its outputs do not fit the task."""


def require_answers(spec: ModelSpec) -> None:
    """Runs a fresh module of `spec` on a small batch. Logits of another width would train, but be meaningless.

    Raises:
        ModelUnfit: with the input, the output and what was expected.
    """
    module = spec.build(0).eval()  # in evaluation mode even a single row has statistics
    x, _ = spec.example_batch(_ROWS)
    examples = f"examples of shape {spec.input_shape}"
    try:
        with torch.no_grad():
            logits = module(x)
    except Exception as error:  # any error of a user's code is shown to the user
        raise ModelUnfit(
            f"model {spec.name!r} fails on {examples}{user_code.error_location(error)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(logits, torch.Tensor):
        raise ModelUnfit(
            f"model {spec.name!r}{_forward(module)} returns {type(logits).__name__}, expected a tensor of logits {format_shape(spec.logits_shape)}"
        )
    if tuple(logits.shape) != (_ROWS, *spec.logits_shape):
        raise ModelUnfit(
            f"model {spec.name!r}{_forward(module)} returns logits of shape {format_shape(tuple(logits.shape[1:]))} for {examples}, "
            f"expected {format_shape(spec.logits_shape)}: {spec.classes} classes"
        )
    if are_probabilities(logits.numpy()):
        raise ModelUnfit(
            f"model {spec.name!r} answers with probabilities, expected logits: leave the softmax at its end out (the loss has "
            "one, and a second one trains slowly, to another optimum)"
        )


def _forward(module: nn.Module) -> str:
    """Where the `forward` of a user's class is defined; empty for torch's."""
    return (
        user_code.definition_location(type(module).forward)
        if type(module).__module__.split(".")[0] != "torch"
        else ""
    )


def are_probabilities(answers: npt.NDArray[Any]) -> bool:
    """Whether every row of outputs [B, (T,) C] adds up to one and none is negative, as after a softmax."""
    sums = answers.sum(-1)
    return bool(answers.shape[-1] > 1 and (answers >= 0).all() and np.allclose(sums, 1, rtol=0, atol=1e-4))


def vocabulary(module: nn.Module, input_shape: tuple[int, ...]) -> int | None:
    """Number of token ids `module` accepts: rows of the smallest table in which it looks up the ids of an example.

    None if it looks none up, or fails on ids of 0 and 1.
    """
    module = module.eval()
    numbers = torch.arange(_ROWS * math.prod(input_shape)).reshape(_ROWS, *input_shape)
    seen = _Lookups(x := (numbers % 3 == 1).int())
    try:
        with torch.no_grad(), seen:
            module(x)
    except Exception:  # any error of a user's code; `require_answers` reports it
        return None
    return min(seen.rows, default=None)


class _Lookups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the rows of tables in which the ids `x` are looked up, not those of positions and the like."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.x = sorted(x.flatten().tolist())  # they may be looked up in another order
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag.default):
            table, ids = args[:2]
            if sorted(ids.flatten().tolist()) == self.x:
                self.rows.append(len(table))
        return func(*args, **(kwargs or {}))


def format_shape(per_row: tuple[int, ...]) -> str:
    return f"[{', '.join(['batch', *map(str, per_row)])}]"
