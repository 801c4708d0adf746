"""Data parallelism that communicates every H steps: processes train alone, then synchronize params.

    local SGD (Stich 2019)      params = mean of the processes' params
    DiLoCo (Douillard 2023)     the change of that mean is the gradient of an outer SGD with Nesterov momentum

Local SGD is DiLoCo with an outer learning rate of 1 and no momentum. Every synchronization sends as many bytes as one
exchange of gradients, so 1/H of them in all.

Between synchronizations params are local to each process; the state of the inner optimizers always is. A checkpoint
keeps both for every process, which resumes from them exactly. For other plans it also keeps the params and outer
momentum that a synchronization at that moment would give, with the inner state of one process.

Why H = 1 with SGD inside is plain data parallelism: a process steps along N g_i, N times its share of the gradient of
the global batch's mean, from common params, so the mean of the params is p - lr · sum g_i. Momentum and weight decay
are linear and do not change that; Adam divides by the root of each process's own squares, so it differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from models.pretrain.dtensor import local_tensor
from models.pretrain.training import TrainingOptions
from models.pretrain.world import World

MOMENTUM = "outer_momentum"
"""Key of the outer momentum in the state of the inner optimizer, under which checkpoints keep it."""


def from_plan(
    inner: Sequence[torch.optim.Optimizer], options: TrainingOptions, world: World
) -> LocalUpdates | None:
    """The synchronization of the plan of `world`; None where gradients are exchanged in every step."""
    plan = world.plan
    if not plan.sync_every or world.size("dp") == 1:
        return None
    lr, momentum = (options.outer_lr, options.outer_momentum) if plan.outer == "nesterov" else (1.0, 0.0)
    same = replace(plan, microbatches=0, activation_checkpoint="none", compile=False, precision="fp32")
    kind = f"{same}, {sum(len(group['params']) for each in inner for group in each.param_groups)} params"
    return LocalUpdates(inner, world.group("dp"), plan.sync_every, lr, momentum, kind)


@dataclass
class LocalUpdates:
    """Synchronizes the params that `inner` optimizers step, every `every` steps.

    Attributes:
        lr, momentum: of the outer optimizer.
        kind: as in `models.pretrain.recovery.state.RankState`.
    """

    inner: Sequence[torch.optim.Optimizer]
    group: dist.ProcessGroup
    every: int
    lr: float
    momentum: float
    kind: str = ""
    _local_steps: int = 0
    _anchors: list[torch.Tensor] = field(default_factory=list)

    def before_step(self) -> None:
        """Call it before the inner optimizers step: remembers the common params."""
        if not self._local_steps:
            self._anchors = [_local(parameter).clone() for parameter, _ in self._owned()]

    def after_step(self) -> None:
        """Call it after the inner optimizers have stepped."""
        self._local_steps += 1
        if self._local_steps == self.every:
            self.synchronize()

    def synchronize(self) -> None:
        """Synchronizes params if processes have stepped alone: after `every` steps, and at the end."""
        for parameter, optimizer, value, velocity in self._averaged():
            _local(parameter).copy_(value)
            if velocity is not None:
                _local(self._momentum(parameter, optimizer)).copy_(velocity)
        self._local_steps, self._anchors = 0, []

    def synchronized(self) -> dict[int, torch.Tensor]:
        """Params and outer momenta that a synchronization now would give, by `id` of the live tensor."""
        tensors = {}
        for parameter, optimizer, value, velocity in self._averaged():
            tensors[id(parameter)] = _with_local(parameter, value)
            if velocity is not None:
                momentum = self._momentum(parameter, optimizer)
                tensors[id(momentum)] = _with_local(momentum, velocity)
        return tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """This process's local tensors, by index of the param."""
        tensors = {"alone": torch.tensor(self._local_steps)}
        for index, (parameter, optimizer) in enumerate(self._owned()):
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{index}.state.{key}"] = _local(value)
            if self._local_steps:
                tensors[f"{index}.param"] = _local(parameter)
                tensors[f"{index}.anchor"] = self._anchors[index]
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Continues with what `tensors` returned; without any, as if just synchronized."""
        self._local_steps = int(tensors.get("alone", 0))
        owned = list(self._owned()) if tensors else []
        self._anchors = [tensors[f"{i}.anchor"] for i in range(len(owned))] if self._local_steps else []
        for index, (parameter, optimizer) in enumerate(owned):
            state = optimizer.state[parameter]
            for key in list(state):
                if f"{index}.state.{key}" in tensors:
                    _local(state[key]).copy_(tensors[f"{index}.state.{key}"])
                else:
                    del state[key]  # an outer momentum that starts with the next synchronization
            if self._local_steps:
                _local(parameter).copy_(tensors[f"{index}.param"])

    @torch.no_grad()
    def _averaged(
        self,
    ) -> list[tuple[nn.Parameter, torch.optim.Optimizer, torch.Tensor, torch.Tensor | None]]:
        """Every param with its synchronized value and new outer momentum; nothing where processes are in step."""
        if not self._local_steps:
            return []
        owned = list(self._owned())
        changes = [anchor - _local(p) for anchor, (p, _) in zip(self._anchors, owned, strict=True)]
        flat = torch.cat([change.flatten() for change in changes])
        dist.all_reduce(flat, group=self.group)
        means = torch.split(flat.div_(self.group.size()), [change.numel() for change in changes])
        updates = []
        for (parameter, optimizer), anchor, mean in zip(owned, self._anchors, means, strict=True):
            step, velocity = mean.view_as(anchor), None
            if self.momentum:
                # as in `torch.optim.SGD` with nesterov: v = m v + g, step along g + m v
                velocity = (_local(self._momentum(parameter, optimizer)) * self.momentum).add_(step)
                step = step.add(velocity, alpha=self.momentum)
            updates.append((parameter, optimizer, anchor.sub(step, alpha=self.lr), velocity))
        return updates

    def _momentum(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        state = optimizer.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter).detach()
        momentum: torch.Tensor = state[MOMENTUM]
        return momentum

    def _owned(self) -> Iterable[tuple[nn.Parameter, torch.optim.Optimizer]]:
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, optimizer


def _with_local(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` sharded like `like`."""
    tensor = torch.empty_like(like).detach()
    _local(tensor).copy_(value)
    return tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor.detach())
