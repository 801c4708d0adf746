"""Writes a directory of token files in one pass over the documents, after one more where the encoding is learnt from them.

Memory holds a batch of documents. Which split a document belongs to follows from its first million characters, so equal documents are
in the same one, in whatever order and files they come. The header is written last; a directory without one is not opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from edge_client.files import sync_file, sync_folder, write_durably
from models.datasets.dataset import DataError
from models.datasets.token_files import directory
from models.datasets.token_files.directory import DOCUMENTS_DTYPE, SPLITS, Count, Header, Split, Stored
from models.datasets.token_files.documents import Documents, Piece
from models.datasets.token_files.tokenizers import Tokenizer

_BATCH = 1 << 20
"""Characters that are encoded together."""
_BUFFER_BYTES = 1 << 20


@dataclass
class _File:
    """A file that is written, with its hash."""

    file: IO[bytes]
    size: int = 0

    def __post_init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self.file.write(content)
        self.digest.update(content)
        self.size += len(content)


class _Writer:
    """The two files of a split."""

    def __init__(self, tokens: IO[bytes], documents: IO[bytes], dtype: str) -> None:
        self.tokens, self.documents = _File(tokens), _File(documents)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._characters = 0

    def add(self, ids: Any, characters: int) -> None:
        self.tokens.write(ids.astype(self._dtype).tobytes())
        self._characters += characters

    def end(self, end_of_document: int) -> None:
        self.add(np.array([end_of_document]), 0)
        place = self.tokens.size // self._dtype.itemsize
        self.documents.write(np.array([place], DOCUMENTS_DTYPE).tobytes())

    @property
    def count(self) -> Count:
        return Count(
            self.tokens.size // self._dtype.itemsize,
            self.documents.size // DOCUMENTS_DTYPE.itemsize,
            self._characters,
        )


def assigned(
    documents: Documents, test_share: float, on_bytes: Callable[[int], None] = lambda count: None
) -> Iterator[tuple[Split, Piece]]:
    """The pieces of all documents, with the split that each document belongs to.

    A document is a test document if the SHA-256 of its first piece, as a number from 0 to 1, is below `test_share`.
    """
    split: Split = "train"
    for piece in documents.pieces(on_bytes):
        if piece.first:
            number = int.from_bytes(hashlib.sha256(piece.text.encode()).digest()[:8], "big")
            split = "test" if number < test_share * 2**64 else "train"
        yield split, piece


def write(folder: Path, tokenizer: Tokenizer, parts: Iterator[tuple[Split, Piece]]) -> Header:
    """Writes the token files into the empty `folder`, and returns their header.

    Raises:
        DataError: a split gets no document, or a text cannot be encoded.
    """
    dtype = directory.dtype_of(tokenizer.vocabulary)
    with ExitStack() as stack:

        def opened(name: str) -> IO[bytes]:
            return stack.enter_context((folder / name).open("xb", _BUFFER_BYTES))

        writers = {
            split: _Writer(opened(f"{split}.tokens"), opened(f"{split}.documents"), dtype) for split in SPLITS
        }
        for batch in _batched(parts):
            encoded = tokenizer.encode([piece.text for _, piece in batch])
            for (split, piece), ids in zip(batch, encoded, strict=True):
                if piece.first and tokenizer.beginning:
                    writers[split].add(np.array(tokenizer.beginning), 0)
                writers[split].add(ids, len(piece.text))
                if piece.last:
                    writers[split].end(tokenizer.end_of_document)
    counts = {split: writer.count for split, writer in writers.items()}
    for split, count in counts.items():
        if not count.documents:
            raise DataError(_too_few(split, counts))
    files = {
        f"{split}.{name}": Stored(file.size, file.digest.hexdigest())
        for split, writer in writers.items()
        for name, file in (("tokens", writer.tokens), ("documents", writer.documents))
    }
    contents = {directory.TEXT: json.dumps(asdict(tokenizer.text), ensure_ascii=False)}
    contents |= {directory.TOKENIZER: tokenizer.tokenizer} if tokenizer.tokenizer else {}
    for name, content in contents.items():
        (folder / name).write_bytes(content.encode())
        files[name] = Stored(len(content.encode()), hashlib.sha256(content.encode()).hexdigest())
    header = Header(
        dtype,
        tokenizer.vocabulary,
        tokenizer.end_of_document,
        tokenizer.encoding,
        tokenizer.minimum_count,
        counts["train"],
        counts["test"],
        files,
        tokenizer.alphabet,
    )
    for name in files:
        sync_file(folder / name)
    write_durably(folder / directory.HEADER, header.to_json().encode())
    sync_folder(folder)
    return header


def _batched(parts: Iterator[tuple[Split, Piece]]) -> Iterator[list[tuple[Split, Piece]]]:
    batch: list[tuple[Split, Piece]] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part[1].text)
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _too_few(split: Split, counts: dict[Split, Count]) -> str:
    total = sum(count.documents for count in counts.values())
    if not total:
        return "the inputs have no document with text"
    return (
        f"none of the {total:,} documents went to the {split} split, which takes a share of them by their content; give more documents "
        "(--documents line makes one of each line), or another --test-share"
    )
