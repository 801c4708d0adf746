"""The installed LiteRT or its predecessor: named without importing it, which would cost the daemon memory, or imported."""

from __future__ import annotations

import sys
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
