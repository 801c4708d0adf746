"""The memory that a file needs where it runs: its arena in tflite-micro, else what LiteRT takes for it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from models.compress import micro
from models.compress.step import StepRefused
from models.export import apart

_SECONDS = 60


@dataclass(frozen=True)
class Needed:
    """`runtime`: where so many bytes are needed, the smallest that runs the file."""

    memory_bytes: int
    runtime: Literal["tflite-micro", "litert"]


def needed(tflite: bytes, x: npt.NDArray[Any]) -> Needed:
    """Measured with a row of `x`.

    Raises:
        StepRefused: LiteRT does not run it either.
    """
    try:
        return Needed(micro.run(tflite, x[:1]).arena_bytes, "tflite-micro")
    except StepRefused:
        return Needed(_in_litert(tflite), "litert")


def _in_litert(tflite: bytes) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.tflite"
        path.write_bytes(tflite)
        command = [sys.executable, "-P", "-m", "models.compress.litert_process", str(path)]
        try:
            done = apart.run(command, _SECONDS)
        except subprocess.TimeoutExpired:
            raise StepRefused(f"LiteRT was not done with a row after {_SECONDS} s") from None
    if done.returncode:
        raise StepRefused(f"LiteRT does not run the file: {apart.last_words(done)}")
    return int(json.loads(done.stdout.splitlines()[-1])["memory_bytes"])
