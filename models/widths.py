"""Narrower variants of a model: hidden widths times a number up to 1; inputs and classes stay as they are. Diao 2021, section 3.

A wider layer has its features in the same order, so each tensor of the variant is the leading part of the model's own. It needs no
framework: `models.zoo.submodel` has the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]

MODEL = "submodel"
"""The name in `models.zoo` of a narrower variant that clients train."""

_GROUPS = 4
"""Of the norm of resnet8, which divide its width."""


class NoNarrowerModel(ValueError):
    """The model has no narrower variants; the message says why."""


@dataclass(frozen=True)
class _Family:
    """`scale`: the options of the variant. `scaled`: its layers whose outputs the scaler divides by the width in training."""

    scale: Callable[[Mapping[str, Any], float], dict[str, Any]]
    scaled: Callable[[Mapping[str, Any]], Sequence[str]]


def scale_options(name: str, options: Mapping[str, Any], width: float) -> dict[str, Any]:
    """The options of a model of the catalog times `width`, rounded up. `options`: complete.

    Raises:
        NoNarrowerModel: the model, or one with these options, cannot be cut.
    """
    return _family(name, options).scale(options, width)


def scaled_layers(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the layers whose outputs a narrower variant divides by its width, so that the next layer, which sums over fewer
    features, gets sums as large as those of the model itself.

    None of resnet8: a norm follows its convolutions and takes out any factor.

    Raises:
        NoNarrowerModel: as `scale_options`.
    """
    return tuple(_family(name, options).scaled(options))


def divisors(name: str, options: Mapping[str, Any], width: float) -> dict[str, float]:
    """What a variant of this width divides the outputs of its layers by: its scaler. `options`: of it or of the model itself.

    Raises:
        NoNarrowerModel: as `scale_options`.
    """
    return dict.fromkeys(scaled_layers(name, options), width)


def fold_scaler(
    params: Arrays, name: str, options: Mapping[str, Any], width: float
) -> dict[str, npt.NDArray[Any]]:
    """The params with which the plain narrower model answers as the variant with its scaler does. `options`: of either."""
    layers = set(scaled_layers(name, options))
    return {
        key: np.asarray(value / np.float32(width), np.float32) if key.rpartition(".")[0] in layers else value
        for key, value in params.items()
    }


def _family(name: str, options: Mapping[str, Any]) -> _Family:
    if name not in _FAMILIES:
        raise NoNarrowerModel(f"{name!r} cannot be cut into narrower models; expected {', '.join(_FAMILIES)}")
    if options.get("norm") == "batch":
        raise NoNarrowerModel(
            f'{name!r} with norm = "batch" cannot be cut into narrower models: clients keep its running statistics as they are, and those '
            'of a narrower model differ; take norm = "group"'
        )
    return _FAMILIES[name]


def _up(size: int, width: float) -> int:
    return math.ceil(size * width)


def _mlp(options: Mapping[str, Any], width: float) -> dict[str, Any]:
    return {**options, "hidden": [_up(size, width) for size in options["hidden"]]}


def _cnn(options: Mapping[str, Any], width: float) -> dict[str, Any]:
    channels = [_up(size, width) for size in options["channels"]]
    return {**options, "channels": channels, "hidden": _up(options["hidden"], width)}


def _resnet8(options: Mapping[str, Any], width: float) -> dict[str, Any]:
    return {**options, "width": _GROUPS * _up(options["width"] // _GROUPS, width)}


_FAMILIES = {
    "mlp": _Family(_mlp, lambda options: [f"hidden.{index}" for index in range(len(options["hidden"]))]),
    "cnn": _Family(_cnn, lambda options: ["conv1", "conv2", *(["hidden"] if options["hidden"] else [])]),
    "resnet8": _Family(_resnet8, lambda options: []),
}
