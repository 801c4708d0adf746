"""How long a trainer waits for its batches, read when they are asked for and read ahead, in turns.

    python -m tests.bench --only loader

Images are read from a file mapped into memory, flipped, moved and erased. Training is stood in for by matrix products,
which leave the interpreter to the reading thread, as a model's do. With one core for both, reading ahead cannot help.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.pretrain.data.batches import Arrays, Batches, Share
from models.pretrain.data.images import Augmentation, augment
from models.pretrain.data.prefetch import Loader

ROWS, SHAPE, BATCH, STEPS, REPEATS = 2048, (3, 64, 64), 128, 12, 5
HOW = Augmentation(flip=0.5, crop=4, erase=16)
DEPTHS = (0, 2)


def run() -> dict[str, Any]:
    """Prints and returns, of both ways, the share of a training that is waiting, and milliseconds of a step."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, np.random.default_rng(0).random((ROWS, *SHAPE), np.float32))
        x = np.load(path, mmap_mode="r")
        source = augment(Arrays(x, np.zeros(ROWS, np.int32)), HOW)
        matrix = torch.rand(1024, 1024)
        found: dict[int, list[tuple[float, float]]] = {depth: [] for depth in DEPTHS}
        for turn in range(REPEATS + 1):
            for depth in DEPTHS:
                loader = Loader(Batches(source, BATCH, turn, Share()), depth)
                began = time.perf_counter()
                for step in range(STEPS):
                    loader[step]
                    for _ in range(2):
                        matrix @ matrix
                seconds = time.perf_counter() - began
                loader.close()
                if turn:
                    found[depth].append((loader.waited_seconds / seconds, 1e3 * seconds / STEPS))
    results: dict[str, Any] = {"cores": os.cpu_count()}
    for depth, pairs in found.items():
        stall, milliseconds = (statistics.median(values) for values in zip(*pairs, strict=True))
        name = f"{depth} batches ahead" if depth else "when asked for"
        sys.stdout.write(f"{name:16} waiting {stall:6.1%} of the time, a step {milliseconds:.1f} ms\n")
        results[name] = {"stall_share": stall, "step_ms": milliseconds}
    return results
