"""Numbers as bytes: whole numbers of few bits, increasing positions, and values that are rounded to few levels.

Bits are packed with the least significant first; what is left of the last byte is 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BUCKET = 512
"""Values that share a scale."""

MOST_BITS = 56
"""The most bits of a packed number: shifted by up to 7 it has to fit 64."""

_BITS_OF_WORD32 = 25
_PIECE = 2**16
"""Numbers packed at a time, a multiple of 8: few enough to stay in the processor's cache."""

Numbers = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float32]


class BadCode(ValueError):
    """The bytes are not what the code writes; the message says where."""


class Body:
    """Bytes that are read from front to back."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def take(self, dtype: str, count: int, what: str) -> npt.NDArray[np.generic]:
        """The next `count` numbers. `what`: for the message. Raises BadCode if there are fewer."""
        size = np.dtype(dtype).itemsize * count
        if size > len(self._content) - self._at:
            raise BadCode(
                f"the code ends within its {what}: {size} bytes expected, {len(self._content) - self._at} left"
            )
        taken = np.frombuffer(self._content, dtype, count, self._at)
        self._at += size
        return taken

    def take_scales(self, count: int) -> Vector:
        """The next `count` float32 numbers, each finite and 0 or more. Raises BadCode."""
        scales = self.take("<f4", count, "scales").astype(np.float32)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise BadCode("the code has a scale that is negative, NaN or infinite")
        return scales

    def end(self) -> None:
        """Raises BadCode if bytes are left."""
        if self._at != len(self._content):
            raise BadCode(f"{len(self._content) - self._at} bytes follow the end of the code")


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that so many numbers of `bits` bits take."""
    return -(-count * bits // 8)


def pack(numbers: npt.NDArray[np.integer] | npt.NDArray[np.bool_], bits: int) -> bytes:
    """Numbers from 0 to 2**bits - 1; `bits`: 0 to `MOST_BITS`."""
    if bits in (1, 2, 4, 8):
        each = 8 // bits
        padded = np.zeros(-(-len(numbers) // each) * each, np.uint8)
        padded[: len(numbers)] = numbers
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        packed: npt.NDArray[np.uint8] = np.bitwise_or.reduce(padded.reshape(-1, each) << shifts, axis=1)
        return packed.tobytes()
    pieces = [_pack_eights(numbers[start : start + _PIECE], bits) for start in range(0, len(numbers), _PIECE)]
    return b"".join(pieces)[: packed_bytes(len(numbers), bits)]


def unpack(body: Body, count: int, bits: int, what: str) -> npt.NDArray[np.integer]:
    """The next `count` numbers of `bits` bits, 0 to `MOST_BITS`. Raises BadCode."""
    content = body.take("u1", packed_bytes(count, bits), what).astype(np.uint8, copy=False)
    if (used := count * bits % 8) and content[-1] >> used:
        raise BadCode(f"the code has bits after the end of its {what}")
    if bits in (1, 2, 4, 8):
        spread = content[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)
        return (spread & np.uint8(2**bits - 1)).reshape(-1)[:count]
    numbers = np.zeros(count, np.int64)
    for start in range(0, count, _PIECE):
        piece = numbers[start : start + _PIECE]
        piece[:] = _unpack_eights(content[start // 8 * bits :], len(piece), bits)
    return numbers


def _pack_eights(numbers: npt.NDArray[np.integer] | npt.NDArray[np.bool_], bits: int) -> bytes:
    """Eight numbers take `bits` whole bytes, so number j of all eights has the same place in them."""
    eights = -(-len(numbers) // 8)
    word = _word(bits)
    padded = np.zeros(8 * eights, word)
    padded[: len(numbers)] = numbers
    packed: npt.NDArray[np.uint8] = np.zeros((bits, eights), np.uint8)
    for number, column in enumerate(padded.reshape(eights, 8).T):
        byte, shift = divmod(number * bits, 8)
        shifted = column << word.type(shift)
        for at in range(packed_bytes(1, shift + bits)):
            packed[byte + at] |= (shifted >> word.type(8 * at)).astype(np.uint8)
    return packed.T.tobytes()


def _word(bits: int) -> np.dtype[np.unsignedinteger]:
    """Holds a number of so many bits that is shifted by up to 7."""
    return np.dtype(np.uint32 if bits <= _BITS_OF_WORD32 else np.uint64)


def _unpack_eights(content: npt.NDArray[np.uint8], count: int, bits: int) -> npt.NDArray[np.integer]:
    eights = -(-count // 8)
    word = _word(bits)
    padded = np.zeros(eights * bits, np.uint8)
    taken = content[: packed_bytes(count, bits)]
    padded[: len(taken)] = taken
    rows = np.ascontiguousarray(padded.reshape(eights, bits).T)
    numbers = np.empty((eights, 8), word)
    for number in range(8):
        byte, shift = divmod(number * bits, 8)
        joined = np.zeros(eights, word)
        for at in range(packed_bytes(1, shift + bits)):
            joined |= rows[byte + at].astype(word) << word.type(8 * at)
        numbers[:, number] = (joined >> word.type(shift)) & word.type(2**bits - 1)
    return numbers.reshape(-1)[:count]


def rice_bits(total: int, chosen: int) -> int:
    """Bits of a gap's low part if `chosen` of `total` positions are taken. Rice 1979; close to the entropy of random gaps."""
    return max(0, (69 * total // (100 * chosen)).bit_length() - 1)


def most_position_bytes(total: int, chosen: int) -> int:
    """The most bytes that `pack_positions` takes."""
    bits = rice_bits(total, chosen)
    return 4 + packed_bytes(chosen + ((total - chosen) >> bits), 1) + packed_bytes(chosen, bits)


def pack_positions(positions: Numbers, total: int) -> bytes:
    """Increasing positions below `total`, at least one, as the gaps between them.

    A gap's high part is unary, as many zeros and a one; all of these come first, after their length in bytes. The low parts follow.
    """
    bits = rice_bits(total, len(positions))
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum((gaps >> bits) + 1) - 1
    unary = np.zeros(ends[-1] + 1, np.uint8)
    unary[ends] = 1
    high = np.packbits(unary, bitorder="little").tobytes()
    return len(high).to_bytes(4, "little") + high + pack(gaps & ((1 << bits) - 1), bits)


def unpack_positions(body: Body, chosen: int, total: int) -> Numbers:
    """The `chosen` positions, increasing and below `total`. Gaps cannot express a position twice. Raises BadCode."""
    bits = rice_bits(total, chosen)
    length = int(body.take("<u4", 1, "length of the positions")[0])
    most = packed_bytes(chosen + ((total - chosen) >> bits), 1)
    if length > most:
        raise BadCode(
            f"the positions take {length} bytes, {most} are the most for {chosen} of {total} values"
        )
    unary = np.unpackbits(body.take("u1", length, "positions").astype(np.uint8), bitorder="little")
    ends = np.flatnonzero(unary)
    if len(ends) != chosen or length != packed_bytes(int(ends[-1]) + 1, 1):
        raise BadCode(f"the code has {len(ends)} positions in {length} bytes, expected {chosen}")
    low = unpack(body, chosen, bits, "positions").astype(np.int64)
    gaps = ((np.diff(ends, prepend=-1) - 1).astype(np.int64) << bits) | low
    positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= total:
        raise BadCode(f"the code has a value at position {positions[-1]}, the model has {total}")
    return positions


def quantized_bytes(count: int, bits: int) -> int:
    """Bytes of `quantize`."""
    return 4 * -(-count // BUCKET) + packed_bytes(count, bits)


def quantize(values: Vector, bits: int, rng: np.random.Generator) -> bytes:
    """The scale of each bucket, its largest magnitude, as float32, then the levels, rounded up or down by chance."""
    levels = 2 ** (bits - 1) - 1
    buckets = _buckets(values)
    scales: Vector = np.abs(buckets).max(axis=1, initial=0)
    steps = np.where(scales > 0, scales, 1).astype(np.float64)[:, None] / levels
    shares = np.abs(buckets) / steps
    rounded = np.minimum(np.floor(shares + rng.random(buckets.shape)), levels)
    signed = np.where(buckets < 0, -rounded, rounded).reshape(-1)[: len(values)]
    return scales.astype("<f4").tobytes() + pack((signed + levels).astype(np.uint8), bits)


def dequantize(body: Body, count: int, bits: int) -> Vector:
    """The next `count` values. Raises BadCode."""
    levels = 2 ** (bits - 1) - 1
    scales = body.take_scales(-(-count // BUCKET))
    numbers = unpack(body, count, bits, "levels")
    if (numbers > 2 * levels).any():
        raise BadCode(f"the code has a level of {numbers.max()}, expected {2 * levels} at most")
    steps = scales / np.float32(levels)
    return (_buckets(numbers.astype(np.float32) - np.float32(levels)) * steps[:, None]).reshape(-1)[:count]


def _buckets(values: Vector) -> Vector:
    """The values as rows of a bucket each, the last filled up with zeros."""
    padded = np.zeros((-(-len(values) // BUCKET), BUCKET), np.float32)
    padded.reshape(-1)[: len(values)] = values
    return padded
