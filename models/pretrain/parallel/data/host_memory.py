"""How glibc's allocator returns memory of tensors on a CPU.

By itself glibc soon takes blocks of up to 32 MiB from a heap, which it cannot return to the system while anything behind
them is in use. With params that are gathered and freed, holes add up to more than sharding saves. Blocks
that are mapped one by one are returned at once; mapping them costs time, as the system clears every page.
"""

from __future__ import annotations

import ctypes

RETURNED_BYTES = 2**20
"""Size from which blocks are returned at once."""
_KEPT_BYTES = 32 * 2**20
"""The most that glibc takes from a heap by itself."""
_M_MMAP_THRESHOLD = -3

_lowered = False


def return_blocks(returned: bool) -> None:
    """Whether blocks of `RETURNED_BYTES` and more are returned to the system once they are free, in this process. Does
    nothing where the C library is another."""
    global _lowered
    if returned == _lowered:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES if returned else _KEPT_BYTES):
        _lowered = returned
