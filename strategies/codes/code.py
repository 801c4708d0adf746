"""A code writes an update as few bytes, and reads them back as an update close to it.

    content = encode(code, delta, rng)             on the client
    delta = decode(code, content, shapes)          on the client, which keeps the error, and on the coordinator

The bytes are little-endian: a header of four bytes, then the code's own body.

    version, number of the code, its parameter, flags

Neither names nor shapes travel, because both sides know the model. A reader is told the code and its options too, so what it
allocates follows from the model, never from the bytes: whatever a client sends, decoding takes a few models of memory.
An update with NaN or infinity is sent as the header alone, with a flag.
"""

from __future__ import annotations

import struct
from typing import Protocol

import numpy as np

from strategies.codes.packing import BadCode, Body
from strategies.codes.vectors import Shapes
from strategies.params import NotFinite, Params, Tensors, require_finite

VERSION = 1
NOT_FINITE = 1
"""Flag: the update holds NaN or infinity, and nothing follows."""

_HEADER = struct.Struct("<BBBB")


class Code(Protocol):
    """One way of writing an update. Tensors are float32 and finite; their order is that of their names.

    Attributes:
        name: as in the experiment file.
        number: in the header.
        parameter: in the header, 0 to 255: a reader with other options refuses the bytes.
        error_feedback: whether the client adds what a round did not send to its next update.
    """

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def parameter(self) -> int: ...

    @property
    def error_feedback(self) -> bool: ...

    def write(self, delta: Tensors, rng: np.random.Generator) -> bytes:
        """The body."""

    def read(self, body: Body, shapes: Shapes) -> Params:
        """The tensors of a body; values may overflow to infinity.

        Raises:
            BadCode: the bytes are not what `write` returns.
        """

    def most_bytes(self, shapes: Shapes) -> int:
        """The longest body for these shapes."""


def encode(code: Code, delta: Tensors, rng: np.random.Generator) -> bytes:
    """The update as bytes. `delta`: float32 tensors by name."""
    try:
        require_finite(delta, delta)
    except NotFinite:
        return _head(code, NOT_FINITE)
    with np.errstate(all="ignore"):  # of numbers near the largest; `decode` refuses what overflows
        return _head(code, 0) + code.write({name: delta[name] for name in sorted(delta)}, rng)


def decode(code: Code, content: bytes, shapes: Shapes) -> Params:
    """The tensors that the bytes stand for, float32, all finite.

    Raises:
        BadCode: the bytes are not what `encode` writes with this code, its options and these shapes.
        NotFinite: the update was not finite, or what the bytes stand for overflows.
    """
    if len(content) < _HEADER.size:
        raise BadCode(f"{len(content)} bytes are too short for the header of a code")
    version, number, parameter, flags = _HEADER.unpack_from(content)
    if version != VERSION:
        raise BadCode(f"the code has version {version}, expected {VERSION}")
    if (number, parameter) != (code.number, code.parameter):
        raise BadCode(
            f"the code is number {number} with parameter {parameter}, expected {code.number} with {code.parameter}, {code.name}"
        )
    if flags not in (0, NOT_FINITE):
        raise BadCode(f"the code has the unknown flags {flags}")
    body = Body(content[_HEADER.size :])
    if flags == NOT_FINITE:
        body.end()
        raise NotFinite("the update")
    with np.errstate(all="ignore"):
        delta = code.read(body, {name: shapes[name] for name in sorted(shapes)})
    body.end()
    require_finite(delta, delta)
    return delta


def most_bytes(code: Code, shapes: Shapes) -> int:
    """The most bytes that `encode` returns for tensors of these shapes."""
    return _HEADER.size + code.most_bytes(shapes)


def _head(code: Code, flags: int) -> bytes:
    return _HEADER.pack(VERSION, code.number, code.parameter, flags)
