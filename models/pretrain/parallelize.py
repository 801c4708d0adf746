"""Turns a whole module into the part that one process keeps and computes, in this order:

    split into stages (pp) -> split matrices (tp) -> split sequences (cp) -> split experts (ep)
    -> 8-bit products -> recompute activations -> compile -> shard params or average gradients (dp)

Every step maps modules to modules and is independent of the others. The whole module may be on the meta device; then its
parts get their memory and values afterwards (`models.pretrain.deferred`). Either way params start from the values that
the seed gives the whole module, so a plan does not change them.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass

import torch
from torch import nn

from models.pretrain.parallel.model import activation_checkpoint
from models.pretrain.parallel.model.stage import Stage
from models.pretrain.plan import ParallelPlan, PlanError, Sizes
from models.pretrain.world import World
from models.zoo.layout import Layout, matching
from models.zoo.spec import ModelSpec


@dataclass(frozen=True)
class Parallel:
    """The parts of a model on one process.

    Attributes:
        parts: one module, or the stages of this process; parameter names are those of the whole model.
        numbers: indices of these stages, of `world.plan.virtual_stages`.
    """

    parts: list[nn.Module]
    numbers: tuple[int, ...] = (0,)


def sizes_of(spec: ModelSpec) -> Sizes:
    """The sizes of a model that limit its plans."""
    layout = spec.layout
    if layout is None:
        return Sizes()
    with torch.device("meta"):
        module = spec.module()
    layers = len(layout.layer_names(module))
    return Sizes(
        layers=layers,
        heads=layout.heads,
        kv_heads=layout.kv_heads if layout.kv_heads != layout.heads else 0,
        width=layout.width,
        hidden=layout.hidden,
        vocab=spec.classes,
        length=layout.length,
        attention=bool(layout.attention) and all(any(matching(module, (path,))) for path in layout.attention),
        experts=layout.experts_count,
        tensor=bool(layout.columns or layout.operators),
        head=bool(layout.head),
        tied=layout.tied,
        documents=layout.documents,
    )


def parallelize(module: nn.Module, layout: Layout | None, world: World) -> Parallel:
    """Splits `module` by the plan of `world`; it must not be used otherwise afterwards."""
    # Imported here because they are slow to import, and `sizes_of` does not need them.
    from models.pretrain.parallel.data import sharding
    from models.pretrain.parallel.model import context, experts, fp8, tensor

    plan = world.plan
    if not is_meta(module):
        module = module.to(world.device)
    numbers = plan.stage_numbers(world.coordinate("pp"))
    parts = _stages(module, layout, plan, numbers) if plan.pp > 1 else [module]
    if layout is not None:
        for part in parts:
            if plan.tp > 1:
                tensor.split(part, layout, plan, world)
            if plan.cp > 1:
                context.split(part, layout, world)
            if plan.ep > 1:
                experts.split(part, layout, world)
            if plan.precision == "fp8":
                fp8.convert(part, layout)
            activation_checkpoint.wrap(part, layout, plan.activation_checkpoint)
            if plan.compile:
                _compile_blocks(part, layout, world)
    return Parallel([sharding.apply_data_parallel(part, layout, world) for part in parts], numbers)


def is_meta(module: nn.Module) -> bool:
    """Whether `module` has no memory yet."""
    return any(parameter.is_meta for parameter in module.parameters())


def require_splittable(module: nn.Module, layout: Layout | None, plan: ParallelPlan) -> None:
    """Checks that the parts of `module`, which may be on the meta device, can follow `plan`.

    Raises:
        PlanError: with every reason.
    """
    if layout is None or plan.tp == plan.pp == 1:
        return
    from models.pretrain.parallel.model import tensor

    problems = tensor.problems(module, layout, plan)
    if plan.pp > 1:
        problems += [
            f"pp: {name!r} has nothing to train, and a frozen stage has no gradients to send back"
            for name in layout.layer_names(module)
            if not any(parameter.requires_grad for parameter in module.get_submodule(name).parameters())
        ][:1]
    if problems:
        raise PlanError(f"plan {plan}: " + "; ".join(problems))


def require_composition(module: nn.Module, layout: Layout, x: torch.Tensor) -> None:
    """Checks that composing the modules of the layout's `order` gives the output of `module` for `x`.

    Otherwise training them in stages, or with the first of them frozen, would train another model.

    Raises:
        PlanError: the outputs differ, or computing them fails.
    """
    message = f"the modules that the layout names as order, {', '.join(layout.order)}, are not what the model computes"
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            expected = module(x)
            output = Stage(module, layout.sequence(module))(x)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, IndexError) as error:
        raise PlanError(f"{message}: {type(error).__name__}: {error}") from None
    finally:
        for part, was_training in training.items():
            part.training = was_training
    alike = isinstance(output, torch.Tensor) and output.shape == expected.shape
    if not alike or not torch.allclose(output, expected, rtol=1e-4, atol=1e-6, equal_nan=True):
        by = f" by up to {float((output - expected).abs().max()):.2g}" if alike else ""
        raise PlanError(
            f"{message}: one after the other they answer differently{by}; name every step of forward as a module of "
            "order, or train with pp=1 and without freezing"
        )


def _stages(
    module: nn.Module, layout: Layout | None, plan: ParallelPlan, numbers: tuple[int, ...]
) -> list[nn.Module]:
    assert layout is not None  # plan_rules.check rejects stages for a model without layers
    layers = layout.layer_names(module)
    order = layout.sequence(module)
    before, after = order[: order.index(layers[0])], order[order.index(layers[-1]) + 1 :]
    names = [[layers[index] for index in stage] for stage in plan.layers_per_stage(len(layers))]
    names[0] = [*before, *names[0]]
    names[-1] = [*names[-1], *after]
    return [Stage(module, names[number]) for number in numbers]


def _compile_blocks(module: nn.Module, layout: Layout, world: World) -> None:
    """Compiles the layers of `module` in place, when they first run, which fuses the operations between matrix products.

    Not the whole module, because the collectives between blocks break the graph, and because identical layers are
    compiled once. Where compilation is impossible the layers stay as they are, with a warning.

    A recomputing layer is compiled with its recomputation, but not with tp: torch 2.13 fails to keep the mesh of split
    matrices for the backward pass of a compiled recomputation.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    reason = _missing_compiler(world.device)
    if reason:
        warnings.warn(f"compile=true: {reason}; blocks run uncompiled", RuntimeWarning, stacklevel=2)
        return
    for _, part in matching(module, layout.experts):  # torch.compile has grouped products in bfloat16 only
        part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
    for name in layout.layer_names(module):
        layer = module.get_submodule(name)
        if world.plan.tp > 1 and isinstance(layer, CheckpointWrapper):
            layer = layer._checkpoint_wrapped_module
        layer.compile()


def _missing_compiler(device: torch.device) -> str:
    """What torch.compile lacks here to generate code for `device`; empty if nothing."""
    if device.type == "cuda":
        return "" if torch.utils._triton.has_triton() else "Triton is not installed"
    from torch._inductor import config

    named = config.cpp.cxx
    compilers = [name for name in (named if isinstance(named, tuple | list) else (named,)) if name]
    if any(shutil.which(name) for name in [*compilers, "g++"]):
        return ""
    return "there is no C++ compiler on this machine"
