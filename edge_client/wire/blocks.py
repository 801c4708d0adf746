"""What a file is made of, so that a device fetches only what it does not have: hashes of its blocks.

The publisher puts `described(content)` into the signed target's `custom`. A new version of a model that differs in its
head alone has the same layout, so nearly all of its blocks are those of the version before, at the same or at
another place. Hashes are cut to eight bytes: they say what need not be fetched, and whether the file came out right is
said by the SHA-256 of the whole, as ever.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEAST_BLOCK_BYTES = 1024
MOST_BLOCKS = 1024
HASH_BYTES = 8


@dataclass(frozen=True)
class Blocks:
    """`hashes[k]` is of bytes `k * block_bytes` and on; the last block may be shorter."""

    block_bytes: int
    hashes: tuple[bytes, ...]


def described(content: bytes) -> dict[str, Any]:
    """The blocks of a file as JSON: at most 11 KB, whatever its size."""
    size = LEAST_BLOCK_BYTES
    while size * MOST_BLOCKS < len(content):
        size *= 2
    joined = b"".join(hashes_of(content, size))
    return {"block_bytes": size, "blocks": base64.b64encode(joined).decode("ascii")}


def read(custom: object, length: int) -> Blocks | None:
    """The blocks of a file of `length` bytes; None where `custom` does not say, or says nothing sensible."""
    if not isinstance(custom, Mapping):
        return None
    size, text = custom.get("block_bytes"), custom.get("blocks")
    if not isinstance(size, int) or isinstance(size, bool) or not isinstance(text, str) or size < 1:
        return None
    try:
        joined = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
    count = -(-length // size)
    if count > MOST_BLOCKS or len(joined) != count * HASH_BYTES:
        return None
    return Blocks(size, tuple(joined[k : k + HASH_BYTES] for k in range(0, len(joined), HASH_BYTES)))


def hashes_of(content: bytes, block_bytes: int) -> list[bytes]:
    """The short hash of each block."""
    view = memoryview(content)
    return [hash_of(view[at : at + block_bytes]) for at in range(0, len(content), block_bytes)]


def hash_of(block: bytes | memoryview) -> bytes:
    """The short hash of one."""
    return hashlib.sha256(block).digest()[:HASH_BYTES]
