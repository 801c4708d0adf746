"""Texts and token ids by the content of a `tokenizer.json`, which the library `tokenizers` reads.

The ids are those of the library, and so of transformers: with the special tokens that the file adds to a text, such as
[CLS] and [SEP]; the name of a special token within a text is that token. A file's own truncation and padding are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any, TypeVar

from edge_client.data.connector import DataProblem

Found = TypeVar("Found")

_KEPT = 4
"""Tokenizers that a process keeps; one of 150,000 tokens takes about 100 MB."""

_MARGIN = 8
"""Tokens next to a cut may come out differently."""

_CHARACTERS = 8
"""Of a token, to begin with, when a text is cut to so many tokens."""


def read(content: str) -> Any:
    """A tokenizer of its own.

    Raises:
        DataProblem: the library is not installed here, or the content is no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise DataProblem(
            "the model reads texts by a tokenizer.json, which needs tokenizers here: pip install 'fedloop[data]'; or give token ids"
        ) from None

    def opened() -> Any:
        found = Tokenizer.from_str(content)
        found.no_truncation()
        found.no_padding()
        return found

    return guarded(opened, "is no tokenizer.json")


def guarded(call: Callable[[], Found], problem: str) -> Found:
    """What a call of the library gives.

    Raises:
        DataProblem: it fails, which the library has no error of its own for: it raises Exception, or panics.
    """
    try:
        return call()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise DataProblem(f"{problem}: {reason}") from None


@lru_cache(_KEPT)
def _shared(content: str) -> Any:
    return read(content)


def encode(text: str, content: str, place: str, most: int = 0, *, keep_end: bool = False) -> list[int]:
    """The ids of a text; at most `most`, special tokens included, of its end or its beginning; 0: all.

    Raises:
        DataProblem: the tokenizer is broken, or lacks a token for the text; `place` begins the message.
    """
    tokenizer = _shared(content)

    def cut() -> list[int]:
        found = tokenizer.encode(text, add_special_tokens=False)
        room = max(0, most - tokenizer.num_special_tokens_to_add(False)) if most else len(found.ids)
        if len(found.ids) > room:
            found.truncate(room, direction="left" if keep_end else "right")
        return list(tokenizer.post_process(found).ids)

    found = guarded(cut, f"{place}: the tokenizer cannot encode it")
    return found[:most] if most else found


def part(text: str, content: str, tokens: int, *, keep_end: bool = False) -> str:
    """So much of a text's beginning, or its end, as has more than `tokens` tokens, found without reading all of a long one.

    Raises:
        DataProblem: as `encode`.
    """
    size = _CHARACTERS * (tokens + _MARGIN)
    while size < len(text):
        found = text[-size:] if keep_end else text[:size]
        if len(encode(found, content, "text")) > tokens + _MARGIN:
            return found
        size *= 2
    return text


def decode(ids: Sequence[int], content: str) -> str:
    """The text of tokens, without special ones; U+FFFD of bytes that are no whole character.

    Raises:
        DataProblem: the tokenizer is broken.
    """
    tokenizer = _shared(content)
    return guarded(
        lambda: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        "the tokenizer cannot decode tokens",
    )


def token(index: int, content: str) -> str | None:
    """A token for people: as `written`, but bytes as the text that they are part of."""
    found = written(index, content)
    if found is None or not _is_byte_level(content) or not set(found) <= bytes_of().keys():
        return found
    return bytes(bytes_of()[each] for each in found).decode("utf-8", "backslashreplace")


def written(index: int, content: str) -> str | None:
    """A token as the file writes it; None: there is none of this id. Raises: DataProblem: as `read`."""
    found: str | None = _shared(content).id_to_token(index)
    return found


def ids(content: str) -> dict[str, int]:
    """The ids of all tokens as the file writes them, added tokens too. Raises: DataProblem: as `read`."""
    return dict(_shared(content).get_vocab(with_added_tokens=True))


@lru_cache(_KEPT)
def size(content: str) -> int:
    """The ids are below this. Raises: DataProblem: as `read`."""
    return max(ids(content).values(), default=-1) + 1


def beginning(content: str) -> tuple[int, ...]:
    """The special tokens that it puts before a text. Raises: DataProblem: as `read`."""
    found = _shared(content).encode("a")
    pairs = zip(found.ids, found.special_tokens_mask, strict=True)
    return tuple(index for index, _ in takewhile(lambda pair: pair[1] == 1, pairs))


@lru_cache(_KEPT)
def _is_byte_level(content: str) -> bool:
    decoder = json.loads(content).get("decoder") or {}
    kinds = [decoder, *decoder.get("decoders", ())]
    return any(each.get("type") == "ByteLevel" for each in kinds)


@cache
def bytes_of() -> dict[str, int]:
    """The byte of each character of the byte-level alphabet: printable ones stand for themselves, others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
