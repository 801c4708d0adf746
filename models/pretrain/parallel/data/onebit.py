"""1-bit Adam (Tang 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed").

    warm-up      Adam, its gradients averaged in float32
    afterwards   the variance is frozen; every process updates its momentum with its own gradient, and momenta are
                 averaged as sign bits, 8 to a byte, with one scale for `BLOCK` values (Algorithm 1)

The rounding error of the signs is kept and added before the next rounding, on the sender's side and again where a
chunk is averaged ("worker" and "server" error), so errors do not accumulate. Averaging takes two steps: every process
averages one chunk of the vector (all-to-all) and sends the result to all (all-gather). Each process sends
2 (N-1)/N of the packed vector: 1/32 of a ring all-reduce of float32, plus a few per cent for scales.

The state of a param has the keys of `torch.optim.AdamW`. Errors are not part of it; checkpoints keep them separately
(`CompressedMean.tensors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BLOCK = 1024
"""Values that share a scale; a multiple of 8."""

_BYTES_PER_BLOCK = BLOCK // 8 + 4


class OneBitAdam(torch.optim.Optimizer):
    """AdamW for `warmup` steps, then with its variance frozen and momenta exchanged as signs.

    During warm-up gradients must already be averaged; afterwards (`compressing`) they are each process's own.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float,
        warmup: int,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.warmup = warmup
        values = sum(p.numel() for each in self.param_groups for p in each["params"])
        self.mean = CompressedMean(group, values)

    @property
    def compressing(self) -> bool:
        """Whether the next step exchanges momenta."""
        parameter = self.param_groups[0]["params"][0]
        state = self.state.get(parameter, {})
        return int(state.get("step", 0)) >= self.warmup

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Adam's step; `closure` must be None."""
        assert closure is None
        compressing = self.compressing
        stepped = [
            (p, self._state_of(p), g) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        for parameter, state, group in stepped:
            beta1, beta2 = group["betas"]
            state["step"] += 1
            state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
            if not compressing:
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                state["variance_step"] += 1
        if compressing:
            _replace([state["exp_avg"] for _, state, _ in stepped], self.mean)
        for parameter, state, group in stepped:
            beta1, beta2 = group["betas"]
            variance = state["exp_avg_sq"] / (1 - beta2 ** int(state["variance_step"]))
            if compressing:
                # a sign's momentum is never 0: where warm-up saw no gradient, epsilon alone would divide it
                variance = torch.where(variance == 0, variance.mean(), variance)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.addcdiv_(
                state["exp_avg"],
                variance.sqrt_().add_(group["eps"]),
                value=-group["lr"] / (1 - beta1 ** int(state["step"])),
            )
        return None

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        # missing in a training that resumed with other steps, or started with Adam and a shorter warm-up
        state.setdefault("variance_step", state["step"].clone())
        return state


class CompressedMean:
    """The mean of a vector of `values` over processes, sent as signs and scales, with error feedback on both sides.

    Attributes:
        worker_error, server_error: accumulated rounding errors, of this process's vector and of its chunk.
        kind: as in `models.pretrain.recovery.state.RankState`.
    """

    def __init__(self, group: dist.ProcessGroup, values: int) -> None:
        self.group = group
        self.kind = f"onebit, {group.size()} processes, {values} values"
        self.worker_error = torch.zeros(0)
        self.server_error = torch.zeros(0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The errors, if there are any yet."""
        errors = {"worker_error": self.worker_error, "server_error": self.server_error}
        return {name: error for name, error in errors.items() if len(error)}

    def synchronized(self) -> dict[int, torch.Tensor]:
        """Nothing: params are the same everywhere."""
        return {}

    def restore(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Continues with what `tensors` returned; without any, with no errors."""
        self.worker_error = tensors.get("worker_error", torch.zeros(0))
        self.server_error = tensors.get("server_error", torch.zeros(0))

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        """Approximate mean of `vector`, float32 [n], over the group; the same on all. n is always `values`."""
        processes = self.group.size()
        blocks = math.ceil(len(vector) / (BLOCK * processes))
        chunk = blocks * BLOCK
        if len(self.worker_error) != chunk * processes:
            self.worker_error = vector.new_zeros(chunk * processes)
            self.server_error = vector.new_zeros(chunk)

        self.worker_error[: len(vector)] += vector
        outgoing = pack(self.worker_error)
        self.worker_error -= unpack(outgoing)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self.group)

        self.server_error += unpack(incoming).view(processes, chunk).mean(0)
        averaged = pack(self.server_error)
        self.server_error -= unpack(averaged)
        everything = torch.empty_like(outgoing)
        dist.all_gather_single(everything, averaged, group=self.group)
        return unpack(everything)[: len(vector)]


def pack(vector: torch.Tensor) -> torch.Tensor:
    """Signs and block scales of `vector`, float32 [k · BLOCK], as bytes [k · (BLOCK / 8 + 4)].

    A block's scale is the mean of its absolute values, which minimizes the rounding error.
    """
    blocks = vector.view(-1, BLOCK)
    bits = (blocks >= 0).view(len(blocks), -1, 8).to(torch.uint8)
    signs = (bits << _shifts(vector.device)).sum(-1, dtype=torch.uint8)
    scales = blocks.abs().mean(1, keepdim=True)
    return torch.cat([signs, scales.view(torch.uint8)], dim=1).flatten()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Every value as plus or minus the scale of its block."""
    blocks = packed.view(-1, _BYTES_PER_BLOCK)
    bits = blocks[:, : BLOCK // 8, None] >> _shifts(packed.device) & 1
    scales = blocks[:, BLOCK // 8 :].contiguous().view(torch.float32)
    return bits.flatten(1).float().mul_(2).sub_(1).mul_(scales).flatten()


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _replace(momenta: list[torch.Tensor], mean: CompressedMean) -> None:
    averaged = mean(torch.cat([momentum.flatten() for momentum in momenta]))
    sizes = [momentum.numel() for momentum in momenta]
    for momentum, values in zip(momenta, torch.split(averaged, sizes), strict=True):
        momentum.copy_(values.view_as(momentum))
