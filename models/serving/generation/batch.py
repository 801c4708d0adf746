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
        context: tokens of the cache that each sequence looks at, at most; later ones than its own are masked.
        tables: the blocks of these tokens [sequences, blocks].
    """

    start: int
    tokens: int
    context: int
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
    parts: Sequence[Part], block_tokens: int, length: int, pad_to: int = 0, together: bool = False
) -> tuple[Batch, list[int]]:
    """The batch of `parts`, and the part of each of its outputs.

    Args:
        length: of the model's sequences; padding behind the end of a sequence gets its last position.
        pad_to: tokens of the batch, and of its outputs, of which those of `parts` come first.
        together: let sequences that look at about as many tokens attend in one operation, which a GPU needs to be
            busy, instead of each for itself.
    """
    contexts = [rounded_context(part.end) if together else part.end for part in parts]
    shapes = [(part.pad_to, context) for part, context in zip(parts, contexts, strict=True)]
    order = sorted(range(len(parts)), key=shapes.__getitem__) if together else list(range(len(parts)))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outputs: list[int] = []
    members: list[list[int]] = []
    starts: list[int] = []
    for place, index in enumerate(order):
        if not (together and place and shapes[index] == shapes[order[place - 1]]):
            members.append([])
            starts.append(len(tokens))
        members[-1].append(index)
        if parts[index].wanted:
            outputs.append(len(tokens) + len(parts[index].tokens) - 1)
        _lay_out(parts[index], block_tokens, length, tokens, positions, slots)
    if padding := pad_to - len(tokens):
        for values, value in ((tokens, 0), (positions, 0), (slots, SCRATCH * block_tokens)):
            values.extend([value] * padding)
    if pad_to:
        outputs.extend(sorted({*range(pad_to)}.difference(outputs)))
    groups = tuple(
        Group(
            start,
            *shapes[own[0]],
            _tables([parts[index].blocks for index in own], shapes[own[0]][1], block_tokens),
        )
        for start, own in zip(starts, members, strict=True)
    )
    arrays = [np.array(values, np.int64) for values in (tokens, positions, slots, outputs)]
    batch = Batch(arrays[0], arrays[1], arrays[2], groups, arrays[3])
    return batch, [index for index in order if parts[index].wanted]


def _lay_out(
    part: Part, block_tokens: int, length: int, tokens: list[int], positions: list[int], slots: list[int]
) -> None:
    """Adds the tokens of a part, and its padding."""
    places = range(part.start, part.start + len(part.tokens))
    tokens.extend(part.tokens)
    positions.extend(places)
    slots.extend(part.blocks[at // block_tokens] * block_tokens + at % block_tokens for at in places)
    if padding := part.pad_to - len(part.tokens):
        tokens.extend([0] * padding)
        positions.extend(min(at, length - 1) for at in range(places.stop, part.end))
        slots.extend([SCRATCH * block_tokens] * padding)


def rounded_context(tokens: int) -> int:
    """`tokens` of a sequence in steps of a quarter, so that few shapes occur. A function of the sequence alone: its answer
    must not depend on the length of others."""
    step = max(LEAST_CONTEXT, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


def _tables(blocks: Sequence[Sequence[int]], context: int, block_tokens: int) -> Whole:
    width = -(-context // block_tokens)
    tables = np.full((len(blocks), width), SCRATCH, np.int64)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own[:width]
    return tables
