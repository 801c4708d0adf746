"""Fine-tuning of a few params on a frozen, quantized backbone.

    head        trains the last linear layer and freezes everything else
    lora(r)     also trains A and B in W + (alpha / r) · B · A for the weight W of every other linear layer; Hu 2021, section 4.1

The frozen tensors are not params of such a model: they are constants of its code and of its artifact, which a device fetches
once. So only trained params travel, in both directions. B starts at zero: the first model is the original one, except for the
rounding of the backbone's matrices to 8 bits.

It needs only numpy: the coordinator makes backbones and merges models without a framework. The module is in `models.zoo.adapted`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

SCALE = ":scale"
"""Suffix of a backbone tensor with the scales of an int8 one, one for each index of its first axis."""

LORA_A, LORA_B = "lora_a", "lora_b"
MODEL = "adapted"
"""The name in `models.zoo` of a model with a frozen backbone."""

_LEVELS = 127
_NOTATION = re.compile(r"head|lora\(\s*(\d+)\s*(?:,\s*(\d+(?:\.\d*)?)\s*)?\)")

Arrays = Mapping[str, npt.NDArray[Any]]


class AdaptationError(ValueError):
    """Not an adaptation, or not one for this model; the message says what was expected."""


@dataclass(frozen=True)
class Adaptation:
    """`rank` is 0 for `head`; `scale` is alpha / rank."""

    kind: Literal["head", "lora"]
    rank: int = 0
    scale: float = 1.0


def parse(text: str) -> Adaptation:
    """`head`, `lora(r)` with alpha = r, or `lora(r, alpha)`.

    Raises:
        AdaptationError: something else.
    """
    match = _NOTATION.fullmatch(text.strip())
    if match is None:
        raise AdaptationError(f"{text!r} is not an adaptation; expected head, lora(r) or lora(r, alpha)")
    if match[1] is None:
        return Adaptation("head")
    rank, alpha = int(match[1]), float(match[2] or match[1])
    if not 1 <= rank <= 4096 or alpha <= 0:
        raise AdaptationError(f"{text!r}: expected a rank of 1 to 4096 and an alpha above 0")
    return Adaptation("lora", rank, alpha / rank)


def problems(how: str, init: str | None) -> Iterator[str]:
    """What is wrong with `model.adapt` of a job, whose model goes on from `init`."""
    try:
        parse(how)
    except AdaptationError as error:
        yield f"model.adapt = {error}"
    if init is None:
        yield f"model.adapt = {how!r} needs a trained model to go on from; give it as model.init"


def quantize_backbone(params: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The frozen params: matrices and kernels as int8 with their scales, the rest as float32.

    Symmetric, one scale for each index of the first axis, the output channel: |w - q·scale| <= scale / 2.
    The head is initialized from it too.
    """
    frozen: dict[str, npt.NDArray[Any]] = {}
    for name, value in params.items():
        if value.ndim < 2 or not value.size:
            frozen[name] = np.asarray(value, np.float32)
            continue
        largest = np.abs(value).max(axis=tuple(range(1, value.ndim)), keepdims=True)
        step = np.where(largest > 0, largest / _LEVELS, 1).astype(np.float32)
        frozen[name] = np.clip(np.rint(value / step), -_LEVELS, _LEVELS).astype(np.int8)
        frozen[name + SCALE] = step
    return frozen


def dequantize_backbone(frozen: Arrays) -> dict[str, npt.NDArray[np.float32]]:
    """The float32 params of a backbone."""
    return {
        name: np.asarray(value * frozen[name + SCALE] if name + SCALE in frozen else value, np.float32)
        for name, value in frozen.items()
        if not name.endswith(SCALE)
    }


def merge(frozen: Arrays, trained: Arrays, adaptation: Adaptation) -> dict[str, npt.NDArray[np.float32]]:
    """All params of the adapted model, float32: trained tensors replace frozen ones, and products B · A are added to their weights.

    Raises:
        AdaptationError: `trained` holds a tensor without a counterpart in the backbone, or only one factor of a product.
    """
    params = dequantize_backbone(frozen)
    for name, value in trained.items():
        layer, _, kind = name.rpartition(".")
        low_rank = kind in (LORA_A, LORA_B)
        target = f"{layer}.weight" if low_rank else name
        if target not in params:
            raise AdaptationError(f"tensor {name!r} belongs to {target!r}, which the backbone does not have")
        if kind == LORA_B:
            _other_factor(trained, name, layer, LORA_A)
            continue
        added = _other_factor(trained, name, layer, LORA_B) @ value if low_rank else value
        if added.shape != params[target].shape:
            raise AdaptationError(
                f"tensor {name!r} makes {added.shape} of {target!r}, which is {params[target].shape} in the backbone"
            )
        params[target] = np.asarray(
            params[target] + adaptation.scale * added if low_rank else added, np.float32
        )
    return params


def _other_factor(trained: Arrays, name: str, layer: str, kind: str) -> npt.NDArray[Any]:
    if (other := f"{layer}.{kind}") not in trained:
        raise AdaptationError(f"tensor {name!r} comes without {other!r}; a product needs both")
    return trained[other]
