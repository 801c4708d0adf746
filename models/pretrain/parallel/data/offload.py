"""Param shards and optimizer state kept on disk between steps (zero=3, offload=disk).

They are ordinary tensors whose memory is a mapped file, so any code can read and write them at any time. After every
step the pages are released: the process keeps none resident, and the kernel, which has them in its page cache, may
write them out and drop them when it needs memory. Gradients are dropped instead.

Files have no name: they vanish with the process. They lie in `TMPDIR`, which must be on a disk (a tmpfs is memory).
During a step pages come back as they are touched: one layer's params at a time in forward and backward, everything an
optimizer owns while it steps.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from models.pretrain.dtensor import local_tensor

_mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""Address of a mapped tensor's memory -> its mapping, which lives as long as a tensor that uses it."""


def mapped(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor`, which is on the CPU, backed by its own file."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return tensor
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        pages = mmap.mmap(file.fileno(), size)
    copy = torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    _mapped[copy.untyped_storage().data_ptr()] = pages
    return copy


def is_mapped(tensor: torch.Tensor) -> bool:
    return local_tensor(tensor).untyped_storage().data_ptr() in _mapped


def release(tensor: torch.Tensor) -> None:
    """Releases the pages of a mapped tensor; its values stay in the file."""
    pages = _mapped.get(local_tensor(tensor).untyped_storage().data_ptr())
    if pages is not None:
        pages.madvise(mmap.MADV_DONTNEED)


def map_params(parts: Iterable[nn.Module]) -> None:
    """Moves the shards of fully sharded modules into files."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                _map_shards(module)


def release_after_steps(optimizer: torch.optim.Optimizer) -> None:
    """From now on, `optimizer`'s params and state are released to their files after each of its steps."""

    def release_all(*_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
                release(parameter.detach())
                state = optimizer.state[parameter]
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        state[key] = value if is_mapped(value) else _in_file(value)
                        release(state[key])

    optimizer.register_step_post_hook(release_all)


def _in_file(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose values on this process are in a file."""
    if not isinstance(tensor, DTensor):
        return mapped(tensor)
    local, mesh, placements = mapped(tensor.to_local()), tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride())


def _map_shards(module: FSDPModule) -> None:
    """Replaces the memory of the module's own shards. Torch 2.13 has no public way: assigning tensors in place of the
    old ones copies those that do not divide evenly."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for shard in group.fsdp_params:
            flat = mapped(shard._sharded_param_data)
            parameter: Any = shard.sharded_param
            local = parameter._local_tensor
            shard._sharded_param_data = flat
            parameter._local_tensor = flat.as_strided(
                local.size(), local.stride(), local.storage_offset()
            ).requires_grad_(local.requires_grad)
            release(flat)
