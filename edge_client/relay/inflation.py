"""Deflated uploads: inflated into a file, never beyond what was announced."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

_BLOCK_BYTES = 2**20


class BadEncoding(ValueError):
    """The bytes do not inflate to what was announced."""


def inflate(sent: Path, target: Path, decoded_bytes: int) -> str:
    """Writes what `sent` inflates to, and returns its SHA-256.

    Raises:
        BadEncoding: not a zlib stream, or one of another size than announced.
        OSError: the disk is full.
    """
    stream, hasher, size = zlib.decompressobj(), hashlib.sha256(), 0
    with sent.open("rb") as source, target.open("wb") as file:
        while (block := source.read(_BLOCK_BYTES)) and not stream.eof:
            while block:
                try:
                    plain = stream.decompress(block, _BLOCK_BYTES)
                except zlib.error as error:
                    raise BadEncoding(f"not a zlib stream: {error}") from None
                size += len(plain)
                if size > decoded_bytes:
                    raise BadEncoding(f"inflates to more than the announced {decoded_bytes} bytes")
                hasher.update(plain)
                file.write(plain)
                block = stream.unconsumed_tail
        if not stream.eof or stream.unused_data or block:
            raise BadEncoding("the zlib stream does not end where the upload does")
    if size != decoded_bytes:
        raise BadEncoding(f"inflates to {size} bytes, {decoded_bytes} were announced")
    return hasher.hexdigest()
