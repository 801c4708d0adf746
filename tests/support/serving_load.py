"""The load of `fedloop serving bench`, for tests and benchmarks."""

from coordinator.serving.measuring.load import (
    Load,
    Sent,
    binary_request,
    closed_loop,
    http_request,
    json_request,
    open_loop,
    read_answer,
)

__all__ = [
    "Load",
    "Sent",
    "binary_request",
    "closed_loop",
    "http_request",
    "json_request",
    "open_loop",
    "read_answer",
]
