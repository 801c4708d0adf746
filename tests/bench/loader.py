"""How long a trainer waits for its batches, read when they are asked for and read ahead, in turns; and how fast token files are made and read.

    python -m tests.bench --only loader

Images are read from a file mapped into memory, flipped, moved and erased. Training is stood in for by matrix products,
which leave the interpreter to the reading thread, as a model's do. With one core for both, reading ahead cannot help.

Token files are of documents of random words, in bytes and in byte pairs: tokens a second of tokenising, of checking the files, and of reading
shuffled batches, and the memory that a process has of its own (resident, without pages of files), which must not depend on the text.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.datasets.token_files import tokenizers, writing
from models.datasets.token_files.directory import open_directory
from models.datasets.token_files.documents import Documents
from models.pretrain.data.batches import Arrays, Batches, Share
from models.pretrain.data.images import Augmentation, augment
from models.pretrain.data.prefetch import Loader
from models.pretrain.data.tokens import Windows

ROWS, SHAPE, BATCH, STEPS, REPEATS = 2048, (3, 64, 64), 128, 12, 5
HOW = Augmentation(flip=0.5, crop=4, erase=16)
DEPTHS = (0, 2)
MEGABYTES, LENGTH = (4, 32), 512
"""Of two texts, and tokens in a window."""


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
    return {**results, "token files": token_files()}


def token_files() -> dict[str, Any]:
    """Prints and returns the figures of token files, each text in a process of its own."""
    results: dict[str, Any] = {}
    for encoding in ("bytes", "bpe(4096)"):
        for megabytes in MEGABYTES:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found = pool.submit(_token_files, encoding, megabytes).result()
            name = f"{encoding}, {megabytes} MB"
            results[name] = found
            speeds = ", ".join(
                f"{what} {found[f'{what}_tokens_per_second'] / 1e6:.2f}"
                for what in ("tokenise", "check", "read")
            )
            sys.stdout.write(
                f"{name:16} million tokens/s: {speeds}; own memory grew by {found['mebibytes']:.0f} MiB\n"
            )
    return results


def _token_files(encoding: str, megabytes: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    words = np.array(["".join(map(chr, rng.integers(97, 123, rng.integers(1, 9)))) for _ in range(20_000)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "in.txt").open("w") as file:
            while file.tell() < megabytes * 1_000_000:
                file.write(" ".join(rng.choice(words, rng.integers(10, 600))) + "\n")
        inputs = Documents([folder / "in.txt"], "line")

        def pieces() -> Iterator[str]:
            return (piece.text for piece in inputs.pieces())

        kind, _, size = encoding.rstrip(")").partition("(")
        tokenizer = tokenizers.learn(kind, int(size or 0), pieces, pieces)
        before = _own_mebibytes()
        began = time.perf_counter()
        (folder / "tokens").mkdir()
        header = writing.write(folder / "tokens", tokenizer, writing.assigned(inputs, 0.05))
        tokenised = time.perf_counter()
        found = open_directory(folder / "tokens")
        found.verify()
        checked = time.perf_counter()
        batches = Batches(Windows(found.tokens("train"), LENGTH), 32, 7, Share())
        steps = min(200, batches.steps_per_epoch)
        for step in range(steps):
            batches[step]
        read = time.perf_counter()
        tokens = header.train.tokens + header.test.tokens
        return {
            "tokenise_tokens_per_second": tokens / (tokenised - began),
            "check_tokens_per_second": tokens / (checked - tokenised),
            "read_tokens_per_second": steps * 32 * LENGTH / (read - checked),
            "mebibytes": _own_mebibytes() - before,
        }


def _own_mebibytes() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024
