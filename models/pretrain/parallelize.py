"""A whole module becomes what one process keeps and computes of it, in this order:

    split into stages (pp) -> split matrices (tp) -> split sequences (cp) -> split experts (ep)
    -> recompute activations -> compile -> share out params or average gradients (dp)

Every step takes modules and gives modules and knows nothing of the others. Params start from the whole module,
which every process builds from the same seed, so that a plan does not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.pretrain import compiling
from models.pretrain.model_parallel import recompute
from models.pretrain.plan import ParallelPlan, Sizes
from models.pretrain.world import World
from models.zoo import ModelSpec
from models.zoo.layout import Layout


class Stage(nn.Module):
    """Some of a model's modules in their order, under the names they have in the whole model.

    What one gives, a tensor or a tuple of them, the next takes; between processes a tuple travels as its tensors.
    """

    def __init__(self, whole: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name in names:
            _put(self, name, whole.get_submodule(name))

    def forward(self, *inputs: torch.Tensor) -> Any:
        x: Any = inputs if len(inputs) > 1 else inputs[0]
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


@dataclass(frozen=True)
class Parallel:
    """What one process has of a model.

    Attributes:
        parts: one module, or the stages of this process; parameter names are those of the whole model.
        numbers: which stages they are, of `world.plan.virtual_stages`.
    """

    parts: list[nn.Module]
    numbers: tuple[int, ...] = (0,)


def sizes_of(spec: ModelSpec) -> Sizes:
    """What of a model limits a plan."""
    layout = spec.layout
    if layout is None:
        return Sizes()
    with torch.device("meta"):
        layers = len(layout.layer_names(spec.module()))
    return Sizes(
        layers=layers,
        heads=layout.heads,
        width=layout.width,
        hidden=layout.hidden,
        vocab=spec.classes,
        length=layout.length,
        experts=layout.experts_count,
        tensor=bool(layout.columns or layout.operators),
        head=bool(layout.head),
        tied=layout.tied,
    )


def parallelize(module: nn.Module, layout: Layout | None, world: World) -> Parallel:
    """Takes `module` apart as the plan of `world` says; it must not be used otherwise afterwards."""
    # What splits and shares takes long to import; who only asks for `sizes_of` or a name needs none of it.
    from models.pretrain.data_parallel import sharding
    from models.pretrain.model_parallel import context, experts, tensor

    plan = world.plan
    module = module.to(world.device)
    numbers = stage_numbers(plan, world.place("pp"))
    parts = _stages(module, layout, plan, numbers) if plan.pp > 1 else [module]
    if layout is not None:
        for part in parts:
            if plan.tp > 1:
                tensor.split(part, layout, plan, world)
            if plan.cp > 1:
                context.split(part, layout, world)
            if plan.ep > 1:
                experts.split(part, layout, world)
            recompute.wrap(part, layout, plan.recompute)
            if plan.compile:
                compiling.compile_blocks(part, layout, world.device)
    return Parallel([sharding.share_out(part, layout, world) for part in parts], numbers)


def stage_numbers(plan: ParallelPlan, place: int) -> tuple[int, ...]:
    """The stages of the process at `place` along pp: in turn, or in a V for the schedule of that name."""
    if plan.schedule == "zbv" and plan.pp > 1:
        return (place, 2 * plan.pp - 1 - place)
    return tuple(place + plan.pp * turn for turn in range(plan.stages_per_rank))


def whole_name(name: str) -> str:
    """A parameter's name without what DDP, recomputation and compilation put into it."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def _stages(
    module: nn.Module, layout: Layout | None, plan: ParallelPlan, numbers: tuple[int, ...]
) -> list[nn.Module]:
    assert layout is not None  # plan.check refuses stages for a model without layers
    layers = layout.layer_names(module)
    order = layout.sequence(module)
    before, after = order[: order.index(layers[0])], order[order.index(layers[-1]) + 1 :]
    names = [[layers[index] for index in stage] for stage in plan.layers_of(len(layers))]
    names[0] = [*before, *names[0]]
    names[-1] = [*names[-1], *after]
    return [Stage(module, names[number]) for number in numbers]


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    *above, name = path.split(".")
    for part in above:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(name, module)
