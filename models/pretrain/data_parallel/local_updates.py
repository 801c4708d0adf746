"""Data parallelism that talks every H steps: processes train alone, then agree on params.

    local SGD (Stich 2019)      params = mean of the processes' params
    DiLoCo (Douillard 2023)     the way that mean has gone is the gradient of an outer SGD with Nesterov momentum

Both are the same with an outer learning rate of 1 and no momentum. Each agreement sends as many bytes as one exchange
of gradients, so 1/H of them in all.

The state of the inner optimizers is each process's own. A checkpoint, which is taken when all agree, keeps one
process's, with which all go on; the outer momentum is the same everywhere and is kept as it is.

Why H = 1 with SGD inside is plain data parallelism: a process steps along N g_i, N times its share of the gradient of
the global batch's mean, from where all stand, so the mean of the params is p - lr · sum g_i. Momentum and weight decay
are linear and change nothing of it; Adam divides by the root of each process's own squares, and does not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from models.pretrain.training import Options
from models.pretrain.world import World

MOMENTUM = "outer_momentum"
"""Key of the outer momentum in the state of the inner optimizer, by which checkpoints keep it."""


def of(inner: Sequence[torch.optim.Optimizer], options: Options, world: World) -> LocalUpdates | None:
    """What the plan of `world` asks for; None where gradients are exchanged in every step."""
    plan = world.plan
    if not plan.sync_every or world.size("dp") == 1:
        return None
    lr, momentum = (options.outer_lr, options.outer_momentum) if plan.outer == "nesterov" else (1.0, 0.0)
    return LocalUpdates(inner, world.group("dp"), plan.sync_every, lr, momentum)


class LocalUpdates:
    """Brings the params that `inner` optimizers step together every `every` steps.

    Args:
        lr, momentum: of the outer optimizer.
    """

    def __init__(
        self,
        inner: Sequence[torch.optim.Optimizer],
        group: dist.ProcessGroup,
        every: int,
        lr: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        self.inner, self.group, self.every, self.lr, self.momentum = inner, group, every, lr, momentum
        self._alone = 0
        self._anchors: list[torch.Tensor] = []

    def before_step(self) -> None:
        """To be called before the inner optimizers step: remembers where all stand."""
        if not self._alone:
            self._anchors = [_local(parameter).clone() for parameter, _ in self._owned()]

    def after_step(self) -> None:
        """To be called after the inner optimizers have stepped."""
        self._alone += 1
        if self._alone == self.every:
            self.agree()

    @torch.no_grad()
    def agree(self) -> None:
        """Brings params together now, if any process has stepped alone: before a checkpoint, and at the end."""
        if not self._alone:
            return
        self._alone = 0
        owned = list(self._owned())
        gone = [anchor - _local(p) for anchor, (p, _) in zip(self._anchors, owned, strict=True)]
        flat = torch.cat([way.flatten() for way in gone])
        dist.all_reduce(flat, group=self.group)
        means = torch.split(flat.div_(self.group.size()), [way.numel() for way in gone])
        for (parameter, optimizer), anchor, mean in zip(owned, self._anchors, means, strict=True):
            step = mean.view_as(anchor)
            if self.momentum:
                step = self._nesterov(parameter, optimizer, step)
            _local(parameter).copy_(anchor.sub_(step, alpha=self.lr))
        self._anchors = []

    def _nesterov(
        self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, gradient: torch.Tensor
    ) -> torch.Tensor:
        """As `torch.optim.SGD` has it: v = m v + g, step along g + m v."""
        state = optimizer.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter).detach()
        velocity = _local(state[MOMENTUM])
        velocity.mul_(self.momentum).add_(gradient)
        return gradient.add(velocity, alpha=self.momentum)

    def _owned(self) -> Iterable[tuple[nn.Parameter, torch.optim.Optimizer]]:
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, optimizer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found
