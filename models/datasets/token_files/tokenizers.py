"""Tokenizers of token files: an encoding with an id that ends each document.

bytes, characters, bpe(n)     as in `models.datasets.encodings`; the end-of-document id is the one after theirs
PATH/tokenizer.json           of Hugging Face's library `tokenizers`; the id of one of its special tokens
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

from edge_client.files import read_regular
from edge_client.wire.preprocessing import TextSchema
from models.datasets import corpus, encodings
from models.datasets.dataset import DataError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Special tokens that end a text in GPT-2 and Qwen, Llama 3, Llama 2, Gemma, and BERT."""

LEARN_CHARACTERS = 1 << 28
"""bpe is learnt from the first so many characters."""

_SMALLEST_PAIRS = 258

_CHANGES = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)
"""Options of pairs in a `tokenizer.json` that change the ids of a text."""

Ids = npt.NDArray[Any]
Texts = Callable[[], Iterable[str]]
"""Begins to read the texts anew."""


@dataclass(frozen=True)
class Tokenizer:
    """Texts to token ids.

    Attributes:
        vocabulary: ids are 0 to `vocabulary` - 1, the end-of-document id among them.
        encode: the ids of each text, without an end-of-document id.
        text: how a device or a server makes these ids of a text; None: they cannot, and take ids.
        alphabet: of characters.
        tokenizer: content of a `tokenizer.json`; empty of encodings without one.
    """

    encoding: str
    vocabulary: int
    end_of_document: int
    encode: Callable[[Sequence[str]], Iterator[Ids]]
    text: TextSchema | None
    alphabet: str = ""
    tokenizer: str = ""
    minimum_count: int = 0


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
        encode=_batches(_library().from_str(content)),
        tokenizer=content,
        minimum_count=corpus.MINIMUM_COUNT,
    )


def read(path: Path, end: str = "", vocabulary: int = 0) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`.

    Args:
        end: the token that ends documents; empty: the first of `ENDS` that it has.
        vocabulary: ids that the model is to have, if more than the tokenizer's; 0: as many.

    Raises:
        DataError: it cannot be read, or has no such token or more ids.
    """
    library = _library()
    try:
        content = read_regular(path).decode("utf-8")
        found = library.from_str(content)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # the library has no error of its own
        raise DataError(f"{path}: is no tokenizer.json: {error}") from None
    known = found.get_vocab(with_added_tokens=True)
    names = [end] if end else [name for name in ENDS if name in known]
    if not names or names[0] not in known:
        given = f"has no token {end!r}" if end else f"has none of {', '.join(ENDS)}"
        raise DataError(f"{path}: {given}; name the token that ends a document with --end-of-document")
    ids = max(known.values()) + 1
    if vocabulary and vocabulary < ids:
        raise DataError(
            f"{path}: has ids up to {ids - 1}, expected a --vocabulary of {ids} or more, got {vocabulary}"
        )
    found.encode_special_tokens = True  # "</s>" in a text is text
    last = known[names[0]]
    schema = _schema(json.loads(content), max(ids, vocabulary), last)
    return Tokenizer("tokenizer.json", max(ids, vocabulary), last, _batches(found), schema, tokenizer=content)


def _schema(document: dict[str, Any], vocabulary: int, end: int) -> TextSchema | None:
    """The schema with which `edge_client.serving.texts` makes the same ids; None of a tokenizer that works otherwise."""
    model, before = document["model"], document.get("pre_tokenizer") or {}
    is_byte_level = (
        before.get("type") == "ByteLevel"
        and not before.get("add_prefix_space", True)
        and before.get("use_regex", True)
    )
    changed = any(model.get(key) for key in _CHANGES)
    if model.get("type") != "BPE" or not is_byte_level or document.get("normalizer") or changed:
        return None
    schema = corpus.pairs_schema(model)
    special = {added["content"] for added in document.get("added_tokens", ())}
    names = [""] * vocabulary
    for token, index in model["vocab"].items():
        names[index] = "" if token in special else token
    return replace(schema, vocabulary=tuple(names), end=end)


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


def _library() -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(
            "this encoding needs tokenizers: pip install 'fedloop[data]'; or use bytes or characters"
        ) from None
    return Tokenizer
