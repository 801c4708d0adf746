"""IDX, the format of MNIST: big-endian sizes, then the numbers. http://yann.lecun.com/exdb/mnist/

Two zero bytes, a type code (0x08: unsigned byte), the number of axes, one 32-bit size an axis, the payload.
Nothing is guessed: a file that is not exactly this is refused, with what it should have been.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.data.quoting import first_bytes
from edge_client.files import READ_LIMIT_BYTES, read_regular
from models.datasets.dataset import DataError

UNSIGNED_BYTE = 0x08
_PIECE_BYTES = 1 << 20
GZIP = b"\x1f\x8b"


def read(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes with `axes` axes, gzipped or not.

    Raises:
        DataError: naming the file, what it holds and what was expected.
    """
    content = _content(path)
    expected = bytes([0, 0, UNSIGNED_BYTE, axes])
    if content[:4] != expected:
        raise DataError(
            f"{path}: {first_bytes(content)}, expected {expected.hex(' ')} "
            f"(IDX, unsigned bytes, {axes} axes); {AGAIN}"
        )
    header = 4 + 4 * axes
    if len(content) < header:
        raise DataError(f"{path}: ends after {len(content)} bytes, inside its header of {header}; {AGAIN}")
    shape = struct.unpack(f">{axes}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise DataError(
            f"{path}: {len(content) - header:,} bytes of data, expected {math.prod(shape):,} "
            f"({' x '.join(str(extent) for extent in shape)} by its header); {AGAIN}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


AGAIN = "download it again"


def _content(path: Path) -> bytes:
    try:
        content = read_regular(path)
        return _inflated(path, content) if content.startswith(GZIP) else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file, expected gzipped IDX ({error}); {AGAIN}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _inflated(path: Path, content: bytes) -> bytes:
    plain = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        while piece := file.read(_PIECE_BYTES):
            plain += piece
            if len(plain) > READ_LIMIT_BYTES:
                raise DataError(
                    f"{path}: inflates to more than {READ_LIMIT_BYTES:,} bytes, the most that is read"
                )
    return bytes(plain)
