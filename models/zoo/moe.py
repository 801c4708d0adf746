"""A causal transformer whose feed-forward networks are mixtures of experts: a router sends every token to a few of them
(Shazeer 2017; Fedus 2021, Switch, with `chosen` = 1).

An expert takes all tokens sent to it: there is no capacity, so no token is dropped, and the output of a token does not
depend on the others of its batch. A balancing loss keeps routers from sending most tokens to few experts. Everything
else is `models.zoo.gpt`.

Shapes: B rows, T tokens, D width, N = B · T · chosen token copies to compute, E experts, F features of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from models.zoo import gpt
from models.zoo.spec import ModelSpec
from models.zoo.transformer import require_divisible, sequence_length

_ALIGNED_BYTES = 16
"""Of the rows that `torch.nn.functional.grouped_mm` multiplies."""


class Mixture(nn.Module):
    """[B, T, D] -> [B, T, D]: the sum of the chosen experts' outputs, each times its probability (Fedus 2021,
    equations 1 and 2; not renormalised, so that with one expert per token the router still has a gradient)."""

    def __init__(
        self, width: int, experts: int, chosen: int, balance: float = 0.0, router_z: float = 0.0
    ) -> None:
        super().__init__()
        self.chosen, self.count = chosen, experts
        self.router = gpt.linear(width, experts)
        self.experts = Experts(width, experts)
        self.balance = Balance(balance, router_z)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        # float32 even where products are bfloat16: choices must not flip by rounding (Fedus 2021, section 2.4)
        scores = self.router(tokens).float()
        weight, expert = scores.softmax(-1).topk(self.chosen, dim=-1)  # [B·T, chosen]
        by_expert = expert.flatten().argsort(stable=True)  # [N]
        token = by_expert // self.chosen
        counts = expert.new_zeros(self.count).scatter_add_(0, expert.flatten(), torch.ones_like(by_expert))
        outputs = self.experts(tokens[token], counts)
        weighted = outputs * weight.flatten()[by_expert, None].to(outputs.dtype)
        total = torch.zeros_like(tokens, dtype=weighted.dtype).index_add(0, token, weighted)
        output: torch.Tensor = self.balance(total.view_as(x), scores, expert)
        return output


class Balance(nn.Module):
    """Adds the gradient of a router's losses to what flows back through the mixture, in training mode only.

    (output [B, T, D], scores [B·T, E], expert [B·T, chosen]) -> output, unchanged. The losses of a row are

        balance · E · sum over experts of f · P    f: share of the row's token copies sent to the expert, P: mean of its
                                                   probability over the row's tokens (Fedus 2021, equation 4)
        router_z · mean over tokens of logsumexp(scores)²                             (Zoph 2022, ST-MoE, equation 5)

    and count as their mean over the rows of a batch. Like the equation they balance the tokens of one batch, here of one
    sequence (DeepSeek-AI 2024, DeepSeek-V2, section 2.2.3): so they do not depend on which rows a process computes
    together. Rows without a gradient, because none of their labels counts, have no such losses.

    Attributes:
        row_weight: of each row's losses; None: 1 / B.
        total: sums a tensor over the processes that have parts of the same rows.
    """

    def __init__(self, balance: float, router_z: float) -> None:
        super().__init__()
        self.coefficient, self.router_z = balance, router_z
        self.row_weight: float | None = None
        self.total: Callable[[torch.Tensor], torch.Tensor] = _alone

    def forward(self, output: torch.Tensor, scores: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        needed = self.training and torch.is_grad_enabled() and scores.requires_grad
        if not needed or not (self.coefficient or self.router_z):
            return output
        rows, experts = output.shape[0], scores.shape[-1]
        scores = scores.view(rows, -1, experts)
        chosen = expert.view(rows, -1)  # [B, T · chosen]
        sent = scores.new_zeros(rows, experts).scatter_add_(
            1, chosen, torch.ones_like(chosen, dtype=scores.dtype)
        )
        sent = self.total(sent)
        tokens = sent.sum(1) / expert.shape[1]  # of whole rows
        odds = scores.softmax(-1).sum(1)
        losses = self.coefficient * experts * (sent * odds).sum(1) / (sent.sum(1) * tokens)
        losses = losses + self.router_z * scores.logsumexp(-1).square().sum(1) / tokens
        weight = 1 / rows if self.row_weight is None else self.row_weight
        added: torch.Tensor = _WithLosses.apply(output, losses, weight, self.total)  # type: ignore[no-untyped-call]
        return added


class _WithLosses(torch.autograd.Function):
    """(output [B, …], losses [B]) -> output; in the backward pass each loss has the gradient `weight`, in rows with any."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        losses: torch.Tensor,
        weight: float,
        total: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.weight, ctx.total, ctx.dtype = weight, total, losses.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        counted = ctx.total(gradient.flatten(1).count_nonzero(1)) > 0
        return gradient, counted.to(ctx.dtype) * ctx.weight, None, None


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x


class Experts(nn.Module):
    """(x [N, D] sorted by expert, counts [E]) -> [N, D]; every parameter has one row per expert."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))
        for matrices in (self.up, self.down):
            nn.init.normal_(matrices, std=gpt.INITIAL_DEVIATION)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).int()
        return _grouped(F.gelu(_grouped(x, self.up, ends), approximate="tanh"), self.down, ends)


def _grouped(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Every row of x [N, in] times the matrix [in, out] of its expert, whose rows end before `ends` [E]: [N, out]."""
    if torch.is_autocast_enabled(x.device.type):  # which knows no grouped product
        dtype = torch.get_autocast_dtype(x.device.type)
        x, matrices = x.to(dtype), matrices.to(dtype)
    if not len(x):  # the product takes no empty x
        return x @ matrices.sum(0)
    inner, outer = (-features % (_ALIGNED_BYTES // x.element_size()) for features in matrices.shape[1:])
    product = F.grouped_mm(F.pad(x, (0, inner)), F.pad(matrices, (0, outer, 0, inner)), offs=ends)
    return product[:, : matrices.shape[2]]


def _operations(x: tuple[int, ...], matrices: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Floating-point operations of a grouped product, from shapes; backwards too, where the second has two dimensions."""
    return 2 * x[0] * x[1] * matrices[-1]


if torch.ops.aten._grouped_mm not in flop_registry:  # torch counts none for it
    register_flop_formula(torch.ops.aten._grouped_mm)(_operations)


class MoE(gpt.GPT):
    """x [B, T] token ids -> logits [B, T, vocab]."""

    def __init__(
        self,
        length: int,
        vocab: int,
        width: int,
        layers: int,
        heads: int,
        mixture_of: Callable[[], Mixture],
    ) -> None:
        super().__init__(length, vocab, width, layers, heads)
        for block in self.layers.values():
            mixture = mixture_of()
            nn.init.normal_(mixture.experts.down, std=gpt.INITIAL_DEVIATION * (2 * layers) ** -0.5)
            block.register_module("mlp", mixture)


def spec(
    input_shape: tuple[int, ...],
    classes: int,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    experts: int = 8,
    chosen: int = 1,
    balance: float = 0.01,
    router_z: float = 0.0,
) -> ModelSpec:
    """`input_shape` is (T,); `classes` is the vocabulary; every token passes through `chosen` of `experts`.

    `balance`, `router_z`: coefficients of the routers' losses (`Balance`).

    Raises:
        ValueError: not token sequences, a width that `heads` does not divide, or more experts chosen than there are.
    """
    length = sequence_length(input_shape)
    require_divisible(width, heads)
    if not 1 <= chosen <= experts:
        raise ValueError(f"chosen is {chosen}, expected 1 to the {experts} experts")
    for name, coefficient in (("balance", balance), ("router_z", router_z)):
        if not 0 <= coefficient < math.inf:
            raise ValueError(f"{name} is {coefficient}, expected a coefficient of 0 or more")
    mixture = partial(Mixture, width, experts, chosen, balance, router_z)
    attention = gpt.layout(length, width, heads)
    return ModelSpec(
        "moe",
        lambda: MoE(length, classes, width, layers, heads, mixture),
        input_shape,
        classes,
        input_dtype="int32",
        task="next_token",
        options={
            "width": width,
            "layers": layers,
            "heads": heads,
            "experts": experts,
            "chosen": chosen,
            "balance": balance,
            "router_z": router_z,
        },
        vocab=classes,
        layout=replace(
            attention,
            columns=tuple(name for name in attention.columns if ".mlp." not in name),
            rows=tuple(name for name in attention.rows if ".mlp." not in name),
            experts=("layers.*.mlp.experts",),
            balance=("layers.*.mlp.balance",),
            experts_count=experts,
        ),
    )
