"""A model that keeps keys and values of tokens it has computed, in blocks.

The model itself is unaware of it: modules that its layout names are replaced. Attention (`Layout.attention`) writes the
keys and values of a batch's tokens into blocks and lets each sequence look at its own; positions (`Layout.positions`),
learned rows or rotations, are looked up for every token; and the logits are computed only where they are wanted.

Shapes: N tokens of a batch, H heads, G heads of keys and values, D features of a head, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from models.serving.generation.batch import Batch, Group
from models.zoo.layout import Layout, matching


@dataclass(frozen=True)
class GroupTensors:
    """A `Group` on the device.

    Attributes:
        first: place in the cache of the first token, where the others follow one after another; None: in `blocks`.
        queries: positions [sequences, tokens].
        mask: [sequences, 1, tokens, context], 0 for what a query sees, else minus infinity; None: it sees all.
    """

    start: int
    tokens: int
    sequences: int
    context: int
    first: int | None
    blocks: torch.Tensor | None
    queries: torch.Tensor
    mask: torch.Tensor | None

    @property
    def end(self) -> int:
        return self.start + self.tokens * self.sequences


@dataclass
class Current:
    """The batch that is being computed, as the replaced modules see it."""

    positions: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    slots: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    outputs: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    groups: tuple[GroupTensors, ...] = ()


class CachedAttention(nn.Module):
    """Query [1, H, N, D], key and value [1, G, N, D] -> [1, H, N, D]; keys and values of earlier tokens come from the blocks."""

    def __init__(self, inner: nn.Module, current: Current, blocks: int, block_tokens: int) -> None:
        super().__init__()
        self.current, self.blocks, self.block_tokens = current, blocks, block_tokens
        self.visible = getattr(inner, "visible", None)
        self.keys = self.values = torch.empty(0)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor
    ) -> torch.Tensor:
        """`masks`, which the model makes for the tokens of one sequence, do not apply."""
        if not len(self.keys):
            self.keys, self.values = self._allocate(key), self._allocate(value)
        self.keys.index_copy_(0, self.current.slots, key[0].transpose(0, 1))
        self.values.index_copy_(0, self.current.slots, value[0].transpose(0, 1))
        mixed = [self._attend(query[0, :, group.start : group.end], group) for group in self.current.groups]
        if padding := query.shape[2] - sum(part.shape[1] for part in mixed):
            mixed.append(query.new_zeros(query.shape[1], padding, value.shape[3]))
        return (torch.cat(mixed, 1) if len(mixed) > 1 else mixed[0])[None]

    def _attend(self, query: torch.Tensor, group: GroupTensors) -> torch.Tensor:
        """[H, sequences · tokens, D] -> the same."""
        H, _, D = query.shape
        queries = query.view(H, group.sequences, group.tokens, D).transpose(0, 1)
        keys, values = (self._context(cache, group) for cache in (self.keys, self.values))
        # kernels of GPUs take the bits of another dtype for their own
        mask = None if group.mask is None else group.mask.to(query.dtype)
        if self.visible is not None:
            seen = self.visible(group.queries[..., None], torch.arange(group.context, device=query.device))
            hidden = query.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None]
            mask = hidden if mask is None else mask + hidden
        grouped = keys.shape[1] != H
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=grouped)
        return mixed.transpose(0, 1).reshape(H, -1, values.shape[3])

    def _context(self, cache: torch.Tensor, group: GroupTensors) -> torch.Tensor:
        """[sequences, G, context, D]: a view where blocks follow one another, else a copy of the same strides."""
        _, G, D = cache.shape
        if group.blocks is None:
            rows = cache.narrow(0, group.first or 0, group.context)[None]
        else:
            rows = cache.view(-1, self.block_tokens * G * D).index_select(0, group.blocks)
            rows = rows.view(group.sequences, -1, G, D)[:, : group.context]
        return rows.transpose(1, 2)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros, as a masked value that is not finite would spoil a sum."""
        return like.new_zeros((self.blocks + 1) * self.block_tokens, like.shape[1], like.shape[3])


class Positions(nn.Module):
    """Rows for the positions of the tokens of a batch [N, D]."""

    def __init__(self, inner: nn.Module, current: Current) -> None:
        super().__init__()
        self.current = current
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: the numbers of the positions that the tokens would have in one sequence, or the table of all rows."""
        if x.dim() == 1:
            rows: torch.Tensor = self.inner(self.current.positions)
            return rows
        return x[self.current.positions]


class CachedModel:
    """`module` with a cache of `blocks` blocks of `block_tokens` tokens; shares its params and leaves it unchanged.

    Args:
        split: the part of the model that this process computes; by default all of it. It takes a copy.

    Attributes:
        device: of the params.
        current: the batch that `compute` computes.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        blocks: int,
        block_tokens: int,
        split: Callable[[nn.Module], nn.Module] = lambda whole: whole,
    ) -> None:
        whole = share_params(module).eval()
        self.current = Current()
        self._block_tokens = block_tokens
        self.device = next(module.parameters()).device
        for path, inner in list(matching(whole, layout.attention)):
            whole.set_submodule(path, CachedAttention(inner, self.current, blocks, block_tokens))
        for path, inner in list(matching(whole, layout.positions)):
            whole.set_submodule(path, Positions(inner, self.current))
        self._selects = _select_before_head(whole, layout, self.current)
        self._module = split(whole)
        self._attentions = [part for part in self._module.modules() if isinstance(part, CachedAttention)]

    @property
    def together(self) -> bool:
        """On a GPU, starting an operation for every sequence would take longer than its work; on a CPU a sequence reads
        its keys and values where they are."""
        return self.device.type != "cpu"

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values; 0 before the first batch."""
        return sum(part.keys.nbytes + part.values.nbytes for part in self._attentions)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [outputs, V] of a batch, whose keys and values are in the cache afterwards."""
        return self.select(self.compute(batch, self.tensor(batch.tokens)[None]))

    def compute(self, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        """What the module, or this process's part of it, makes of `x` [1, N, …], the tokens or another part's output."""
        self._enter(batch)
        output: torch.Tensor = self._module(x)
        return output

    def select(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [outputs, V] of the last part's output."""
        return logits[0] if self._selects else logits[0].index_select(0, self.current.outputs)

    @torch.inference_mode()
    def read(self, blocks: list[int]) -> list[torch.Tensor]:
        """A copy of what these blocks hold, in host memory: keys and values of every layer."""
        rows = torch.tensor(blocks, device=self.device)
        return [cache.index_select(0, rows).cpu() for cache in self._caches()]

    @torch.inference_mode()
    def write(self, blocks: list[int], contents: list[torch.Tensor]) -> None:
        """Puts what `read` returned into as many blocks."""
        rows = torch.tensor(blocks, device=self.device)
        for cache, content in zip(self._caches(), contents, strict=True):
            cache.index_copy_(0, rows, content.to(self.device))

    def tensor(self, array: Any) -> torch.Tensor:
        """An array on the device."""
        return torch.from_numpy(array).to(self.device)

    def _caches(self) -> list[torch.Tensor]:
        caches = [cache for part in self._attentions for cache in (part.keys, part.values)]
        return [cache.view(-1, self._block_tokens, *cache.shape[1:]) for cache in caches]

    def _enter(self, batch: Batch) -> None:
        current = self.current
        current.positions, current.slots = self.tensor(batch.positions), self.tensor(batch.slots)
        current.outputs = self.tensor(batch.outputs)
        current.groups = tuple(self._enter_group(batch, group) for group in batch.groups)

    def _enter_group(self, batch: Batch, group: Group) -> GroupTensors:
        tables, tokens = group.tables, group.tokens
        end = group.start + group.sequences * tokens
        queries = self.current.positions[group.start : end].view(group.sequences, tokens)
        mask = None
        sees_all = end == group.start + 1 and batch.positions[group.start] == group.context - 1
        if not sees_all:
            context = torch.arange(group.context, device=self.device)
            mask = torch.zeros(group.sequences, 1, tokens, group.context, device=self.device)
            mask.masked_fill_(context > queries[:, None, :, None], float("-inf"))
        first = blocks = None
        if group.sequences == 1 and (tables[0, 1:] - tables[0, :-1] == 1).all():
            first = int(tables[0, 0]) * self._block_tokens
        else:
            blocks = self.tensor(tables.reshape(-1))
        return GroupTensors(group.start, tokens, group.sequences, group.context, first, blocks, queries, mask)


def _select_before_head(module: nn.Module, layout: Layout, current: Current) -> bool:
    """Makes the head see only tokens whose logits are wanted; false where the layout does not name it."""
    name = layout.head or (layout.order[-1] if layout.order else "")
    if not name or not any(path == name for path, _ in module.named_modules()):
        return False

    def select(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0].index_select(1, current.outputs), *inputs[1:])

    module.get_submodule(name).register_forward_pre_hook(select)
    return True


def share_params(module: nn.Module) -> nn.Module:
    """A copy of the modules with the same params and buffers, of which there remains one copy in memory."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
