"""The installed LiteRT or its predecessor: named without importing it, which would cost the daemon memory, or imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from edge_client.wire.inference import RuntimeKind
from edge_client.wire.manifest import ManifestError


class NoRuntime(ManifestError):
    """No runtime is installed on this machine."""


def installed_kind() -> RuntimeKind | None:
    """The runtime to use; None: none is installed.

    Machines without a wheel of ai-edge-litert, the constrained tier, run its predecessor, with numpy < 2.
    """
    if find_spec("ai_edge_litert") is not None:
        return "litert"
    return "tflite-runtime" if find_spec("tflite_runtime") is not None else None


def interpreter() -> Any:
    """The interpreter class of this machine's runtime. Raises NoRuntime if none is installed."""
    try:
        if installed_kind() == "litert":
            from ai_edge_litert.interpreter import Interpreter
        else:
            from tflite_runtime.interpreter import Interpreter
    except ModuleNotFoundError as missing:
        raise NoRuntime(
            f"no runtime for models is installed here ({missing}); install ai-edge-litert, for instance: "
            f"{sys.executable} -m pip install ai-edge-litert"
        ) from None
    return Interpreter


@contextmanager
def without_notices() -> Iterator[None]:
    """Drops what the runtime says on standard error about how it computes, which no option of it switches off.

    Its warnings and errors, and all that other threads write meanwhile, follow at the end of the block; if the block crashes
    this process they are lost.
    """
    try:
        kept = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    held = os.memfd_create("stderr")
    os.dup2(held, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        with os.fdopen(held, "rb") as file, os.fdopen(kept, "wb") as stderr:
            file.seek(0)
            stderr.writelines(line for line in file if not line.startswith(b"INFO: "))
