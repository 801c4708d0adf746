"""Payloads written by hand, to say what no honest encoder would."""

from __future__ import annotations

import json
from typing import Any


def raw(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file of this header (an object, or bytes as they are) and data; `length` may lie."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


def entry(start: int, stop: int, shape: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    """One tensor's entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def parsed(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Header object and data of a well-formed payload, to be changed and put together by `raw`."""
    length = int.from_bytes(payload[:8], "little")
    return json.loads(payload[8 : 8 + length]), payload[8 + length :]
