"""Random words for noise: from the operating system on a real fleet, from the seed in a simulation.

Who can predict the noise can subtract it, so a real fleet needs words that nobody can compute, not even from all words before. numpy's
generators are none of that, whatever seeds them: the state of PCG64 follows from a few of its outputs. And a `BitGenerator` of one's own
has to be compiled. So noise is drawn from a `Source`, which has one method, and the distributions of this folder are written on its
words. `SecureSource` is the keystream of AES-256 in counter mode under a key that the operating system drew.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


class Source(Protocol):
    """Where noise gets its randomness."""

    def words(self, count: int) -> Words:
        """The next `count` words, independent and uniform over all values of 64 bits."""
        ...


class SecureSource:
    """Words that nobody can predict: the keystream of AES-256-CTR under a key from the operating system.

    The key is never stored, so what was drawn can be drawn by nobody again. A forked process draws a key of its own.
    """

    def __init__(self) -> None:
        self._renew()

    def words(self, count: int) -> Words:
        if os.getpid() != self._process:
            self._renew()
        return _words(self._keystream, count)

    def _renew(self) -> None:
        self._process = os.getpid()
        cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16)))
        self._keystream: CipherContext = cipher.encryptor()


class KeyedSource:
    """Words that only who has the key can compute: the keystream of AES-256-CTR under a key derived from it and some numbers.

    For noise that later rounds take back (`noise.correlated`), which therefore has to be drawn again: the key must be kept, and kept secret.
    """

    def __init__(self, key: bytes, *numbers: int) -> None:
        message = b"".join(number.to_bytes(8, "big") for number in numbers)
        derived = hmac.new(key, message, hashlib.sha256).digest()
        self._keystream: CipherContext = Cipher(algorithms.AES(derived), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> Words:
        return _words(self._keystream, count)


class SeededSource:
    """Words of a seeded generator, for simulations: the same seed gives the same noise. It protects nobody."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def words(self, count: int) -> Words:
        return self._rng.integers(0, 2**64, count, dtype=np.uint64)


def _words(keystream: CipherContext, count: int) -> Words:
    return np.frombuffer(keystream.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)


def draw_uniforms(source: Source, count: int) -> Floats:
    """Multiples of 2^-53 in [0, 1)."""
    return (source.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_gaussians(source: Source, count: int) -> Floats:
    """Values of the standard normal distribution, up to 9.4 on either side (Box 1958).

    Floats betray by their last bits what was added to them (Mironov 2012). Before a release, add noise with
    `strategies.privacy.noise.discrete.add_gaussian`, which does not.
    """
    pairs = (count + 1) // 2
    radius = np.sqrt(-2 * np.log((source.words(pairs).astype(np.float64) + 0.5) * 2.0**-64))
    angle = 2 * np.pi * draw_uniforms(source, pairs)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
