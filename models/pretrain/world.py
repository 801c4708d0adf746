"""The processes that train together: joined through torch.distributed, arranged along the axes of a plan.

NCCL where every process of a host has a GPU of its own, else gloo on the CPU. With `devices` in the plan every stage
computes on the named device and gloo carries the messages between stages, through host memory. A process without a
launcher is a world of one. Axes are `pp`, `replicate`, `shard`, `cp`, `tp` (see `models.pretrain.plan`), of size 1 where
unused; `dp` is replicate and shard together; `data` is dp and cp together: the ranks whose gradients add up; `fsdp` is
shard and cp together: the ranks that params are sharded over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.pretrain.plan import ParallelPlan, PlanError

AXES = ("pp", "replicate", "shard", "cp", "tp")
_FLATTENED = {"dp": ("replicate", "shard"), "data": ("replicate", "shard", "cp"), "fsdp": ("shard", "cp")}


@dataclass(frozen=True)
class World:
    """This process's position among all.

    Attributes:
        mesh: all ranks along `AXES`.
        flattened: the axes that combine several of `AXES`.
        device: the device this process computes on.
    """

    plan: ParallelPlan
    mesh: DeviceMesh
    flattened: Mapping[str, DeviceMesh]
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def axis(self, name: str) -> DeviceMesh:
        """The part of the mesh along one axis, flattened ones included."""
        return self.flattened[name] if name in self.flattened else self.mesh[name]

    def coordinate(self, name: str) -> int:
        """This process's coordinate along an axis."""
        return int(self.axis(name).get_local_rank())

    def size(self, name: str) -> int:
        return int(self.axis(name).size())

    def group(self, name: str) -> dist.ProcessGroup:
        """The processes that differ from this one only along this axis."""
        return self.axis(name).get_group()


@contextmanager
def join(plan: ParallelPlan, timeout: timedelta = timedelta(minutes=10)) -> Iterator[World]:
    """Joins the processes a launcher started, or creates a world of one; leaves them at the end.

    Raises:
        RuntimeError: the number of processes is not the plan's; launchers check that first.
    """
    device = select_device(plan)
    backend = "nccl" if device.type == "cuda" and not plan.devices else "gloo"
    alone: dict[str, Any] = (
        {} if "WORLD_SIZE" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
    )
    dist.init_process_group(backend, timeout=timeout, **alone)
    try:
        yield build(plan, device)
    finally:
        dist.destroy_process_group()


def build(plan: ParallelPlan, device: torch.device) -> World:
    """The world of processes that have already joined."""
    if dist.get_world_size() != plan.processes:
        raise RuntimeError(
            f"plan {plan} needs {plan.processes} processes, {dist.get_world_size()} were launched"
        )
    extents = (plan.pp, plan.replicate, plan.shard, plan.cp, plan.tp)
    mesh = init_device_mesh("cpu" if plan.devices else device.type, extents, mesh_dim_names=AXES)
    flattened = {name: mesh[axes]._flatten(name) for name, axes in _FLATTENED.items()}
    return World(plan, mesh, flattened, device)


def select_device(plan: ParallelPlan) -> torch.device:
    """The device of this process: the kind that the plan names for its stage; else the GPU with its number on its host,
    if there are enough GPUs, or the CPU.

    Raises:
        PlanError: the plan names a GPU, and there is none.
    """
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    use_gpu = gpus >= max(1, ranks)
    if plan.devices:
        place = int(os.environ.get("RANK", 0)) * plan.pp // plan.processes
        use_gpu = "cuda" in plan.devices[place : place + 1]
        if use_gpu and not gpus:
            raise PlanError(
                f"plan: devices={'+'.join(plan.devices)} puts place {place} along pp on cuda, its host has no GPU"
            )
    if not use_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device
