"""The tokens that one forward pass computes: of any sequences, at any positions, in one row.

Everything in a causal transformer except attention works on single tokens, so tokens of different sequences may stand next
to each other (Yu 2022, Orca, section 3.2: selective batching). A `Batch` is plain arrays, so that it can be sent to
other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.serving.generation.blocks import SCRATCH

Whole = npt.NDArray[np.int64]

LEAST_CONTEXT = 64
"""Tokens of cache that a query looks at, at least."""


@dataclass(frozen=True)
class Group:
    """Consecutive tokens of a batch that attend together: of several sequences, each with as many tokens.

    Attributes:
        start: place of the first token.
        tokens: of each sequence.
        tables: the blocks of each sequence [sequences, blocks], as many for all.
    """

    start: int
    tokens: int
    tables: Whole

    @property
    def sequences(self) -> int:
        return len(self.tables)


@dataclass(frozen=True)
class Batch:
    """N tokens.

    Attributes:
        tokens, positions: [N]; a token's position is its place in its sequence.
        slots: [N] where in the cache the keys and values of each token are written: block · block_tokens + place.
        groups: of which sequences the tokens are; further tokens are padding.
        outputs: places of the tokens of which logits are wanted.
    """

    tokens: Whole
    positions: Whole
    slots: Whole
    groups: tuple[Group, ...]
    outputs: Whole


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of one sequence to compute.

    Attributes:
        start: position of the first.
        blocks: of the sequence.
        wanted: whether logits of the last one are.
        pad_to: tokens to compute, with padding.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    wanted: bool
    pad_to: int

    @property
    def end(self) -> int:
        return self.start + self.pad_to


def assemble(
    parts: Sequence[Part], block_tokens: int, length: int, pad_to: int = 0
) -> tuple[Batch, list[int]]:
    """The batch of `parts`, padded to `pad_to` tokens, and the part of each of its outputs; with padding there are as many
    outputs as tokens, of which those of `parts` come first.

    Parts that look at as much cache, and compute as many tokens, are put next to each other. `length`: of the model's
    sequences; padding behind the end of a sequence gets its last position.
    """
    shape = [(part.pad_to, context_blocks(part.end, block_tokens)) for part in parts]
    order = sorted(range(len(parts)), key=shape.__getitem__)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outputs, sources, groups = [], [], []
    for place, index in enumerate(order):
        part, real = parts[index], len(parts[index].tokens)
        if not place or shape[index] != shape[order[place - 1]]:
            groups.append((len(tokens), shape[index], [index]))
        else:
            groups[-1][2].append(index)
        if part.wanted:
            outputs.append(len(tokens) + real - 1)
            sources.append(index)
        places = range(part.start, part.start + real)
        tokens.extend(part.tokens)
        positions.extend(places)
        slots.extend(part.blocks[at // block_tokens] * block_tokens + at % block_tokens for at in places)
        if padding := part.pad_to - real:
            tokens.extend([0] * padding)
            positions.extend(min(at, length - 1) for at in range(places.stop, part.end))
            slots.extend([SCRATCH * block_tokens] * padding)
    if padding := pad_to - len(tokens):
        for values in (tokens, positions):
            values.extend([0] * padding)
        slots.extend([SCRATCH * block_tokens] * padding)
    if pad_to:
        outputs.extend(sorted({*range(pad_to)}.difference(outputs)))
    batch = Batch(
        np.array(tokens, np.int64),
        np.array(positions, np.int64),
        np.array(slots, np.int64),
        tuple(
            Group(start, each, _tables([parts[index].blocks for index in members], blocks))
            for start, (each, blocks), members in groups
        ),
        np.array(outputs, np.int64),
    )
    return batch, sources


def context_blocks(tokens: int, block_tokens: int) -> int:
    """Blocks of cache that are read for `tokens` of a sequence: in steps of a quarter, so that few shapes occur.

    A function of the sequence alone: its answer must not depend on the length of others.
    """
    step = max(LEAST_CONTEXT, 1 << max(0, (tokens - 1).bit_length() - 3))
    rounded = -(-tokens // step) * step
    return -(-rounded // block_tokens)


def _tables(blocks: Sequence[Sequence[int]], width: int) -> Whole:
    tables = np.full((len(blocks), width), SCRATCH, np.int64)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own[:width]
    return tables
