"""Packs whole documents into windows of a fixed length.

Documents are taken in their order, and a window gets as many as fit (next-fit; Ding 2024, "Fewer truncations improve language
modeling", compares it with others). A document that is longer than a window is cut into windows, the last of which takes further
documents. A window is therefore a contiguous part of the tokens, and the index of all windows is two numbers for each, in a file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.files import make_durably

Index = npt.NDArray[np.int64]
_CHUNK = 1 << 16
"""Windows that are written together."""


def pack(ends: npt.NDArray[np.int64], length: int, path: Path) -> int:
    """Writes the index of the windows of documents that end at `ends`, ascending, and returns the number of windows.

    The file is an int64 array [windows + 1, 2] (`.npy`): where each window begins among the tokens, and how many labels count in the
    windows before it. Every token counts as a label but the first of a document. Memory does not depend on the number of documents.
    """
    total = int(ends[-1]) if len(ends) else 0
    raw = path.with_suffix(".partial")
    windows = 0
    with raw.open("wb") as file:
        rows: list[tuple[int, int]] = []
        start, counted, before = 0, 0, 0
        while start < total:
            rows.append((start, counted))
            after = int(np.searchsorted(ends, start + length, side="right"))
            # documents before + 1 to after end in this window; without one it is a part of a longer document
            end = int(ends[after - 1]) if after > before else start + length
            counted += end - start - (after - before)
            start, before = end, after
            if len(rows) == _CHUNK:
                file.write(np.array(rows, np.int64).tobytes())
                windows, rows = windows + len(rows), []
        file.write(np.array([*rows, (total, counted)], np.int64).tobytes())
        windows += len(rows)

    def write(target: Path) -> None:
        stored = np.lib.format.open_memmap(target, "w+", np.int64, (windows + 1, 2))
        source = np.memmap(raw, np.int64, "r", shape=(windows + 1, 2))
        for first in range(0, windows + 1, _CHUNK):
            stored[first : first + _CHUNK] = source[first : first + _CHUNK]
        stored.flush()

    make_durably(path, write)
    raw.unlink()
    return windows
