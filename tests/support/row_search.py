"""Rows of data in bytes that are published: as arrays of any dtype, as numbers in text, as text; in archives and base64 too."""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW = 6
"""Values in a row that must not be found one after the other."""

_DTYPES = ("<f4", "<f8", ">f4", "<f2", "u1", "i1", "<i2", "<i4", "<i8")
_FLOATS = ("<f4", ">f4", "<f8", ">f8")
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{64,}={0,2}")


def rows_in(folder: Path, rows: npt.NDArray[Any], texts: Sequence[str] = ()) -> list[str]:
    """What of `rows` [N, …] and of `texts` the files below the folder hold, a line each: where, and in which form."""
    binary, numbers = _binary(rows), _numbers(rows)
    words = Needles([text.encode() for text in texts])
    found = []
    for place, content in _contents(folder):
        found += [f"{place}: {dtype}" for dtype, wanted in binary.items() if wanted.any_in(content)]
        received = [float(number) for number in _NUMBER.findall(content)]
        if any(_rounded(received[at : at + WINDOW]) in numbers for at in range(len(received) - WINDOW + 1)):
            found.append(f"{place}: numbers in text")
        if words.any_in(content):
            found.append(f"{place}: text")
    return found


def values_in(folder: Path, texts: Sequence[str], numbers: Sequence[float]) -> list[str]:
    """Which files below the folder hold one of these single values, a line each: where, and in which form.

    `texts`: of five or more characters, sought in UTF-8, UTF-16 and Latin-1 and as JSON escapes. `numbers`: values rare enough
    that their four bytes occur nowhere by chance, sought as float32 and float64 in both byte orders and as decimal text.
    """
    text = Needles(list({form for each in texts for form in _text_forms(each)}))
    binary = Needles([np.array(each, name).tobytes() for name in _FLOATS for each in numbers])
    wanted = {np.float32(each) for each in numbers}
    found = []
    for place, content in _contents(folder):
        found += [
            f"{place}: {form}"
            for form, needles in (("text", text), ("bytes", binary))
            if needles.any_in(content)
        ]
        with np.errstate(over="ignore"):
            if any(np.float32(number) in wanted for number in _NUMBER.findall(content)):
                found.append(f"{place}: number in text")
    return found


def _text_forms(text: str) -> Iterator[bytes]:
    yield text.encode()
    yield text.encode("utf-16-le")
    yield text.encode("latin-1")
    yield json.dumps(text)[1:-1].encode()


class Needles:
    """Byte strings of two or more bytes, thousands of which are searched for at once."""

    def __init__(self, wanted: Sequence[bytes]) -> None:
        self._wanted, self._lengths = set(wanted), {len(each) for each in wanted}
        self._begins = np.zeros(2**16, bool)
        for each in wanted:
            self._begins[int.from_bytes(each[:2], "little")] = True

    def any_in(self, content: bytes) -> bool:
        """Whether one occurs: looks only where the first two bytes of one are."""
        ahead = np.frombuffer(content, np.uint8).astype(np.uint16)
        places = np.flatnonzero(self._begins[ahead[:-1] | ahead[1:] << 8]).tolist()
        return any(content[at : at + length] in self._wanted for at in places for length in self._lengths)


def _contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield from _opened(str(path.relative_to(folder)), path.read_bytes())


def _opened(place: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """The content, and what is packed in it."""
    yield place, content
    if content[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                yield from _opened(f"{place}!{name}", archive.read(name))
    if content[:2] == b"\x1f\x8b":
        yield from _opened(f"{place}!gzip", gzip.decompress(content))
    for number, packed in enumerate(_BASE64.findall(content)):
        try:
            yield f"{place}!base64-{number}", base64.b64decode(packed[: len(packed) // 4 * 4])
        except binascii.Error:
            continue


def _windows(rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """First, middle and last values of every row, where they differ enough to be told from chance."""
    flat = rows.reshape(len(rows), -1)
    assert flat.shape[1] >= WINDOW
    starts = sorted({0, (flat.shape[1] - WINDOW) // 2, flat.shape[1] - WINDOW})
    windows = [row[start : start + WINDOW] for row in flat for start in starts]
    found = [window for window in windows if len(np.unique(window)) >= WINDOW - 2]
    assert len(found) > len(rows) / 2, "rows too plain to be searched for"
    return found


def _binary(rows: npt.NDArray[Any]) -> dict[str, Needles]:
    windows, found = _windows(rows), {}
    for name in _DTYPES:
        dtype = np.dtype(name)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            fits = [
                w
                for w in windows
                if (w == np.round(w)).all() and limits.min <= w.min() and w.max() <= limits.max
            ]
        else:
            fits = windows
        found[name] = Needles([window.astype(dtype).tobytes() for window in fits])
    return found


def _numbers(rows: npt.NDArray[Any]) -> set[tuple[str, ...]]:
    return {_rounded(window.tolist()) for window in _windows(rows)}


def _rounded(values: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{value:.4g}" for value in values)
