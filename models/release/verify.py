"""Tests of a release on every supported runtime, each in its own process: which runtimes it may claim, and why not others.

| runtime        | where                                                                   |
|----------------|-------------------------------------------------------------------------|
| litert         | this environment                                                        |
| tflite-runtime | the interpreter that FEDLOOP_TFLITE_RUNTIME_PYTHON or an option names   |
| tflite-micro   | this environment                                                        |

A runtime that is not installed is not claimed, and the verdict says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.processes.process import ProcessFailed, run_once, tie_to_parent, worker_environment
from edge_client.wire.inference import RuntimeKind

PYTHON_VARIABLE = "FEDLOOP_TFLITE_RUNTIME_PYTHON"
"""Environment variable: the interpreter of an environment with tflite-runtime and this software."""

RUNTIMES: tuple[RuntimeKind, ...] = ("litert", "tflite-runtime", "tflite-micro")

_SECONDS = 300


@dataclass(frozen=True)
class Verdict:
    """The outcome of a release on one runtime.

    Attributes:
        refused: why the runtime may not be claimed; empty if it passed.
        accuracy: on the manifest's real rows.
        memory_bytes: used to open it and run one inference; arena_bytes of tflite-micro.
    """

    runtime: RuntimeKind
    refused: str = ""
    accuracy: float | None = None
    memory_bytes: int | None = None
    arena_bytes: int | None = None

    @property
    def passed(self) -> bool:
        return not self.refused


def verify(folder: Path, tflite_runtime: Path | None = None) -> tuple[Verdict, ...]:
    """The verdicts on the release in `folder`, in the order of `RUNTIMES`. Its manifest must claim all of them.

    Args:
        tflite_runtime: interpreter with tflite-runtime; None: the one that FEDLOOP_TFLITE_RUNTIME_PYTHON names.
    """
    return tuple(_verdict(kind, folder, tflite_runtime) for kind in RUNTIMES)


def _verdict(kind: RuntimeKind, folder: Path, tflite_runtime: Path | None) -> Verdict:
    if kind == "litert":
        return _run(kind, [sys.executable, "-P", "-m", "edge_client.infer", str(folder)])
    if kind == "tflite-micro":
        return _run(kind, [sys.executable, "-P", "-m", "models.compress.micro_interpreter", str(folder)])
    named = os.environ.get(PYTHON_VARIABLE)
    python = tflite_runtime or (Path(named) if named else None)
    if python is None:
        return Verdict(kind, f"not tried: {PYTHON_VARIABLE} names no interpreter that has it")
    if not python.is_file():
        return Verdict(kind, f"not tried: {python} does not exist")
    if not os.access(python, os.X_OK):
        return Verdict(kind, f"not tried: {python} is not executable")
    return _run(kind, [str(python), "-P", "-m", "edge_client.infer", str(folder)])


def _run(kind: RuntimeKind, command: Sequence[str]) -> Verdict:
    environment = worker_environment()
    environment.pop("PYTHONPATH", None)  # the other interpreter has modules of its own
    try:
        answer = run_once(tie_to_parent(command), _SECONDS, environment=environment)
    except ProcessFailed as failure:
        return Verdict(kind, str(failure))
    if answer["runtime"] != kind:
        return Verdict(kind, f"not tried: {command[0]} has {answer['runtime']}")
    return Verdict(**answer)
