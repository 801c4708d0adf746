"""1-bit Adam (Tang 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed").

    warm-up      Adam as ever, its gradients averaged in float32
    afterwards   the variance stays as it is; every process moves its momentum by its own gradient, and momenta are
                 averaged as sign bits, 8 to a byte, with one scale for `BLOCK` values (Algorithm 1)

What rounding to a sign loses is kept and added before the next rounding, on the sender's side and again where a
chunk is averaged ("worker" and "server" error), so that the errors do not add up. The average takes two steps:
every process averages one chunk of the vector (all-to-all) and tells the result to all (all-gather), by which each
sends 2 (N-1)/N of the packed vector: 1/32 of what a ring all-reduce of float32 sends, and a few per cent for scales.

The state of a param has the names that `torch.optim.AdamW` gives it. Errors are not part of it: a training that
resumes begins with none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BLOCK = 1024
"""Values that share a scale; a multiple of 8."""

_BYTES_PER_BLOCK = BLOCK // 8 + 4


class OneBitAdam(torch.optim.Optimizer):
    """AdamW for `warmup` steps, then with its variance frozen and momenta exchanged as signs.

    Until then the gradients must be averaged already, from then on (`compressing`) be each process's own.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        warmup: int,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.warmup = warmup
        self.mean = CompressedMean(group)

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
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(parameter) for parameter in parameters]
            beta1, beta2 = group["betas"]
            for parameter, state in zip(parameters, states, strict=True):
                state["step"] += 1
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                if not compressing:
                    state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
            if compressing:
                _replace([state["exp_avg"] for state in states], self.mean)
            for parameter, state in zip(parameters, states, strict=True):
                step = int(state["step"])
                variance = state["exp_avg_sq"] / (1 - beta2 ** min(step, self.warmup))
                if compressing:
                    variance = _filled(variance)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(
                    state["exp_avg"],
                    variance.sqrt_().add_(group["eps"]),
                    value=-group["lr"] / (1 - beta1**step),
                )
        return None

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


class CompressedMean:
    """The mean of a vector over processes, sent as signs and scales, with error feedback on both sides.

    Attributes:
        worker_error, server_error: what the roundings so far have left out, of the own vector and of the own chunk.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.worker_error = torch.zeros(0)
        self.server_error = torch.zeros(0)

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        """About the mean of `vector`, float32 [n], over the group; the same on all. n stays the same over calls."""
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

    A block's scale is the mean of its absolute values: no other makes the rounding error smaller.
    """
    blocks = vector.view(-1, BLOCK)
    bits = (blocks >= 0).view(len(blocks), -1, 8).to(torch.uint8)
    signs = (bits << _shifts(vector.device)).sum(-1, dtype=torch.uint8)
    scales = blocks.abs().mean(1, keepdim=True)
    return torch.cat([signs, scales.view(torch.uint8)], dim=1).flatten()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Every value as plus or minus its block's scale."""
    blocks = packed.view(-1, _BYTES_PER_BLOCK)
    bits = blocks[:, : BLOCK // 8, None] >> _shifts(packed.device) & 1
    scales = blocks[:, BLOCK // 8 :].contiguous().view(torch.float32)
    return ((bits.flatten(1).float() * 2 - 1) * scales).flatten()


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _replace(momenta: list[torch.Tensor], mean: CompressedMean) -> None:
    averaged = mean(torch.cat([momentum.flatten() for momentum in momenta]))
    sizes = [momentum.numel() for momentum in momenta]
    for momentum, values in zip(momenta, torch.split(averaged, sizes), strict=True):
        momentum.copy_(values.view_as(momentum))


def _filled(variance: torch.Tensor) -> torch.Tensor:
    """`variance` with its tensor's mean where no gradient was seen during the warm-up.

    There a sign's momentum, which is never 0, would be divided by nothing but epsilon.
    """
    return torch.where(variance == 0, variance.mean(), variance)
