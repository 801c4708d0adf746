"""A text prepared once for pretraining: two files of tokens, and the encoding they are in.

    tokens_train.npy   the beginning of the text
    tokens_test.npy    the tail, held out
    encoding.json      see `models.datasets.encodings`

The files are one array each, mapped into memory by the trainers; nothing here needs a framework. The encoding is
learnt from the beginning alone; characters of the tail get an id as well, because the tail must be encoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.files import write_durably
from edge_client.wire.preprocessing import TextSchema
from edge_client.wire.schema import DataSchema
from models.datasets import encodings, files
from models.datasets.dataset import DataError
from models.datasets.encodings import Encoding, Kind
from models.datasets.shipped import shakespeare

TRAIN, TEST, ENCODING = "tokens_train.npy", "tokens_test.npy", "encoding.json"
HELD_OUT = 0.1
MINIMUM_COUNT = 10
"""Occurrences from which a schema names a character, as for categories of a table."""
TEXT_LIMIT_BYTES = 16 * 1024**3
"""Largest text that is read; it is held in memory."""
_PIECE = 1 << 20
"""Characters encoded together; bounds the memory of encoding."""


@dataclass(frozen=True)
class Corpus:
    """What `prepare` wrote.

    Attributes:
        vocab: ids of the encoding, which are the classes of a model that predicts them.
        train, test: tokens in the two files.
        characters: of the text; with the tokens, how far the encoding shortens it.
        text: the encoding as a schema has it.
    """

    vocab: int
    train: int
    test: int
    characters: int
    text: TextSchema


def find(name: str, data_dir: Path | None = None) -> Path:
    """The file of a text: `shakespeare`, or any path.

    Raises:
        DataError: there is none.
    """
    if name == "shakespeare":
        return files.find(data_dir, [shakespeare.NAME], name, shakespeare.ORIGIN)
    if not Path(name).is_file():
        raise DataError(f"text {name!r} is neither 'shakespeare' nor a file that exists")
    return Path(name)


def prepare(
    path: Path,
    folder: Path,
    kind: Kind = "bytes",
    vocab: int = 1024,
    held_out: float = HELD_OUT,
    known: tuple[Encoding, TextSchema] | None = None,
) -> Corpus:
    """Writes the tokens of the UTF-8 text at `path` into `folder`. Equal arguments give equal bytes.

    Args:
        vocab: how many ids bpe may have.
        known: an encoding that is not learnt from the text, and its schema; `kind` and `vocab` say nothing then.
        held_out: share of the text, its tail, that is not trained on.

    Raises:
        DataError: no UTF-8 text, one too short to hold something out of it, or an encoding that cannot be.
    """
    text = files.read_text(path, TEXT_LIMIT_BYTES)
    cut = round(len(text) * (1 - held_out))
    if not 0 < cut < len(text):
        raise DataError(f"{path}: {len(text)} characters are too few to hold {held_out:.0%} out of them")
    if known is None:
        learnt = text if kind == "characters" else text[:cut]
        encoding = encodings.learn(kind, learnt, vocab, MINIMUM_COUNT)
        schema = _text_schema(kind, encoding, text)
    else:
        encoding, schema = known
    folder.mkdir(parents=True, exist_ok=True)
    train, test = _write(encoding, text[:cut], folder / TRAIN), _write(encoding, text[cut:], folder / TEST)
    write_durably(folder / ENCODING, encoding.as_json().encode())
    return Corpus(encoding.vocab, train, test, len(text), schema)


def schema_of(corpus: Corpus, length: int) -> DataSchema:
    """The data schema of windows of `length` tokens. It names no character, and no token of bpe longer than a byte, that occurs fewer than `MINIMUM_COUNT` times."""
    least = 1 if corpus.text.unit == "tokenizer" else MINIMUM_COUNT
    return DataSchema("text", (length,), "int32", minimum_count=least, text=corpus.text)


def _text_schema(kind: Kind, encoding: Encoding, text: str) -> TextSchema:
    match kind:
        case "bytes":
            return TextSchema("bytes", "next_token")
        case "characters":
            return characters_schema(encoding.described["alphabet"], Counter(text))
        case "bpe":
            return pairs_schema(encoding.described["tokenizer"]["model"])


def characters_schema(alphabet: str, counts: Mapping[str, int]) -> TextSchema:
    """Of an alphabet in the order of its ids; names the characters that occur often enough."""
    named = tuple(each if counts[each] >= MINIMUM_COUNT else "" for each in alphabet)
    return TextSchema("characters", "next_token", named)


def pairs_schema(model: Mapping[str, Any]) -> TextSchema:
    """Of the `model` in a `tokenizer.json` of byte-level pairs."""
    merges = tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    return TextSchema(
        "bpe", "next_token", tuple(sorted(model["vocab"], key=model["vocab"].get)), merges=merges
    )


def _write(encoding: Encoding, text: str, path: Path) -> int:
    """Tokens as uint16 where they fit, uint32 otherwise."""
    dtype = np.uint16 if encoding.vocab <= 1 << 16 else np.uint32
    tokens = np.concatenate([encoding.encode(piece).astype(dtype) for piece in pieces(text)])
    np.save(path, tokens, allow_pickle=False)
    return len(tokens)


def pieces(text: str) -> list[str]:
    """The text in pieces of whole lines, or of `_PIECE` characters where a line is longer."""
    cut = []
    start = 0
    while start < len(text):
        end = start + _PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        cut.append(text[start:end])
        start = end
    return cut
