"""Random rotations: they spread an update so evenly that few bits a value describe it. Vargaftik 2021, section 5.

A block of d = 2^n values is multiplied by random signs, then by the orthonormal Hadamard matrix. The signs follow from a seed that
travels with the code. An update is cut into blocks of 8192 values, and the rest into ever smaller ones; only the last one, of 64, is
filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

LARGEST = 8192
SMALLEST = 64


def block_sizes(count: int) -> Iterator[tuple[int, int]]:
    """Number and size of equal blocks, the largest first, that hold `count` values together."""
    if count >= LARGEST:
        yield count // LARGEST, LARGEST
    left = count % LARGEST
    size = LARGEST // 2
    while size >= SMALLEST:
        if left >= size:
            yield 1, size
            left -= size
        size //= 2
    if left:
        yield 1, SMALLEST


def num_blocks(count: int) -> int:
    """Blocks of `count` values."""
    return sum(number for number, _ in block_sizes(count))


def padded_size(count: int) -> int:
    """Values of all blocks."""
    return sum(number * size for number, size in block_sizes(count))


def rotate(values: Vector, seed: int) -> list[Vector]:
    """The rotated blocks [blocks, size], one array for each size."""
    signs = _signs(padded_size(len(values)), seed)
    padded = np.zeros(len(signs), np.float32)
    padded[: len(values)] = values
    return [_hadamard(each) for each in cut(padded * signs, len(values))]


def rotate_back(blocks: list[Vector], count: int, seed: int) -> Vector:
    """The inverse of `rotate`."""
    flat = (
        np.concatenate([_hadamard(each).reshape(-1) for each in blocks])
        if blocks
        else np.zeros(0, np.float32)
    )
    return (flat * _signs(len(flat), seed))[:count]


def cut(padded: npt.NDArray[np.float32], count: int) -> list[Vector]:
    """The values of all blocks as [blocks, size], one array for each size."""
    parts, start = [], 0
    for number, size in block_sizes(count):
        parts.append(padded[start : start + number * size].reshape(number, size))
        start += number * size
    return parts


def unbiased_scales(rotated: list[Vector], levels: list[Vector]) -> Vector:
    """For each block y and its levels l the factor ‖y‖² / ⟨y, l⟩, float32; 0 for a block of zeros."""
    scales = [np.zeros(0)]
    for block, level in zip(rotated, levels, strict=True):
        squared = np.square(block, dtype=np.float64).sum(axis=1)
        product = np.multiply(block, level, dtype=np.float64).sum(axis=1)
        scales.append(np.divide(squared, product, out=np.zeros(len(block)), where=product > 0))
    return np.concatenate(scales).astype("<f4")


def scale_blocks(blocks: list[Vector], scales: Vector) -> list[Vector]:
    """Each block times its scale."""
    ends = np.cumsum([len(each) for each in blocks])[:-1]
    parts = np.split(scales, ends) if blocks else []
    return [each * part[:, None] for each, part in zip(blocks, parts, strict=True)]


def _signs(count: int, seed: int) -> Vector:
    """Random signs. Raw bits of PCG64, which are the same in every version of numpy."""
    raw = np.random.PCG64(seed).random_raw(-(-count // 64)).astype("<u8")
    bits = np.unpackbits(raw.view(np.uint8), count=count, bitorder="little")
    return np.float32(1) - 2 * bits.astype(np.float32)


def _hadamard(blocks: Vector) -> Vector:
    """Each row times the orthonormal Hadamard matrix, by the fast transform."""
    number, size = blocks.shape
    half = 1
    while half < size:
        pairs = blocks.reshape(number, size // (2 * half), 2, half)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        blocks = np.stack([left + right, left - right], axis=2).reshape(number, size)
        half *= 2
    return blocks * np.float32(1 / np.sqrt(size))
