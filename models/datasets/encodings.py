"""Text as token ids and back, in three ways, each stored as a small JSON file next to the model.

    characters  one id a character that occurs in the text
    bytes       one id a byte of UTF-8: any text, 256 ids
    bpe         byte-level pairs, merged in the order of their frequency in the text (Sennrich 2016; Radford 2019,
                section 2.2): any text, any number of ids from 257

Decoding what was encoded gives the text again, for any text that the encoding knows. Pairs are learnt by `tokenizers`;
equal texts give equal merges.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from models.datasets.dataset import DataError

Kind = Literal["characters", "bytes", "bpe"]
KINDS: tuple[Kind, ...] = ("characters", "bytes", "bpe")
Tokens = npt.NDArray[np.int32]

_BYTES = 256


class Encoding(Protocol):
    """Text to token ids 0 to `vocab` - 1 and back."""

    @property
    def vocab(self) -> int:
        """How many ids there are."""

    def encode(self, text: str) -> Tokens:
        """Token ids, [N]. Raises DataError where the encoding lacks something of the text."""

    def decode(self, tokens: Tokens) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD."""

    def as_json(self) -> str:
        """What `read` reads."""


@dataclass(frozen=True)
class Characters:
    """One id a character.

    Attributes:
        alphabet: every character once, by code point; its place is its id.
    """

    alphabet: str

    @property
    def vocab(self) -> int:
        return len(self.alphabet)

    def encode(self, text: str) -> Tokens:
        points = _points(text)
        known = _points(self.alphabet)
        ids = np.searchsorted(known, points)
        unknown = known[np.minimum(ids, len(known) - 1)] != points
        if unknown.any():
            place = int(np.argmax(unknown))
            raise DataError(
                f"character {text[place]!r} at {place:,} is none of the {self.vocab} the encoding was made of; "
                "use bytes or bpe, which know all"
            )
        return ids.astype(np.int32)

    def decode(self, tokens: Tokens) -> str:
        return "".join(self.alphabet[token] for token in tokens.tolist())

    def as_json(self) -> str:
        return json.dumps({"kind": "characters", "alphabet": self.alphabet})


@dataclass(frozen=True)
class Bytes:
    """One id a byte of UTF-8."""

    @property
    def vocab(self) -> int:
        return _BYTES

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: Tokens) -> str:
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def as_json(self) -> str:
        return json.dumps({"kind": "bytes"})


class BPE:
    """Byte-level pairs.

    Args:
        content: the tokenizer, in the JSON of `tokenizers`.
    """

    def __init__(self, content: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(content)

    @property
    def vocab(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    def encode(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def decode(self, tokens: Tokens) -> str:
        text: str = self._tokenizer.decode(tokens.tolist())
        return text

    def as_json(self) -> str:
        return json.dumps({"kind": "bpe", "tokenizer": json.loads(self._tokenizer.to_str())})


def learn(kind: Kind, text: str, vocab: int) -> Encoding:
    """The encoding of a kind that `text` gives; `vocab` is how many ids bpe may have, 257 at least.

    Raises:
        DataError: an unknown kind, too small a vocabulary, or no text.
    """
    if not text:
        raise DataError("an encoding is made of text, and there is none")
    match kind:
        case "characters":
            return Characters("".join(sorted(set(text))))
        case "bytes":
            return Bytes()
        case "bpe":
            return _pairs(text, vocab)
    raise DataError(f"tokens = {kind!r} is unknown; known: {', '.join(KINDS)}")


def read(path: Path) -> Encoding:
    """The encoding in a file that `as_json` was written to.

    Raises:
        DataError: it is no such file.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        match content["kind"]:
            case "characters":
                return Characters(content["alphabet"])
            case "bytes":
                return Bytes()
            case "bpe":
                return BPE(json.dumps(content["tokenizer"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read as an encoding: {error}") from error
    raise DataError(f"{path}: {content['kind']!r} is none of {', '.join(KINDS)}")


def _pairs(text: str, vocab: int) -> BPE:
    if vocab <= _BYTES:
        raise DataError(f"vocab = {vocab}: bpe has an id for each of the 256 bytes, so expected 257 at least")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise DataError(
            "tokens = 'bpe' needs tokenizers: pip install tokenizers; or use bytes or characters"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer=trainer)
    return BPE(tokenizer.to_str())


def _points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
