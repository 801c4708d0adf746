"""Fine-tuning of few params on those of an earlier training: a job's `init.adapt`, written as `models.adaptation` reads it.

    init.adapt = "lora(8)"   trains the head and a low-rank product beside every other linear layer (Hu 2021)
    init.adapt = "head"      trains the head

All other params stay as they are, in float32: plans split them as ever, but they have no gradients and no optimizer state,
and checkpoints leave them out. A training resumes only on the same params, by their hash. It leaves two files:

    model.safetensors      the model itself: products are added to their weights
    adapters.safetensors   the trained params alone; `models.adaptation.merge` with `init` gives the model
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from torch import nn

from edge_client.files import write_durably
from models import adaptation
from models.adaptation import AdaptationError
from models.job import JobError
from models.pretrain import params
from models.pretrain.world import World
from models.zoo import adapted
from models.zoo.spec import ModelSpec

ADAPTERS = "adapters.safetensors"


def with_adapters(spec: ModelSpec, adapt: str, frozen: str) -> ModelSpec:
    """`spec`, whose new modules train only what `adapt` says; `frozen`: the hash of their other params.

    Raises:
        JobError: not an adaptation, or not one for this model.
    """
    try:
        adaptation_of = adaptation.parse(adapt)
        order = adapted.layer_order(spec)

        def module() -> nn.Module:
            return adapted.freeze_params(spec.module(), adaptation_of, order)

        changed = replace(spec, module=module, frozen=frozen)
        with torch.device("meta"):
            module()  # fails now rather than later
    except AdaptationError as error:
        raise JobError(f"init.adapt = {adapt!r}: {error}") from None
    return changed


def trained(module: nn.Module) -> int:
    """Number of params that a training changes."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def save_parts(
    parts: Sequence[nn.Module], spec: ModelSpec, world: World, path: Path
) -> dict[str, Any] | None:
    """As `params.save_parts`, of the merged model, and beside `path` the trained params; the result has `adapters`."""
    module = _without_memory(spec)
    tensors = params.gathered(parts, module, world)
    if world.rank == 0:
        return write(path, module, tensors)
    for _ in tensors:
        pass
    return None


def export(
    spec: ModelSpec, path: Path, read: Callable[[Sequence[str]], Iterator[torch.Tensor]]
) -> dict[str, Any]:
    """As `params.save`, of the merged model of the trained params that `read` gives by name. Holds one model in memory."""
    module = spec.build(0)
    changed = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, tensor in zip(changed, read(list(changed)), strict=True):
            changed[name].copy_(tensor)
    return params.save(adapted.merge(module), path)


def write(path: Path, module: nn.Module, tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """As `params.write`, of an adapted model: writes it merged, and its trained params beside `path`."""
    changed = {name for name, p in module.named_parameters() if p.requires_grad}
    scales = {name: part.scale for name, part in module.named_modules() if isinstance(part, adapted.LowRank)}
    names = sorted(params.float_tensors(module))
    kept: dict[str, npt.NDArray[np.float32]] = {}

    def merged() -> Iterator[torch.Tensor]:
        # sorted, both factors of a product come before the weight of their layer
        factors: dict[str, torch.Tensor] = {}
        for name, tensor in zip(names, tensors, strict=True):
            if name in changed:
                kept[name] = np.array(tensor.detach().to("cpu", torch.float32).numpy())
            layer, _, kind = name.rpartition(".")
            if kind in (adaptation.LORA_A, adaptation.LORA_B):
                factors[kind] = tensor.detach()
                continue
            if kind == "weight" and layer in scales:
                product = factors[adaptation.LORA_B] @ factors[adaptation.LORA_A]
                tensor = tensor.detach() + scales[layer] * product
            yield tensor

    with torch.device("meta"):
        plain = adapted.merge(copy.deepcopy(module).to("meta"))
    saved = params.write(path, plain, merged())
    content = safetensors.numpy.save(kept)
    write_durably(path.with_name(ADAPTERS), content)
    trained_values = sum(value.size for value in kept.values())
    return {**saved, "adapters": {"parameters": trained_values, "bytes": len(content)}}


def _without_memory(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        return spec.module()
