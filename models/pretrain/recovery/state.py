"""The state of a training on one process, as named tensors that a checkpoint saves and loads under any plan.

Tensors have the names of the whole model: params and buffers their own, optimizer state `optim.<param>.<key>`. Every
process contributes its shards, and reads back those its current plan gives it, whoever wrote them. Rank-local state
(`RankState`) is saved as `own.<rank>.<name>` and fits the same plan only. Data order and dropout are functions of seed
and step (see `batches` and `trainer`), so they need no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from models.pretrain.params import named_tensors, unwrapped_name

if TYPE_CHECKING:
    from models.pretrain.recovery.shards import Stored

OPTIMIZER = "optim."
RANK = "own."


class RankState(Protocol):
    """State that one process keeps between steps and no other process shares, such as compression errors.

    Attributes:
        kind: what wrote it, and its layout; it can only be restored into the same kind.
    """

    kind: str

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it, live."""

    def synchronized(self) -> dict[int, torch.Tensor]:
        """Values that other plans resume from in place of this process's params and optimizer state: the same on all
        processes, by the `id` of the live tensor. A collective."""

    def restore(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Continues after `step` with what `tensors` returned; afresh if it is empty."""


@dataclass(frozen=True)
class State:
    """The tensors a process keeps, by name: live ones, which loading fills.

    Attributes:
        buffers: whether this process saves buffers. Processes with different rows have different ones (running
            statistics); those of the first are saved, as when the whole model is gathered.
        rank_state: its rank-local state, if any.
        rank: among all processes.
        frozen: whether it has params that are not trained; a fine-tuning has them from elsewhere.
    """

    parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    buffers: bool = True
    rank_state: RankState | None = None
    rank: int = 0
    frozen: bool = True

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        """Everything a checkpoint keeps of this process. A collective."""
        rank_state = self.rank_state
        synchronized = {} if rank_state is None else rank_state.synchronized()
        live = self._live()
        own = {} if rank_state is None else rank_state.tensors()
        return {
            **{name: synchronized.get(id(tensor), tensor).detach() for name, tensor in live.items()},
            **{f"{RANK}{self.rank}.{name}": tensor.detach() for name, tensor in own.items()},
        }

    def allocate_rank_state(self, stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        """Empty tensors for this process's rank-local state in a checkpoint, by stored name."""
        device = next((p.device for part in self.parts for p in part.parameters()), torch.device("cpu"))
        return {
            name: torch.empty(
                metadata.shape, dtype=metadata.dtype, device=device if metadata.shape else "cpu"
            )
            for name, metadata in stored.items()
            if name.startswith(f"{RANK}{self.rank}.")
        }

    def _live(self) -> dict[str, torch.Tensor]:
        """Params, buffers, and existing optimizer state: none before the first step, and only of owned params."""
        tensors = {
            name: tensor
            for name, tensor in self._named().items()
            if self.buffers or isinstance(tensor, nn.Parameter)
        }
        for name, state, _, _ in self._owned():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{OPTIMIZER}{name}.{key}"] = value
        return tensors

    def tensors_to_load(self) -> dict[str, torch.Tensor]:
        """The tensors a checkpoint fills, all buffers included."""
        return {name: tensor.detach() for name, tensor in replace(self, buffers=True)._live().items()}

    def allocate_optimizer_state(self, stored: Mapping[str, Stored]) -> None:
        """Replaces the optimizer state by zeros of the shapes in a checkpoint."""
        keys: dict[str, list[str]] = {}
        for stored_name in stored:
            if stored_name.startswith(OPTIMIZER):
                name, _, key = stored_name.removeprefix(OPTIMIZER).rpartition(".")
                keys.setdefault(name, []).append(key)
        for name, state, parameter, group in self._owned():
            state.clear()
            for key in keys.get(name, []):
                metadata = stored[f"{OPTIMIZER}{name}.{key}"]
                if metadata.shape == tuple(parameter.shape):
                    state[key] = torch.zeros_like(parameter, dtype=metadata.dtype).detach()
                else:  # a step count, which fused optimizers need on the device of the params
                    device = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
                    state[key] = torch.zeros(metadata.shape, dtype=metadata.dtype, device=device)

    def _named(self) -> dict[str, torch.Tensor]:
        return {
            unwrapped_name(name): tensor
            for part in self.parts
            for name, tensor in named_tensors(part).items()
            if self.frozen or tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        }

    def _owned(self) -> Iterator[tuple[str, dict[str, Any], torch.Tensor, dict[str, Any]]]:
        names = {id(tensor): name for name, tensor in self._named().items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield names[id(parameter)], optimizer.state[parameter], parameter, group
