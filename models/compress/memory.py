"""The memory that a file needs at run time: its arena in tflite-micro, or the memory that LiteRT uses."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from models import isolated_process
from models.compress import micro
from models.compress.step import StepRefused

_SECONDS = 60


@dataclass(frozen=True)
class MemoryUse:
    """`runtime`: the smallest runtime that runs the file, where it was measured."""

    memory_bytes: int
    runtime: Literal["tflite-micro", "litert"]


def measure(tflite: bytes, x: npt.NDArray[Any]) -> MemoryUse:
    """The memory that `tflite` needs for a row of `x`.

    Raises:
        StepRefused: no runtime runs the file.
    """
    try:
        return MemoryUse(micro.run(tflite, x[:1]).arena_bytes, "tflite-micro")
    except StepRefused:
        return MemoryUse(_in_litert(tflite), "litert")


def _in_litert(tflite: bytes) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.tflite"
        path.write_bytes(tflite)
        command = [sys.executable, "-P", "-m", "models.compress.litert_process", str(path)]
        try:
            done = isolated_process.run(command, _SECONDS)
        except subprocess.TimeoutExpired:
            raise StepRefused(f"LiteRT did not finish a row within {_SECONDS} s") from None
    if done.returncode:
        raise StepRefused(f"LiteRT does not run the file: {isolated_process.failure_reason(done)}")
    return int(json.loads(done.stdout.splitlines()[-1])["memory_bytes"])
