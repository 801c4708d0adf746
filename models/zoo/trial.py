"""One look at a model before anyone trains it: it takes the data's examples and answers in the right shape."""

from __future__ import annotations

import torch

from models.zoo.spec import ModelSpec

_ROWS = 2


class ModelUnfit(ValueError):
    """A model that fails on examples of the data's shape, or answers otherwise than the task needs."""


def require_answers(spec: ModelSpec) -> None:
    """Has a fresh module of `spec` answer a small batch. Logits of another width would train, and mean nothing.

    Raises:
        ModelUnfit: saying what was given, what came, and what was expected.
    """
    module = spec.build(0).eval()  # in evaluation mode even a single row has statistics
    x, _ = spec.example_batch(_ROWS)
    given = f"examples of shape {spec.input_shape}"
    try:
        with torch.no_grad():
            logits = module(x)
    except Exception as error:  # whatever a user's code raises is the user's to read
        raise ModelUnfit(f"model {spec.name!r} fails on {given}: {type(error).__name__}: {error}") from error
    per_row = (*spec.input_shape, spec.classes) if spec.task == "next_token" else (spec.classes,)
    if not isinstance(logits, torch.Tensor):
        raise ModelUnfit(
            f"model {spec.name!r} returns {type(logits).__name__}, expected a tensor of logits {_batch(per_row)}"
        )
    if tuple(logits.shape) != (_ROWS, *per_row):
        raise ModelUnfit(
            f"model {spec.name!r} returns logits of shape {_batch(tuple(logits.shape[1:]))} for {given}, "
            f"expected {_batch(per_row)}: {spec.classes} classes"
        )


def _batch(per_row: tuple[int, ...]) -> str:
    return f"[{', '.join(['batch', *map(str, per_row)])}]"
