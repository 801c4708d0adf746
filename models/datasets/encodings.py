"""Text as token ids, in three ways, each stored as a small JSON file next to the tokens.

    characters  one id a character that occurs in the text
    bytes       one id a byte of UTF-8: any text, 256 ids
    bpe         byte-level pairs, merged in the order of their frequency in the text (Sennrich 2016; Radford 2019,
                section 2.2): any text, any number of ids from 257

Decoding what was encoded gives the text again, for any text that the encoding knows. Pairs are learnt by `tokenizers`;
equal texts give equal merges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from models.datasets.dataset import DataError

Kind = Literal["characters", "bytes", "bpe"]
KINDS: tuple[Kind, ...] = ("characters", "bytes", "bpe")
Tokens = npt.NDArray[np.int32]

_BYTES = 256


@dataclass(frozen=True)
class Encoding:
    """Text to token ids 0 to `vocab` - 1.

    Attributes:
        encode: token ids of a text, [N]; raises DataError where the encoding lacks something of the text.
        described: what decodes them: `kind`, and the `alphabet` of characters, by id, or the `tokenizer` of bpe.
    """

    vocab: int
    encode: Callable[[str], Tokens]
    described: Mapping[str, Any]

    def as_json(self) -> str:
        return json.dumps(self.described)


def learn(kind: Kind, text: str, vocab: int, minimum_count: int = 1) -> Encoding:
    """The encoding of a kind that `text` gives; `vocab` is how many ids bpe may have, 257 at least.

    `minimum_count`: occurrences of a pair from which bpe merges it.

    Raises:
        DataError: an unknown kind, too small a vocabulary, or no text.
    """
    if not text:
        raise DataError("an encoding is made of text, and there is none")
    match kind:
        case "characters":
            return of_characters("".join(sorted(set(text))))
        case "bytes":
            return of_bytes()
        case "bpe":
            return learn_pairs([text], vocab, minimum_count)
    raise DataError(f"tokens = {kind!r} is unknown; known: {', '.join(KINDS)}")


def of_bytes() -> Encoding:
    """A byte of UTF-8 is its own id."""
    return Encoding(_BYTES, _utf8, {"kind": "bytes"})


def _utf8(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)


def of_characters(alphabet: str) -> Encoding:
    """`alphabet`: every character once, by code point; its place is its id."""
    known = _points(alphabet)

    def encode(text: str) -> Tokens:
        points = _points(text)
        ids = np.searchsorted(known, points)
        unknown = known[np.minimum(ids, len(known) - 1)] != points
        if unknown.any():
            place = int(np.argmax(unknown))
            raise DataError(
                f"character {text[place]!r} at {place:,} is none of the {len(known)} the encoding was made of; "
                "use bytes or bpe, which know all"
            )
        return ids.astype(np.int32)

    return Encoding(len(alphabet), encode, {"kind": "characters", "alphabet": alphabet})


def _points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


def learn_pairs(texts: Iterable[str], vocab: int, minimum_count: int) -> Encoding:
    """Byte-level pairs of texts, which are read once, one at a time; `vocab` and `minimum_count` as for `learn`.

    Raises:
        DataError: too small a vocabulary, or the library is not installed.
    """
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
        min_frequency=minimum_count,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = (line for text in texts for line in text.splitlines(keepends=True))
    tokenizer.train_from_iterator(lines, trainer=trainer)
    described = {"kind": "bpe", "tokenizer": json.loads(tokenizer.to_str())}
    return Encoding(
        tokenizer.get_vocab_size(), lambda text: np.array(tokenizer.encode(text).ids, np.int32), described
    )
