"""Training on a file of consecutive tokens: windows of them, with the tokens to predict.

    next    every token is labelled with its successor (Radford 2018, equation 1)
    masked  15 of 100 tokens are masked, and only these are labelled (Devlin 2019, section 3.1)

The file is a one-dimensional `.npy` array, mapped into memory, so a process holds only the windows it reads and a text
may be larger than its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.job import JobError
from models.labels import PADDING
from models.pretrain.data.batches import BatchRandom, Indices, Rows, Transformed, scale_to_int

PAD = 0
"""The padding token of short texts. It is never masked and never a label of a masked token."""

MASKED_SHARE = 0.15
HIDDEN, REPLACED = 0.8, 0.1
"""Shares of the chosen tokens that become the mask, or another token; the rest stay unchanged."""

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows of `length` tokens, each labelled with the same window shifted by one.

    Attributes:
        tokens: [N], mapped or in memory; a remainder shorter than a window and a token is not read.
    """

    tokens: npt.NDArray[Any]
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def read(self, rows: Indices, random: BatchRandom | None = None) -> Rows:
        indices = rows[:, None] * self.length + np.arange(self.length + 1)
        windows = np.asarray(self.tokens[indices], np.int32)
        return windows[:, :-1], windows[:, 1:]

    def counted(self, rows: Indices) -> int:
        return len(rows) * self.length


@dataclass(frozen=True)
class Masked(Transformed):
    """The inputs of another source with some tokens masked; only these are labelled, with the original token.

    Attributes:
        ordinary: tokens are 0 to `ordinary` - 1.
        mask: one of them, or None: the next.
    """

    ordinary: int
    mask: int | None = None

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        x, _ = self.source.read(rows, random)
        real = x != PAD
        order = np.argsort(np.where(real, random.uniform(x.shape[1]), 2.0), axis=1)
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(x.shape[1])[None], axis=1)
        chosen = rank < _chosen(real)[:, None]
        what = random.uniform(x.shape[1])
        other = PAD + 1 + scale_to_int(random.uniform(x.shape[1]), self.ordinary - PAD - 1)
        mask = self.ordinary if self.mask is None else self.mask
        seen = np.where(what < HIDDEN, mask, np.where(what < HIDDEN + REPLACED, other, x))
        return np.where(chosen, seen, x).astype(np.int32), np.where(chosen, x, PADDING).astype(np.int32)

    def counted(self, rows: Indices) -> int:
        x, _ = self.source.read(rows, BatchRandom(np.random.default_rng(0), len(rows), np.arange(len(rows))))
        return int(_chosen(x != PAD).sum())


def _chosen(real: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Number of tokens of every row [B, T] to mask: the rounded share, at least one where there is any."""
    tokens = real.sum(axis=1)
    chosen: npt.NDArray[np.int64] = np.rint(tokens * MASKED_SHARE).astype(np.int64)
    fewest: npt.NDArray[np.int64] = np.minimum(tokens, np.maximum(1, chosen))
    return fewest


def load(path: Path, length: int, vocab: int) -> Windows:
    """The windows of a file of tokens below `vocab`. Reads the file once to check it, a few megabytes at a time.

    Raises:
        JobError: no such file, another kind of array, a token outside the vocabulary, or not one window of `length`.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise JobError(f"{path} does not exist; the job names it under `tokens`") from None
    except (ValueError, EOFError, OSError) as error:
        raise JobError(f"{path} is not a readable .npy file without pickled objects: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise JobError(f"{path} is {tokens.dtype} {tokens.shape}, expected whole numbers of shape (tokens,)")
    if len(tokens) <= length:
        raise JobError(
            f"{path} has {len(tokens):,} tokens, expected more than the {length:,} of one example: "
            "a longer text, or a model for shorter sequences"
        )
    for start in range(0, len(tokens), _CHUNK):
        part = tokens[start : start + _CHUNK]
        if part.min() < 0 or part.max() >= vocab:
            raise JobError(
                f"{path} has tokens from {part.min()} to {part.max()}, expected 0 to {vocab - 1}: the model's vocabulary"
            )
    return Windows(tokens, length)
