"""Structured pruning: removes whole channels, so that the model is smaller and faster on any device.

torch-pruning finds the layers that must lose the same channel together (DepGraph, Fang 2023): a convolution, its norm, its
readers, and everything a residual connection adds to it. The importance of a channel is the mean magnitude of all its weights in
those layers; the least important ones are removed, in rounds with fine-tuning between them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from models.compress import report
from models.compress.pruning import sparsity
from models.compress.pruning.structure import StructureError, rebuild
from models.compress.step import Context, Data, StepModel, StepRefused
from models.compress.tuning import Tuning, is_within, labelled_rows, named_layers, own_loss, tune
from models.job import JobError
from models.options import bounded
from models.pretrain.params import params_of
from models.zoo.calls import called_layers
from models.zoo.spec import ModelSpec

_ROOTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_KNOWN = (*_ROOTS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)


@dataclass(frozen=True)
class StructuredOptions(Tuning):
    """Options of channel pruning; those of `Tuning` are for the fine-tuning after every round.

    Attributes:
        ratio: share of the channels of every layer to remove; with `global` of all layers together. A ratio of
            0.5 leaves a quarter of the weights between two layers that both lose half.
        rounds: number of rounds, each with its own fine-tuning.
        per_layer: `uniform` removes the same share from every layer, `global` ranks channels of all layers together, and a
            layer that would lose all of them keeps all.
        norm: of a channel's weights, `l1` or `l2`.
        round_to: the number of remaining channels is a multiple of this; groups of a GroupNorm always stay equal in size.
        keep: layers that keep all their output channels: names separated by commas.
    """

    ratio: float = bounded(0.5, 0.0, 0.95)
    rounds: int = bounded(2, 1, 100)
    per_layer: Literal["uniform", "global"] = "uniform"
    norm: Literal["l1", "l2"] = "l2"
    round_to: int = bounded(1, 1, 1024)
    keep: str = ""


def structured(model: StepModel, data: Data, options: StructuredOptions, context: Context) -> StepModel:
    """`model` with fewer channels, fine-tuned; input and classes do not change. Zero weights stay zero.

    Raises:
        StepRefused: channels of this architecture cannot be removed, or the result could not be rebuilt from its params.
    """
    rng, rows = context.rng(), labelled_rows(data)
    _require_known_layers(model)
    module = copy.deepcopy(model.module).requires_grad_(True)  # torch-pruning traces gradients
    pruner = _pruner(module, model.spec, options)
    for turn in range(1, options.rounds + 1):
        _cut(pruner, module, model.spec)
        tune(
            module,
            rows,
            options,
            rng,
            own_loss(model.spec),
            after_step=sparsity.zeros_kept(module),
            on_epoch=context.report_epochs(stage="structured", round=turn),
        )
    _require_rebuildable(module, model.spec)
    facts = {
        "ratio": options.ratio,
        "channels": {
            name: {"before": before, "after": _channels(module.get_submodule(name))}
            for name, before in _widths(model.module).items()
        },
        "parameters": {"before": report.parameters(model.module), "after": report.parameters(module)},
        "macs": {"before": report.macs(model.module, model.spec), "after": report.macs(module, model.spec)},
        "bytes": {"before": 4 * report.parameters(model.module), "after": 4 * report.parameters(module)},
    }
    return StepModel(model.spec, module, facts=facts)


def _require_known_layers(model: StepModel) -> None:
    """torch-pruning is only known to follow channels correctly through these layers."""
    for name, layer in model.module.named_modules():
        if layer._parameters and not isinstance(layer, _KNOWN):
            raise StepRefused(
                f"structured cannot remove channels of {model.spec.name!r}: {name or 'the module'} is a {type(layer).__name__}, "
                "expected Linear, convolutions, BatchNorm and GroupNorm only; use kind = 'lowrank', or kind = 'distil' into "
                "a smaller model, for transformers and recurrent models"
            )


def _pruner(module: nn.Module, spec: ModelSpec, options: StructuredOptions) -> Any:
    """The pruner of torch-pruning. The layer that computes the logits keeps its outputs."""
    import torch_pruning

    reached = called_layers(module, spec)
    roots = [name for name in reached if isinstance(module.get_submodule(name), _ROOTS)]
    if not roots:
        raise StepRefused(f"structured finds no Linear and no convolution in {spec.name!r}, so no channels")
    kept = named_layers(module, options.keep, "keep")
    ignored = [name for name in roots if name == roots[-1] or is_within(name, kept)]
    if options.per_layer == "uniform":
        _require_something_left(module, [name for name in reached if name not in ignored], spec, options)
    try:
        return torch_pruning.pruner.BasePruner(
            module,
            spec.example_batch(1)[0],
            importance=torch_pruning.importance.GroupMagnitudeImportance(p=1 if options.norm == "l1" else 2),
            global_pruning=options.per_layer == "global",
            pruning_ratio=options.ratio,
            iterative_steps=options.rounds,
            ignored_layers=[module.get_submodule(name) for name in ignored],
            round_to=_multiple(module, options),
            # its defaults are dicts that all pruners of a process share and modify
            in_channel_groups={},
            out_channel_groups={},
            num_heads={},
        )
    except Exception as error:  # tracing an unknown architecture may raise anything
        raise _untraceable(spec, error) from error


def _multiple(module: nn.Module, options: StructuredOptions) -> int:
    """The multiple for torch-pruning, which rounds the channels of each group of a GroupNorm, not their sum."""
    groups = {layer.num_groups for layer in module.modules() if isinstance(layer, nn.GroupNorm)}
    return options.round_to // math.gcd(options.round_to, *groups) if groups else options.round_to


def _require_something_left(
    module: nn.Module, names: Sequence[str], spec: ModelSpec, options: StructuredOptions
) -> None:
    """Refuses a ratio that would remove all channels of a layer: torch-pruning silently keeps such a layer unchanged."""
    multiple = _multiple(module, options)
    for name in names:
        layer = module.get_submodule(name)
        if isinstance(layer, nn.GroupNorm):
            groups, channels = layer.num_groups, layer.num_channels
        elif isinstance(layer, _ROOTS):
            groups, channels = 1, _channels(layer)
        else:
            continue
        left = int(channels // groups * (1 - options.ratio))
        if left - left % multiple < 1:
            inside = f" in {groups} groups" if groups > 1 else ""
            raise StepRefused(
                f"ratio = {options.ratio} with round_to = {options.round_to} leaves nothing of {name} of {spec.name!r}, which has "
                f"{channels} channels{inside}; lower ratio (at most {1 - groups / channels:.2f}), or name the layer in keep"
            )


def _cut(pruner: Any, module: nn.Module, spec: ModelSpec) -> None:
    try:
        pruner.step()
        x, _ = spec.example_batch(2)
        with torch.no_grad():
            logits = module.eval()(x)
    except Exception as error:
        raise _untraceable(spec, error) from error
    if logits.shape[0] != len(x) or logits.shape[-1] != spec.classes:
        raise _untraceable(
            spec, f"it returns {tuple(logits.shape)}, expected 2 rows of {spec.classes} classes"
        )


def _untraceable(spec: ModelSpec, problem: object) -> StepRefused:
    return StepRefused(
        f"structured cannot remove channels of {spec.name!r}, sizes are part of its forward pass: {problem}; "
        "read sizes from tensors there, or use kind = 'prune' or 'lowrank'"
    )


def _require_rebuildable(module: nn.Module, spec: ModelSpec) -> None:
    x, _ = spec.example_batch(2)
    try:
        rebuilt = rebuild(spec, params_of(module))
    except (StructureError, JobError) as error:
        raise _untraceable(spec, error) from error
    with torch.no_grad():
        if not torch.equal(rebuilt(x), module(x)):
            raise _untraceable(spec, "the module rebuilt from its params gives other logits")


def _widths(module: nn.Module) -> dict[str, int]:
    return {name: _channels(layer) for name, layer in module.named_modules() if isinstance(layer, _ROOTS)}


def _channels(layer: nn.Module) -> int:
    return len(layer.get_parameter("weight"))
