"""Layout: how a model may be split over processes, declared by its author.

The model itself is unaware of it. Paths are those of `named_modules`; `*` stands for one component.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn


class Chain(nn.Module):
    """A model whose children run one after another, those of a `ModuleDict` in turn: the `order` of its layout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            for part in child.values() if isinstance(child, nn.ModuleDict) else (child,):
                x = part(x)
        return x


@dataclass(frozen=True)
class Operator:
    """How the tensors of one module are sharded over tp ranks: a dim is sharded, None is replicated.

    It only declares where data lies; torch derives the computation and the communication. For instance,
    `Operator(params={"weight": 0}, output=-1)` is a linear layer of which every process has some rows and computes those
    features. A function without params is annotated as a module that calls it.

    Attributes:
        inputs: of forward's arguments in order; further ones are replicated.
        output: None returns a plain tensor; a sharded output stays sharded, for another such operator or functions
            without params in between.
        params: by name; others are replicated.
    """

    inputs: tuple[int | None, ...] = ()
    output: int | None = None
    params: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Layout:
    """The roles of a model's modules.

    Attributes:
        order: modules whose composition is the forward pass: each takes the output of the previous one. `*` stands for
            all children in turn, which are the layers a pipeline splits between. Empty where there is no such
            composition: neither stages nor frozen layers.
        columns: linear layers whose outputs may be split, by head or feature; the following modules work on a share.
            Where sequences are split in between, the modules that hold them see whole ones.
        rows: linear layers whose inputs may be split; their outputs are partial sums.
        vocabulary: the embedding, whose rows may be split.
        head: the last linear layer, whose outputs are the classes.
        norms: normalisations over features, which may see only a part of the sequence.
        attention: modules (query [B, H, T, D], key and value [B, G, T, D]) -> [B, H, T, D], whose heads may be split;
            G divides H. With parts of sequences, a module that has an attribute `offset` gets the position of its first
            token.
        positions: modules that give something for the positions of tokens, such as learned rows or rotations: a module
            (numbers [T]) -> a row for each, such as an `nn.Embedding`, or (table [T, D]) -> rows of it for the tokens in
            turn. With cached keys and values, tokens at any positions are computed together.
        experts: modules (x [N, D] sorted by expert, counts [E]) -> [N, D], with one row of every parameter per expert.
        balance: modules that add the losses of routers to the gradients, as means over rows, with the attributes of
            `models.zoo.moe.Balance`.
        operators: sharding of single modules of any kind over the tp ranks, by path.
        heads, kv_heads, width, hidden, length: sizes, as in `models.pretrain.plan.Sizes`.
        experts_count: experts of one layer.
        tied: whether modules of `order` share a param, so that they cannot form stages.
        documents: whether attention is confined to documents, which are found in the tokens of whole sequences
            (`models.pretrain.data.documents`).
    """

    order: tuple[str, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    vocabulary: str = ""
    head: str = ""
    norms: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    balance: tuple[str, ...] = ()
    operators: Mapping[str, Operator] = field(default_factory=dict, hash=False)
    heads: int = 0
    kv_heads: int = 0
    width: int = 0
    hidden: int = 0
    length: int = 0
    experts_count: int = 0
    tied: bool = False
    documents: bool = False

    @property
    def layers(self) -> str:
        """Path of the container of layers; empty without one."""
        return next((path.removesuffix(".*") for path in self.order if path.endswith(".*")), "")

    def layer_names(self, module: nn.Module) -> list[str]:
        """Paths of the layers of `module`, in order."""
        container = self.layers
        return (
            [f"{container}.{name}" for name, _ in module.get_submodule(container).named_children()]
            if container
            else []
        )

    def sequence(self, module: nn.Module) -> list[str]:
        """`order` of `module` with the name of every layer."""
        return [
            name
            for path in self.order
            for name in (self.layer_names(module) if path.endswith(".*") else [path])
        ]


def matching(module: nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Submodules of `module` whose path matches one of `patterns`."""
    expressions = [
        re.compile(r"[^.]+".join(map(re.escape, pattern.split("*")))) for pattern in patterns if pattern
    ]
    for name, part in module.named_modules():
        if any(expression.fullmatch(name) for expression in expressions):
            yield name, part
