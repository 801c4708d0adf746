"""The processes that train together: joined through torch.distributed, arranged along the axes of a plan.

NCCL where every process of a host has a GPU of its own, else gloo on the CPU. With `devices` in the plan every stage
computes on the named device and gloo carries the messages between stages, through host memory. A process without a
launcher is a world of one. Axes are `pp`, `replicate`, `shard`, `cp`, `tp` (see `models.pretrain.plan`), of size 1 where
unused; `dp` is replicate and shard together; `data` is dp and cp together: the ranks whose gradients add up; `fsdp` is
shard and cp together: the ranks that params are sharded over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh

from models.pretrain.parallel.model import fp8
from models.pretrain.plan import ParallelPlan, PlanError
from models.pretrain.recovery.store import listen

AXES = ("pp", "replicate", "shard", "cp", "tp")
_LAZY = "TORCH_GLOO_LAZY_INIT"
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

    # Found once: torch takes about a millisecond for a part of a mesh, and every step asks for several.
    @cached_property
    def _axes(self) -> Mapping[str, DeviceMesh]:
        return {**{name: self.mesh[name] for name in AXES}, **self.flattened}

    @cached_property
    def _coordinates(self) -> Mapping[str, int]:
        return {name: int(axis.get_local_rank()) for name, axis in self._axes.items()}

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return {name: int(axis.size()) for name, axis in self._axes.items()}

    def axis(self, name: str) -> DeviceMesh:
        """The part of the mesh along one axis, flattened ones included."""
        return self._axes[name]

    def coordinate(self, name: str) -> int:
        """This process's coordinate along an axis."""
        return self._coordinates[name]

    def size(self, name: str) -> int:
        return self._sizes[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """The processes that differ from this one only along this axis."""
        return self.axis(name).get_group()


@contextmanager
def join(plan: ParallelPlan, timeout: timedelta = timedelta(minutes=10)) -> Iterator[World]:
    """Joins the processes a launcher started, or creates a world of one; leaves them at the end.

    Raises:
        RuntimeError: the number of processes is not the plan's; launchers check that first.
        PlanError: this process has not the processor that the plan needs.
    """
    device = select_device(plan)
    if plan.precision == "fp8":
        fp8.require_support(device)
    backend = "nccl" if device.type == "cuda" and not plan.devices else "gloo"
    with _connected_when_used():
        dist.init_process_group(backend, timeout=timeout, **_meeting(timeout))
        try:
            yield build(plan, device)
        finally:
            dist.destroy_process_group()


@contextmanager
def _connected_when_used() -> Iterator[None]:
    """Meanwhile gloo connects two processes of a group when they first exchange something, not every one with every other."""
    before = os.environ.get(_LAZY)
    os.environ.setdefault(_LAZY, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_LAZY, None)


def _meeting(timeout: timedelta) -> dict[str, Any]:
    """Where processes meet, as arguments of `init_process_group`; none where torch's own default serves.

    That store listens at all addresses of a machine, so one at an address given as such listens there only.
    """
    if "WORLD_SIZE" not in os.environ:
        return {"store": HashStore(), "rank": 0, "world_size": 1}
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if elsewhere or not port or not re.fullmatch(r"[0-9.]+", host):
        return {}
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        store = listen(host, int(port), processes, timeout)
    else:
        store = TCPStore(host, int(port), processes, False, timeout)
    return {"store": store, "rank": rank, "world_size": processes}


def build(plan: ParallelPlan, device: torch.device) -> World:
    """The world of processes that have already joined."""
    if dist.get_world_size() != plan.processes:
        raise RuntimeError(
            f"plan {plan} needs {plan.processes} processes, {dist.get_world_size()} were launched"
        )
    extents = (plan.pp, plan.replicate, plan.shard, plan.cp, plan.tp)
    ranks = torch.arange(plan.processes, dtype=torch.int).view(extents)
    groups = _Groups(ranks, {tuple(range(plan.processes)): dist.distributed_c10d._get_default_group()})
    kind = "cpu" if plan.devices else device.type
    mesh = DeviceMesh.from_group([groups.along(axis) for axis in AXES], kind, ranks, mesh_dim_names=AXES)
    flattened = {name: _flatten(mesh, name, axes, groups.along(*axes)) for name, axes in _FLATTENED.items()}
    return World(plan, mesh, flattened, device)


@dataclass(frozen=True)
class _Groups:
    """Process groups along the axes of the plan, one for each set of ranks; only a group's members create it.

    `init_device_mesh` would have every process take part in the creation of every group, of which it would also make several
    for the same ranks.
    """

    ranks: torch.Tensor
    made: dict[tuple[int, ...], dist.ProcessGroup]

    def along(self, *axes: str) -> dist.ProcessGroup:
        """The group of this process and those that differ from it only along `axes`."""
        place = (self.ranks == dist.get_rank()).nonzero()[0].tolist()
        index = tuple(slice(None) if axis in axes else place[number] for number, axis in enumerate(AXES))
        members = tuple(self.ranks[index].flatten().tolist())
        if members not in self.made:
            self.made[members] = dist.new_group(members, use_local_synchronization=True)
        return self.made[members]


def _flatten(mesh: DeviceMesh, name: str, axes: tuple[str, ...], group: dist.ProcessGroup) -> DeviceMesh:
    """As `mesh[axes]._flatten(name)`, with a group that is there already, if this version of torch describes meshes as the pinned one."""
    if not hasattr(_MeshLayout, "collapse"):
        made: DeviceMesh = mesh[axes]._flatten(name)
        return made
    flat = DeviceMesh(
        mesh.device_type,
        mesh_dim_names=(name,),
        _init_backend=False,
        _layout=_MeshLayout([mesh[axes]._layout.collapse()]),
        _rank_map=mesh._rank_map,
        _root_mesh=mesh,
    )
    flat._dim_group_names = [group.group_name]
    mesh._pg_registry[group.group_name] = group
    mesh._flatten_mapping[name] = flat
    return flat


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
