"""Finds the installed runtime for released models without importing it, which would cost the daemon memory."""

from __future__ import annotations

from importlib.util import find_spec

from edge_client.wire.inference import RuntimeKind


def installed_kind() -> RuntimeKind | None:
    """The runtime that `edge_client.infer` uses; None: none is installed.

    The constrained tier uses LiteRT's predecessor, as in `edge_client.train.litert_trainer`.
    """
    if find_spec("ai_edge_litert") is not None:
        return "litert"
    return "tflite-runtime" if find_spec("tflite_runtime") is not None else None
