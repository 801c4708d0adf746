"""Masks on the weights of a module: which weights become zero, and when.

`torch.nn.utils.prune` holds the masks: a masked layer computes with `weight_orig · weight_mask`, so no optimizer step restores
a cut weight, and each further cut chooses among the remaining weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.utils import prune as masks

from models.compress.pruning.structure import Convolution
from models.compress.step import OnEpoch
from models.compress.tuning import Tuning, is_within, own_loss, tune
from models.pretrain.data.batches import Arrays
from models.pretrain.params import params_of
from models.zoo.calls import called_layers, on_calls
from models.zoo.spec import ModelSpec


@dataclass(frozen=True)
class Goal:
    """Layers whose weights are ranked together, and their sparsity before and after pruning."""

    layers: tuple[str, ...]
    initial: float
    final: float

    def at(self, progress: float) -> float:
        """Sparsity at `progress` of the ramp, from 0 to 1. Zhu and Gupta 2017, equation 1."""
        return self.final + (self.initial - self.final) * (1 - progress) ** 3


@dataclass(frozen=True)
class Ramp:
    """The schedule of cuts: `cuts` times, evenly over the first `share` of the training."""

    share: float
    cuts: int

    def progress(self, steps: int) -> dict[int, float]:
        """Step -> progress in a training of `steps` steps; step 0 is before the first one."""
        length = int(steps * self.share)
        if length == 0:
            return {0: 1.0}
        cuts = min(self.cuts, length)
        return {round(length * cut / cuts): cut / cuts for cut in range(1, cuts + 1)}


def prunable(module: nn.Module, spec: ModelSpec, excluded: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the layers whose `weight` has two axes or more and which a forward pass calls.

    If another module reads the weight of a layer without calling the layer, the mask would have no effect.

    Args:
        excluded: layers to leave out, with their submodules.
    """
    reached = called_layers(module, spec)
    return tuple(
        name
        for name, layer in module.named_modules()
        if name in reached
        and (weight := layer._parameters.get("weight")) is not None
        and weight.ndim >= 2
        and not is_within(name, excluded)
    )


def goal(module: nn.Module, names: tuple[str, ...], sparsity: float) -> Goal:
    """The goal for one group of layers. Existing zeros remain, even if `sparsity` is lower."""
    weights = [module.get_parameter(f"{name}.weight") for name in names]
    zeros = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
    return Goal(names, zeros, max(zeros, sparsity))


def cut(
    module: nn.Module,
    goals: Sequence[Goal],
    inputs: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    rows: Arrays,
    tuning: Tuning,
    ramp: Ramp,
    rng: np.random.Generator,
    on_epoch: OnEpoch = lambda epoch, loss: None,
) -> None:
    """Prunes `module` in place to its goals while training it on `rows`; the zeros remain afterwards.

    Args:
        inputs: factors of |weight| in the score of a weight; see `input_norms`. Other layers are scored by magnitude.
    """
    layers = {name: module.get_submodule(name) for goal in goals for name in goal.layers}
    with torch.no_grad():
        for layer in layers.values():
            masks.custom_from_mask(layer, "weight", layer.weight != 0)  # type: ignore[no-untyped-call]
    due = ramp.progress(tuning.epochs * -(-len(rows) // tuning.batch_size))

    def after_step(step: int) -> None:
        if step in due:
            for goal in goals:
                _cut_to(layers, goal, due[step], inputs)

    after_step(0)
    tune(module, rows, tuning, rng, own_loss(spec), after_step=after_step, on_epoch=on_epoch)
    for layer in layers.values():
        masks.remove(layer, "weight")  # type: ignore[no-untyped-call]


def _cut_to(
    layers: Mapping[str, nn.Module], goal: Goal, progress: float, inputs: Mapping[str, torch.Tensor]
) -> None:
    kept = [layers[name].get_buffer("weight_mask") for name in goal.layers]
    size = sum(mask.numel() for mask in kept)
    count = round(goal.at(progress) * size) - (size - sum(int(mask.sum()) for mask in kept))
    if count <= 0:
        return
    with torch.no_grad():
        scores = {
            (layer, "weight"): layer.get_parameter("weight_orig").abs() * inputs.get(name, torch.ones(()))
            for name, layer in layers.items()
            if name in goal.layers
        }
        masks.global_unstructured(list(scores), masks.L1Unstructured, scores, amount=count)


def input_norms(module: nn.Module, names: Sequence[str], x: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
    """‖x_j‖ of every input j of Linear and convolutions over the rows `x`, broadcastable to their weights.

    Divided by their mean over the layer, so that ranking layers together does not depend on the size of a layer's inputs.
    For convolutions the norm is over positions too, one for each input channel. Sun 2023, equation 1.
    """
    sums: dict[str, torch.Tensor] = {}

    def note(name: str, layer: nn.Module, x: torch.Tensor) -> None:
        axis = 1 if isinstance(layer, Convolution) else -1
        squares = x.detach().movedim(axis, -1).flatten(0, -2).square().sum(0)
        sums[name] = sums.get(name, torch.zeros(())) + squares

    scored = [name for name in names if isinstance(module.get_submodule(name), nn.Linear | Convolution)]
    with torch.no_grad(), on_calls(module, scored, note):
        for start in range(0, len(x), 256):
            module(torch.from_numpy(x[start : start + 256]))
    return {name: _by_input(module.get_submodule(name), total.sqrt()) for name, total in sums.items()}


def _by_input(layer: nn.Module, norms: torch.Tensor) -> torch.Tensor:
    norms = norms / norms.mean().clamp(min=1e-12)
    if not isinstance(layer, Convolution):
        return norms
    # output channels use only the inputs of their group
    by_group = norms.reshape(layer.groups, -1).repeat_interleave(layer.out_channels // layer.groups, 0)
    return by_group.reshape(*by_group.shape, *[1] * (layer.weight.ndim - 2))


def facts(before: nn.Module, after: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """The sparsity of each layer and of all parameters, and the compressed size of the params, before and after."""
    weights = {name: after.get_parameter(f"{name}.weight") for name in names}
    parameters = list(after.parameters())
    return {
        "layers": {name: {"weights": w.numel(), "sparsity": _sparsity([w])} for name, w in weights.items()},
        "sparsity": _sparsity(list(weights.values())),
        "sparsity_of_all_parameters": _sparsity(parameters),
        "zlib_bytes": {"before": zlib_bytes(before), "after": zlib_bytes(after)},
    }


def _sparsity(tensors: Sequence[torch.Tensor]) -> float:
    return sum(int((t == 0).sum()) for t in tensors) / sum(t.numel() for t in tensors)


def zlib_bytes(module: nn.Module) -> int:
    """Size of all float32 params together, in sorted order, after zlib at its highest level."""
    return len(zlib.compress(b"".join(tensor.tobytes() for tensor in params_of(module).values()), 9))


def zeros_kept(module: nn.Module) -> Callable[[int], None]:
    """An `after_step` that keeps at zero the weights that are zero now, because an earlier step pruned them."""
    kept = [(p, p != 0) for p in module.parameters() if p.ndim >= 2 and bool((p == 0).any())]

    def after_step(step: int) -> None:
        with torch.no_grad():
            for parameter, mask in kept:
                parameter.mul_(mask)

    return after_step
