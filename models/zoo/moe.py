"""A causal transformer whose feed-forward networks are mixtures of experts: a router sends every token to a few of them
(Shazeer 2017; Fedus 2021, Switch, with `chosen` = 1).

An expert takes all tokens sent to it: there is no capacity, so no token is dropped, and the output of a token does not
depend on the others of its batch. For the same reason there is no load-balancing loss: it would depend on the tokens in
one process's share, and so on the plan. Everything else is `models.zoo.gpt`.

Shapes: B rows, T tokens, D width, N = B · T · chosen token copies to compute, E experts, F features of an expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from models.zoo import gpt
from models.zoo.spec import ModelSpec
from models.zoo.transformer import require_divisible, sequence_length


class Mixture(nn.Module):
    """[B, T, D] -> [B, T, D]: the sum of the chosen experts' outputs, each times its probability (Fedus 2021,
    equations 1 and 2; not renormalised, so that with one expert per token the router still has a gradient)."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen, self.count = chosen, experts
        self.router = gpt.linear(width, experts)
        self.experts = Experts(width, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        # float32 even where products are bfloat16: choices must not flip by rounding (Fedus 2021, section 2.4)
        odds = self.router(tokens).float().softmax(-1)
        weight, expert = odds.topk(self.chosen, dim=-1)  # [B·T, chosen]
        by_expert = expert.flatten().argsort(stable=True)  # [N]
        token = by_expert // self.chosen
        outputs = self.experts(tokens[token], torch.bincount(expert.flatten(), minlength=self.count))
        weighted = outputs * weight.flatten()[by_expert, None].to(outputs.dtype)
        total = torch.zeros_like(tokens, dtype=weighted.dtype).index_add(0, token, weighted)
        return total.view_as(x)


class Experts(nn.Module):
    """(x [N, D] sorted by expert, counts [E]) -> [N, D]; every parameter has one row per expert."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))
        for matrices in (self.up, self.down):
            nn.init.normal_(matrices, std=gpt.INITIAL_DEVIATION)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        # an expert without tokens multiplies an empty matrix, so that its gradient is zero rather than missing
        parts = torch.split(x, counts.tolist())
        return torch.cat(
            [
                F.gelu(part @ up, approximate="tanh") @ down
                for part, up, down in zip(parts, self.up, self.down, strict=True)
            ]
        )


class MoE(gpt.GPT):
    """x [B, T] token ids -> logits [B, T, vocab]."""

    def __init__(
        self, length: int, vocab: int, width: int, layers: int, heads: int, experts: int, chosen: int
    ) -> None:
        super().__init__(length, vocab, width, layers, heads)
        for block in self.layers.values():
            mixture = Mixture(width, experts, chosen)
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
) -> ModelSpec:
    """`input_shape` is (T,); `classes` is the vocabulary; every token passes through `chosen` of `experts`.

    Raises:
        ValueError: not token sequences, a width that `heads` does not divide, or more experts chosen than there are.
    """
    length = sequence_length(input_shape)
    require_divisible(width, heads)
    if not 1 <= chosen <= experts:
        raise ValueError(f"chosen is {chosen}, expected 1 to the {experts} experts")
    attention = gpt.layout(length, width, heads)
    return ModelSpec(
        "moe",
        lambda: MoE(length, classes, width, layers, heads, experts, chosen),
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
        },
        vocab=classes,
        layout=replace(
            attention,
            columns=tuple(name for name in attention.columns if ".mlp." not in name),
            rows=tuple(name for name in attention.rows if ".mlp." not in name),
            experts=("layers.*.mlp.experts",),
            experts_count=experts,
        ),
    )
