"""Expert parallelism: every process of the shard axis keeps some experts; tokens travel to theirs and back
(Lepikhin 2020, GShard).

Gradients of experts come from the tokens of all processes that exchange with each other, so only copies of the same
experts add theirs up: see `models.pretrain.data_parallel.sharding.sum_gradients`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from models.pretrain.world import World
from models.zoo.layout import Layout, matching


class Spread(nn.Module):
    """Experts of which this process keeps E/P: (x [N, D] sorted by expert, counts [E]) -> [N, D], as if it had all.

    Has the parameters of the experts it stands for under the same names, split by their first dimension.
    """

    def __init__(self, inner: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self._inner = (inner,)  # in a tuple, so that it is no submodule: its parameters are ours
        self.group = mesh.get_group()
        for name, parameter in inner.named_parameters():
            split = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None))
            self.register_parameter(name, split)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        asked = counts.view(self.group.size(), -1)  # [P, E/P], of my tokens by process and its experts
        given = torch.empty_like(asked)
        dist.all_to_all_single(given, asked, group=self.group)
        sent, received = asked.sum(1).tolist(), given.sum(1).tolist()
        mine = _exchange(x, received, sent, self.group)

        # they came by process and then by expert; experts take them by expert
        expert = torch.arange(given.shape[1], device=x.device).repeat(len(given))
        by_expert = expert.repeat_interleave(given.flatten()).argsort(stable=True)
        answers = self._compute(mine[by_expert], given.sum(0))
        return _exchange(answers[by_expert.argsort()], sent, received, self.group)

    def _compute(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        local = {name: p.to_local() for name, p in self.named_parameters() if isinstance(p, DTensor)}
        answer: torch.Tensor = torch.func.functional_call(self._inner[0], local, (x, counts))
        return answer


def split(module: nn.Module, layout: Layout, world: World) -> None:
    """Splits the experts of `module` over the shard axis, in place."""
    for name, inner in list(matching(module, layout.experts)):
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, Spread(inner, world.axis("shard")))


def spread(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is of experts that this process keeps, or their gradient."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names == ("shard",)


def _exchange(
    x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Rows of `x` to the processes of `group` in turn, `sent` of them to each, for `received` from each."""
    got: torch.Tensor = all_to_all_single_autograd(x.contiguous(), received, sent, group)
    return got
