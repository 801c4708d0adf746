"""The processes that train together: joined through torch.distributed, arranged along the axes of a plan.

NCCL where every process of a host has a GPU of its own, else gloo on the CPU. A process that nobody launched is a
world of one. Axes are `pp`, `replicate`, `shard`, `cp`, `tp` (see `models.pretrain.plan`), of size 1 where unused;
`dp` is replicate and shard together, `data` is dp and cp together: the ranks whose gradients add up; `kept` is shard
and cp together: those that keep params between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.pretrain.plan import ParallelPlan

AXES = ("pp", "replicate", "shard", "cp", "tp")
_JOINED = {"dp": ("replicate", "shard"), "data": ("replicate", "shard", "cp"), "kept": ("shard", "cp")}


@dataclass(frozen=True)
class World:
    """This process's place among all.

    Attributes:
        mesh: all ranks along `AXES`.
        joined: the axes that are several of `AXES` together.
        device: what this process computes on.
    """

    plan: ParallelPlan
    mesh: DeviceMesh
    joined: Mapping[str, DeviceMesh]
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def processes(self) -> int:
        return dist.get_world_size()

    @property
    def backend(self) -> str:
        return str(dist.get_backend())

    def axis(self, name: str) -> DeviceMesh:
        """The part of the mesh along one axis, those joined of several included."""
        return self.joined[name] if name in self.joined else self.mesh[name]

    def place(self, name: str) -> int:
        """This process's coordinate along an axis."""
        return int(self.axis(name).get_local_rank())

    def size(self, name: str) -> int:
        return int(self.axis(name).size())

    def group(self, name: str) -> dist.ProcessGroup:
        """The processes that differ from this one along one axis only."""
        return self.axis(name).get_group()


@contextmanager
def join(plan: ParallelPlan, timeout: timedelta = timedelta(minutes=10)) -> Iterator[World]:
    """Joins the processes a launcher started, or is alone; leaves them at the end.

    Raises:
        RuntimeError: there are others than the plan needs; whoever launches checks that before.
    """
    alone = "WORLD_SIZE" not in os.environ
    device = own_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if alone:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    try:
        yield arrange(plan, device)
    finally:
        dist.destroy_process_group()


def arrange(plan: ParallelPlan, device: torch.device) -> World:
    """The world of processes that have joined already."""
    if dist.get_world_size() != plan.processes:
        raise RuntimeError(
            f"plan {plan} needs {plan.processes} processes, {dist.get_world_size()} were launched"
        )
    extents = (plan.pp, plan.replicate, plan.shard, plan.cp, plan.tp)
    mesh = init_device_mesh(device.type, extents, mesh_dim_names=AXES)
    joined = {name: mesh[axes]._flatten(name) for name, axes in _JOINED.items()}
    return World(plan, mesh, joined, device)


def own_device() -> torch.device:
    """The GPU of this process's number on its host, where there are enough; the CPU otherwise."""
    rank, ranks = (
        int(os.environ.get(f"LOCAL_{key}", default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    if not torch.cuda.is_available() or torch.cuda.device_count() < ranks:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
