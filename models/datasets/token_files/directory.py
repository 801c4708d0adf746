"""A directory of token files: its header, its checks, and its arrays mapped into memory.

    header.json       format version, vocabulary, counts, and size and SHA-256 of each other file; written last
    train.tokens      token ids of all documents, one after another, uint16 or uint32, little-endian; each document ends with the
                      end-of-document id
    train.documents   for each document the position after its last token, int64, little-endian, ascending
    test.tokens, test.documents
    text.json         how a text becomes these ids (`edge_client.wire.preprocessing.TextSchema`), or null
    tokenizer.json    the tokenizer in the format of Hugging Face's library, of encodings that have one

The header's own SHA-256 stands for all of the data, because it covers the hashes of the files. Opening a directory compares sizes only.
`verify` reads the files, and notes their size, modification time and inode in `.verified.json`: while these stay the same the files
are not read again, and a copy of the directory is read once more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edge_client.files import read_regular, write_durably
from models import options
from models.datasets.dataset import DataError

FORMAT, VERSION = "fedloop-tokens", 1
HEADER, TEXT, TOKENIZER, VERIFIED = "header.json", "text.json", "tokenizer.json", ".verified.json"
Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

DOCUMENTS_DTYPE = np.dtype("<i8")
_DTYPES: Mapping[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_CHUNK = 1 << 20
"""Tokens, or documents, that are checked at a time."""


@dataclass(frozen=True)
class Count:
    """Tokens and documents of a split, and the characters they encode."""

    tokens: int
    documents: int
    characters: int


@dataclass(frozen=True)
class Stored:
    """A file's size and SHA-256."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Header:
    """What `header.json` says.

    Attributes:
        dtype: of a token.
        vocabulary: ids are 0 to `vocabulary` - 1.
        end_of_document: the id that ends each document.
        encoding: `bytes`, `characters`, `bpe(n)` or `tokenizer.json`.
        alphabet: of characters, in the order of their ids.
        minimum_count: occurrences from which `text.json` names a token that was learnt from the text; 0: none was.
        files: by name.
    """

    dtype: Literal["uint16", "uint32"]
    vocabulary: int
    end_of_document: int
    encoding: str
    minimum_count: int
    train: Count
    test: Count
    files: Mapping[str, Stored]
    alphabet: str = ""

    def count(self, split: Split) -> Count:
        return self.train if split == "train" else self.test

    @property
    def sha256(self) -> str:
        """SHA-256 of the header's canonical JSON, and so of all the data."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        about = {"format": FORMAT, "version": VERSION, **asdict(self), "sha256": self.sha256}
        return json.dumps(about, indent=2) + "\n"


def dtype_of(vocabulary: int) -> Literal["uint16", "uint32"]:
    """The smaller type that holds the ids."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class TokenDirectory:
    """An open directory; nothing of it is in memory but the header."""

    path: Path
    header: Header

    def tokens(self, split: Split) -> npt.NDArray[Any]:
        """Token ids of all documents [N], mapped read-only."""
        return self._mapped(f"{split}.tokens", _DTYPES[self.header.dtype])

    def documents(self, split: Split) -> npt.NDArray[np.int64]:
        """Positions after the last token of each document [D], mapped read-only."""
        return self._mapped(f"{split}.documents", DOCUMENTS_DTYPE)

    def text(self) -> dict[str, Any] | None:
        """The content of `text.json`."""
        found: dict[str, Any] | None = json.loads((self.path / TEXT).read_text("utf-8"))
        return found

    def verify(self, on_progress: Callable[[float], None] = lambda share: None) -> bool:
        """Checks the content of all files, unless they were checked already and have not been touched since. Returns whether it read them.

        `on_progress`: receives the share that is done.

        Raises:
            DataError: a file differs from its SHA-256, or its content contradicts the header.
        """
        seen = self._status()
        with suppress(OSError, ValueError):
            if json.loads((self.path / VERIFIED).read_text("utf-8")) == seen:
                return False
        total, done = sum(each.bytes for each in self.header.files.values()), 0
        for name, stored in self.header.files.items():
            digest = hashlib.sha256()
            with (self.path / name).open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    done += len(chunk)
                    on_progress(done / max(1, total))
            if digest.hexdigest() != stored.sha256:
                raise DataError(
                    f"{self.path / name} is damaged: its SHA-256 is not the one in {HEADER}; copy it again, or repeat fedloop pretrain tokenize"
                )
        for split in SPLITS:
            self._check_content(split)
        with suppress(OSError):  # a directory on read-only storage is read again by the next training
            write_durably(self.path / VERIFIED, json.dumps(seen).encode())
        return True

    def _status(self) -> dict[str, Any]:
        """What tells that no file was touched."""
        files = {}
        for name in self.header.files:
            status = (self.path / name).stat()
            files[name] = [status.st_size, status.st_mtime_ns, status.st_ino]
        return {"sha256": self.header.sha256, "files": files}

    def _check_content(self, split: Split) -> None:
        """Raises DataError unless ids are within the vocabulary and documents end where the boundaries say."""
        tokens, ends = self.tokens(split), self.documents(split)
        end, ended = self.header.end_of_document, 0
        for start in range(0, len(tokens), _CHUNK):
            part = np.asarray(tokens[start : start + _CHUNK])
            if part.max() >= self.header.vocabulary:
                raise DataError(
                    f"{self.path / f'{split}.tokens'} has token {part.max()}, expected ids from 0 to {self.header.vocabulary - 1}"
                )
            ended += int((part == end).sum())
        last = 0
        for start in range(0, len(ends), _CHUNK):
            part = np.asarray(ends[start : start + _CHUNK])
            ascends = part[0] > last and (np.diff(part) > 0).all() and part[-1] <= len(tokens)
            if not ascends or (tokens[part - 1] != end).any():
                raise DataError(
                    f"{self.path / f'{split}.documents'} has boundaries where no document of {split}.tokens ends"
                )
            last = int(part[-1])
        if last != len(tokens) or ended != len(ends):
            raise DataError(
                f"{self.path / f'{split}.documents'} has {len(ends):,} boundaries, but {ended:,} documents end in {split}.tokens"
            )

    def _mapped(self, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if not self.header.files[name].bytes:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(self.path / name, dtype, "r")


def open_directory(path: Path, sha256: str = "") -> TokenDirectory:
    """The token files in `path`, after checks that read only the header and the sizes of the files.

    `sha256`: of the header that is expected; empty: any.

    Raises:
        DataError: there is no such directory, it is of another version, or it is incomplete or damaged.
    """
    try:
        content = read_regular(path / HEADER)
    except OSError as error:
        raise DataError(
            f"{path}: is no directory of token files: {HEADER}: {error.strerror}; fedloop pretrain tokenize makes one"
        ) from None
    header = _parse(content, path / HEADER)
    if sha256 and header.sha256 != sha256:
        raise DataError(
            f"{path}: was replaced: its SHA-256 is {header.sha256[:12]}…, expected {sha256[:12]}…, with which this training began"
        )
    for name, stored in header.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise DataError(f"{path / name}: {error.strerror}; the directory is incomplete") from None
        if size != stored.bytes:
            raise DataError(
                f"{path / name} is damaged: it has {size:,} bytes, expected {stored.bytes:,}; copy it again, or repeat fedloop pretrain tokenize"
            )
    return TokenDirectory(path, header)


def _parse(content: bytes, place: Path) -> Header:
    try:
        document = json.loads(content)
        kind, version = document.pop("format"), document.pop("version")
    except (ValueError, AttributeError, KeyError, TypeError):
        raise DataError(f"{place} is no header of token files") from None
    if kind != FORMAT or version != VERSION:
        raise DataError(
            f"{place}: format {kind!r}, version {version!r}; this software reads {FORMAT!r}, version {VERSION}: repeat fedloop pretrain tokenize"
        )
    sha256 = document.pop("sha256", None)
    try:
        header = options.read(Header, document, str(place))
    except options.JobError as error:
        raise DataError(f"{place} is damaged: {error}") from None
    stored, names = header.files, {f"{split}.{what}" for split in SPLITS for what in ("tokens", "documents")}
    if header.sha256 != sha256 or not {*names, TEXT} <= set(stored) <= {*names, TEXT, TOKENIZER}:
        raise DataError(f"{place} is damaged: its content does not have the SHA-256 that it says")
    itemsize = _DTYPES[header.dtype].itemsize
    for split in SPLITS:
        count, sizes = (
            header.count(split),
            [stored[f"{split}.{what}"].bytes for what in ("tokens", "documents")],
        )
        if sizes != [count.tokens * itemsize, count.documents * DOCUMENTS_DTYPE.itemsize]:
            raise DataError(f"{place} contradicts itself: {split} has {count}, in files of {sizes} bytes")
    return header
