"""The documents in files of text, read in pieces: memory does not depend on the size of the files, only on the longest line.

    file    each file is a document
    line    each line is a document
    jsonl   each line is a JSON object with the document under a key

Files that end in `.gz` are read as what they hold. Documents without text are left out.
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

from models.datasets import corpus
from models.datasets.dataset import DataError

Layout = Literal["file", "line", "jsonl"]
JSON_LINES = (".jsonl", ".ndjson")
SUFFIXES = (".txt", *JSON_LINES)
"""Of the files that are read in a folder; each may be followed by `.gz`."""

_READ_BYTES = 1 << 20
LINE_LIMIT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Piece:
    """A part of a document, of at most about a million characters; `first` and `last` say whether it begins or ends it."""

    text: str
    first: bool
    last: bool


@dataclass(frozen=True)
class Documents:
    """Documents in files.

    Attributes:
        layout: None: jsonl of files that are named so, otherwise file.
        key: of the text in a JSON object.
    """

    files: Sequence[Path]
    layout: Layout | None = None
    key: str = "text"

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self.files)

    def pieces(self, on_bytes: Callable[[int], None] = lambda count: None) -> Iterator[Piece]:
        """All documents in order, piece by piece. `on_bytes`: receives the number of bytes of files that were read.

        Raises:
            DataError: a file cannot be read, is no UTF-8 text, or has a line without a document.
        """
        read = 0
        for path in self.files:
            layout = self.layout or ("jsonl" if _suffix(path) in JSON_LINES else "file")
            try:
                with _open(path) as file:
                    found = _of_file(file, path) if layout == "file" else self._of_lines(file, path, layout)
                    for piece in found:
                        on_bytes(read + (file.tell() if path.suffix != ".gz" else 0))
                        yield piece
            except (OSError, EOFError) as error:
                raise DataError(
                    f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
                ) from None
            read += path.stat().st_size
            on_bytes(read)

    def _of_lines(self, file: IO[bytes], path: Path, layout: Layout) -> Iterator[Piece]:
        number = 0
        while line := file.readline(LINE_LIMIT_BYTES):
            number += 1
            if len(line) == LINE_LIMIT_BYTES:
                raise DataError(f"{path}, line {number}: is longer than {LINE_LIMIT_BYTES >> 20} MiB")
            try:
                text = line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not UTF-8 text at byte {error.start:,}") from None
            if text and layout == "jsonl":
                text = self._text_of(text, f"{path}, line {number}")
            yield from _of_text(text)

    def _text_of(self, line: str, place: str) -> str:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{place}: is not JSON; of plain text use --documents file or line") from None
        text = document.get(self.key) if isinstance(document, dict) else None
        if not isinstance(text, str):
            keys = f" with {', '.join(map(repr, list(document)[:8]))}" if isinstance(document, dict) else ""
            raise DataError(
                f"{place}: has no text under {self.key!r}: it is {type(document).__name__}{keys}; name the key with --text-key"
            )
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError(f"{place}: has half a surrogate pair, which is no text")
        return text


def find(inputs: Sequence[Path]) -> list[Path]:
    """The files that are named, and those of named folders that end in one of `SUFFIXES`, sorted.

    Raises:
        DataError: there is none.
    """
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.is_file() and _suffix(each) in SUFFIXES)
            if not inside:
                raise DataError(f"{path}: has no file that ends in {', '.join(SUFFIXES)}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{path}: there is no such file or folder")
    return found


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _open(path: Path) -> IO[bytes]:
    # cast: a GzipFile is an IO[bytes] for all that is done here
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _of_text(text: str) -> Iterator[Piece]:
    parts = corpus.pieces(text)
    for index, part in enumerate(parts):
        yield Piece(part, index == 0, index == len(parts) - 1)


def _of_file(file: IO[bytes], path: Path) -> Iterator[Piece]:
    """The file as one document, cut at ends of lines."""
    decoder, waiting, begun, read = codecs.getincrementaldecoder("utf-8")(), "", False, 0
    while True:
        chunk = file.read(_READ_BYTES)
        try:
            waiting += decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            at = read - len(decoder.getstate()[0]) + error.start
            raise DataError(f"{path}: not UTF-8 text at byte {at:,}") from None
        read += len(chunk)
        if not chunk:
            break
        if len(waiting) > _READ_BYTES:
            # one character stays, so that the last piece is never empty
            cut = waiting.rfind("\n", 0, len(waiting) - 1) + 1 or len(waiting) - 1
            yield Piece(waiting[:cut], not begun, False)
            waiting, begun = waiting[cut:], True
    if waiting:
        yield Piece(waiting, not begun, True)
