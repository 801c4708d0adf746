"""Expert parallelism: every process of the shard axis keeps some experts; tokens are sent to them and back
(Lepikhin 2020, GShard).

Gradients of experts come from the tokens of all processes that exchange with each other, so they are summed only over
copies of the same experts: see `models.pretrain.parallel.data.gradient_sums`. With zero=2 and 3 these copies shard them in
turn. All tp ranks compute the same tokens with the same experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from models.zoo.layout import Layout, matching

if TYPE_CHECKING:
    from models.pretrain.world import World


class ShardedExperts(nn.Module):
    """E/P of the experts on this process: (x [N, D] sorted by expert, counts [E]) -> [N, D], as if it had all.

    Has the parameters of the module it replaces under the same names, sharded by their first dimension.
    """

    def __init__(self, inner: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self._inner = (inner,)  # a tuple, so that it is no submodule: its parameters are ours
        self.group = mesh.get_group()
        for name, parameter in inner.named_parameters():
            mine = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            split = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
            self.register_parameter(name, nn.Parameter(split, parameter.requires_grad))
        inner.to("meta")  # its parameters are not used any more

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        outgoing = counts.view(self.group.size(), -1)  # [P, E/P]: this process's tokens by process and expert
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self.group)
        sent, received = outgoing.sum(1).tolist(), incoming.sum(1).tolist()
        mine = _exchange(x, received, sent, self.group)

        # received by process, then by expert; experts expect them by expert
        expert = torch.arange(incoming.shape[1], device=x.device).repeat(len(incoming))
        by_expert = expert.repeat_interleave(incoming.flatten()).argsort(stable=True)
        local = {name: p.to_local() for name, p in self.named_parameters() if isinstance(p, DTensor)}
        outputs = torch.func.functional_call(self._inner[0], local, (mine[by_expert], incoming.sum(0)))
        return _exchange(outputs[by_expert.argsort()], sent, received, self.group)


def split(module: nn.Module, layout: Layout, world: World) -> None:
    """Shards the experts of `module` over the shard axis, in place."""
    for name, inner in list(matching(module, layout.experts)):
        module.set_submodule(name, ShardedExperts(inner, world.axis("shard")))


def sharded(parts: Iterable[nn.Module]) -> list[ShardedExperts]:
    """The sharded experts in `parts`."""
    return [module for part in parts for module in part.modules() if isinstance(module, ShardedExperts)]


def _exchange(
    x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends the rows of `x` to the processes of `group` in turn, `sent` to each, and receives `received` from each."""
    rows: torch.Tensor = all_to_all_single_autograd(x.contiguous(), received, sent, group)
    return rows
