"""Hashes of a file's blocks, so that a device fetches only the blocks that it does not have.

The publisher puts `describe(content)` into the signed target's `custom`. A new version of a model that differs only in
its head has the same layout, so nearly all of its blocks occur in the previous version, at the same or another place.
Hashes are truncated to eight bytes: they tell what need not be fetched; the SHA-256 of the complete file verifies the
result.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO

MIN_BLOCK_BYTES = 1024
MAX_BLOCKS = 1024
HASH_BYTES = 8


@dataclass(frozen=True)
class Blocks:
    """`hashes[k]` is the hash of the block at `k * block_bytes`; the last block may be shorter."""

    block_bytes: int
    hashes: tuple[bytes, ...]


def describe(content: bytes) -> dict[str, Any]:
    """The blocks of a file as JSON: at most 11 KB for any size."""
    size = MIN_BLOCK_BYTES
    while size * MAX_BLOCKS < len(content):
        size *= 2
    concatenated = b"".join(hashes_of(BytesIO(content), size))
    return {"block_bytes": size, "blocks": base64.b64encode(concatenated).decode("ascii")}


def read(custom: object, length: int) -> Blocks | None:
    """The blocks of a file of `length` bytes; None if `custom` has none, or invalid ones."""
    if not isinstance(custom, Mapping):
        return None
    size, text = custom.get("block_bytes"), custom.get("blocks")
    if not isinstance(size, int) or isinstance(size, bool) or not isinstance(text, str) or size < 1:
        return None
    try:
        concatenated = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
    count = -(-length // size)
    if count > MAX_BLOCKS or len(concatenated) != count * HASH_BYTES:
        return None
    return Blocks(
        size, tuple(concatenated[k : k + HASH_BYTES] for k in range(0, len(concatenated), HASH_BYTES))
    )


def hashes_of(file: BinaryIO, block_bytes: int) -> list[bytes]:
    """The short hash of each block, read one by one: the file may be larger than the memory."""
    return [_hash(block) for block in iter(lambda: file.read(block_bytes), b"")]


def _hash(block: bytes) -> bytes:
    return hashlib.sha256(block).digest()[:HASH_BYTES]
