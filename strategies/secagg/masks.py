"""Masks: streams of AES-256 in counter mode, added to a vector of residues piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from strategies.secagg.ring import Residues, Ring

_PIECE = 2**15
"""Words masked at a time: few enough for the processor's cache."""

_FROM_ZERO = bytes(16)
"""A key masks one vector in its life, so its counter may always start at 0."""


def add_masks(vector: Residues, ring: Ring, plus: Iterable[bytes], minus: Iterable[bytes] = ()) -> None:
    """Adds the masks of some 32-byte keys to the vector and subtracts those of others, in place.

    Each mask is uniform: its words are bits of the key's stream, of which the ring uses the lower `bits`.
    The vector may be left with bits above those of the ring: see `Ring.reduce`.
    """
    streams = [
        *((_stream(key, ring, len(vector)), np.add) for key in plus),
        *((_stream(key, ring, len(vector)), np.subtract) for key in minus),
    ]
    for start in range(0, len(vector), _PIECE):
        piece = vector[start : start + _PIECE]
        for stream, operation in streams:
            operation(piece, next(stream), out=piece)


def _stream(key: bytes, ring: Ring, length: int) -> Iterator[Residues]:
    """The mask of a key, in pieces that are valid until the next one is drawn."""
    if len(key) != 32:
        raise ValueError(f"a mask's key has {len(key)} bytes, expected 32")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(_FROM_ZERO)).encryptor()
    size = ring.word.itemsize
    buffer = bytearray(size * min(_PIECE, length) + 15)  # what OpenSSL asks for
    for start in range(0, length, _PIECE):
        words = min(_PIECE, length - start)
        encryptor.update_into(bytes(size * words), buffer)
        yield np.frombuffer(buffer, ring.word, words)
