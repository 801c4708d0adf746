"""The memory that a file needs at run time: its arena in tflite-micro, or the memory that LiteRT uses."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from edge_client.processes.process import ProcessFailed, run_once, tie_to_parent
from models.compress import micro
from models.compress.step import StepRefused

_SECONDS = 60


def measure(tflite: bytes, x: npt.NDArray[Any]) -> tuple[int, Literal["tflite-micro", "litert"]]:
    """The bytes of memory that `tflite` needs for a row of `x`, and the smallest runtime that runs it, where they were measured.

    Raises:
        StepRefused: no runtime runs the file.
    """
    try:
        return micro.run(tflite, x[:1])[0], "tflite-micro"
    except StepRefused:
        return _in_litert(tflite), "litert"


def _in_litert(tflite: bytes) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.tflite"
        path.write_bytes(tflite)
        command = [sys.executable, "-P", "-m", "models.compress.litert_process", str(path)]
        try:
            return int(run_once(tie_to_parent(command), _SECONDS)["memory_bytes"])
        except ProcessFailed as failure:
            raise StepRefused(f"LiteRT does not run the file: {failure}") from None
