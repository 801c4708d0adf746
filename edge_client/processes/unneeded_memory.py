"""Memory that a process has and no longer needs: freed memory, and pages of libraries that only their import has read.

Importing PyTorch reads 70 MB of its libraries, mostly while they are linked; predictions of a small model need a fifth of that again.
Standard library only, as in `edge_client.processes.process`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MAPPINGS, THREADS = Path("/proc/self/smaps"), Path("/proc/self/task")


def release_library_pages() -> int:
    """Has the kernel take back pages of files that this process has mapped and cannot have written to; returns how many bytes.

    Each comes back from the system's cache of the file when it is read. A mapping with a single page of its own, such as one with
    relocated addresses, is left as it is. Does nothing in a process with several threads, because another one could map memory where a
    file was; nor where the system is not Linux.
    """
    released = 0
    with suppress(OSError, AttributeError):  # no such folder, function or constant
        if len(list(THREADS.iterdir())) > 1:
            return 0
        advise, advice = ctypes.CDLL(None).madvise, mmap.MADV_DONTNEED
        advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for start, length, resident in list(unwritten(MAPPINGS)):
            if advise(start, length, advice) == 0:
                released += resident
    return released


def trim_heap() -> None:
    """Returns freed memory to the system; the C library would keep it."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def unwritten(mappings: Path) -> Iterator[tuple[int, int, int]]:
    """Address, length and resident bytes of each mapping of a file that is not writable and has no page of the process's own.

    `mappings`: as /proc/PID/smaps, whose lines proc(5) describes.
    """
    start = end = 0
    is_file = False
    kilobytes: dict[bytes, int] = {}
    with mappings.open("rb") as lines:
        for line in lines:
            key, *fields = line.split(maxsplit=5)
            if not key.endswith(b":"):  # the first line of the next mapping
                start, end = (int(address, 16) for address in key.split(b"-"))
                name = fields[4] if len(fields) == 5 else b""
                is_file = b"w" not in fields[0] and name.startswith(b"/") and not name.startswith(b"/dev/")
            elif is_file and key in (b"Rss:", b"Anonymous:", b"Swap:"):
                kilobytes[key] = int(fields[0])
                # The last of the three. Pages of its own that are swapped out count as no anonymous ones.
                if key == b"Swap:" and kilobytes[b"Rss:"] and not kilobytes[b"Anonymous:"] + kilobytes[key]:
                    yield start, end - start, 1024 * kilobytes[b"Rss:"]
