"""Tokenizers of token files: an encoding with an id that ends each document.

bytes, characters, bpe(n)     as in `models.datasets.encodings`; the end-of-document id is the one after theirs
PATH/tokenizer.json           of Hugging Face's library `tokenizers`; the id of one of its special tokens
FOLDER                        the same with the other files of a Hugging Face folder, which say what ends a text
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.serving import tokenizer_json
from edge_client.wire.preprocessing import TextSchema
from models.datasets import corpus, encodings
from models.datasets.dataset import DataError
from models.datasets.token_files.tokenizer_folder import (
    ENDS,
    TOKENIZER,
    end_ids,
    read_content,
    vocabulary_of,
)

LEARN_CHARACTERS = 1 << 28
"""bpe is learnt from the first so many characters."""

_SMALLEST_PAIRS = 258

Ids = npt.NDArray[Any]
Texts = Callable[[], Iterable[str]]
"""Begins to read the texts anew."""


@dataclass(frozen=True)
class Tokenizer:
    """Texts to token ids.

    Attributes:
        vocabulary: ids are 0 to `vocabulary` - 1, the end-of-document id among them.
        encode: the ids of each text, without an end-of-document id.
        text: how a device or a server makes these ids of a text.
        alphabet: of characters.
        tokenizer: content of a `tokenizer.json`; empty of encodings without one.
        beginning: ids that begin each document.
    """

    encoding: str
    vocabulary: int
    end_of_document: int
    encode: Callable[[Sequence[str]], Iterator[Ids]]
    text: TextSchema
    alphabet: str = ""
    tokenizer: str = ""
    minimum_count: int = 0
    beginning: tuple[int, ...] = ()

    def as_encoding(self) -> encodings.Encoding:
        """Of single texts."""
        return encodings.Encoding(
            self.vocabulary, lambda text: next(iter(self.encode([text]))), {"kind": self.encoding}
        )


def learn(encoding: str, size: int, texts: Texts, train: Texts) -> Tokenizer:
    """The tokenizer of an encoding, `bytes`, `characters` or `bpe`, which the texts give.

    Args:
        size: ids of bpe, the end-of-document id among them.
        texts: all texts, whose characters all need an id; `train`: those to learn pairs from.

    Raises:
        DataError: too small a vocabulary, or a text that cannot be read.
    """
    match encoding:
        case "bytes":
            known = encodings.of_bytes()
            return _with_end("bytes", known, TextSchema("bytes", "next_token"))
        case "characters":
            counts: Counter[str] = Counter()
            for text in texts():
                counts.update(text)
            known = encodings.of_characters("".join(sorted(counts)))
            schema = corpus.characters_schema(known.described["alphabet"], counts)
            learnt = _with_end("characters", known, schema)
            return replace(learnt, alphabet=known.described["alphabet"], minimum_count=corpus.MINIMUM_COUNT)
    if size < _SMALLEST_PAIRS:
        raise DataError(
            f"encoding bpe({size}): expected bpe({_SMALLEST_PAIRS}) or more: 256 bytes, a pair, and the end-of-document id"
        )
    known = encodings.learn_pairs(_beginning(train()), size - 1, corpus.MINIMUM_COUNT)
    schema = corpus.pairs_schema(known.described["tokenizer"]["model"])
    learnt = _with_end(f"bpe({size})", known, schema)
    content = json.dumps(known.described["tokenizer"], ensure_ascii=False)
    return replace(
        learnt,
        encode=_batches(tokenizer_json.read(content)),
        tokenizer=content,
        minimum_count=corpus.MINIMUM_COUNT,
    )


def read(path: Path, end: str = "", vocabulary: int = 0) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, or in a folder with one.

    Args:
        end: the token that ends documents; empty: the one that the folder names, or the first of `ENDS` that there is.
        vocabulary: ids that the model is to have, if more than the tokenizer's; 0: as many, or as the folder's model has.

    Raises:
        DataError: it cannot be read, or has no such token or more ids.
    """
    file = path / TOKENIZER if path.is_dir() else path
    content = read_content(file)
    ids = tokenizer_json.size(content)
    vocabulary = vocabulary or (vocabulary_of(path) if path.is_dir() else 0) or ids
    if vocabulary < ids:
        raise DataError(
            f"{file}: has ids up to {ids - 1}, expected a --vocabulary of {ids} or more, got {vocabulary}"
        )
    known = tokenizer_json.ids(content)
    if end:
        ends = [known[end]] if end in known else []
    elif path.is_dir():
        ends = end_ids(path, content, vocabulary)
    else:
        ends = [known[name] for name in ENDS if name in known][:1]
    if not ends:
        given = f"has no token {end!r}" if end else f"has none of {', '.join(ENDS)}"
        raise DataError(f"{file}: {given}; name the token that ends a document with --end-of-document")
    found = tokenizer_json.read(content)
    found.encode_special_tokens = True  # "</s>" in a text is text
    last, *stops = ends
    schema = TextSchema("tokenizer", "next_token", end=last, stops=tuple(stops), tokenizer=content)
    return Tokenizer(
        "tokenizer.json",
        vocabulary,
        last,
        _batches(found),
        schema,
        beginning=tokenizer_json.beginning(content),
        tokenizer=content,
    )


def _with_end(name: str, known: encodings.Encoding, schema: TextSchema) -> Tokenizer:
    def encode(texts: Sequence[str]) -> Iterator[Ids]:
        return map(known.encode, texts)

    return Tokenizer(name, known.vocab + 1, known.vocab, encode, replace(schema, end=known.vocab))


def _batches(tokenizer: Any) -> Callable[[Sequence[str]], Iterator[Ids]]:
    """Encodes texts together, on all cores."""

    def encode(texts: Sequence[str]) -> Iterator[Ids]:
        for found in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            yield np.array(found.ids, np.int64)

    return encode


def _beginning(texts: Iterable[str]) -> Iterator[str]:
    left = LEARN_CHARACTERS
    for text in texts:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)
