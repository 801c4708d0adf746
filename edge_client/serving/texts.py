"""Texts as token ids, by the schema of the model they are for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataProblem
from edge_client.data.options import read_only_problem
from edge_client.data.quoting import quoted
from edge_client.files import read_regular
from edge_client.serving import tokenizer_json
from edge_client.serving.tokenizer_json import bytes_of
from edge_client.wire.preprocessing import TextSchema

WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_")
"""Runs of letters, runs of digits, and every other mark by itself."""

SUFFIX = ".txt"

_MARGIN = 8
"""Tokens next to a cut may come out differently: a word of bpe is cut in two, a capital sigma is no longer the last letter."""


def read_lines(path: Path, encoding: str | None = None) -> list[str]:
    """The lines of a text file, a text each, without their ends.

    Raises:
        DataProblem: it cannot be read or decoded, or a line is empty.
    """
    used = encoding or "utf-8-sig"
    try:
        lines = read_regular(path).decode(used).replace("\r\n", "\n").removesuffix("\n").split("\n")
    except OSError as error:
        raise read_only_problem(path, error) from None
    except LookupError:
        raise DataProblem(f"encoding is {encoding!r}, expected a text encoding such as latin-1") from None
    except UnicodeDecodeError:
        raise DataProblem(f"{path}: is not {used} text; name its encoding with --encoding") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise DataProblem(f"{path}, line {number}: is empty, expected a text on every line")
    return lines


def encode(
    texts: Sequence[str], schema: TextSchema, length: int, place: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Token ids [N, length] of texts, and the index [N] of the last token of each.

    A text that is too long loses its end; one to continue (`next_token`) loses its beginning; special tokens that a tokenizer
    adds to it stay. `place` begins an error.

    Raises:
        DataProblem: a character is not in the vocabulary, or a text has no token.
    """
    x = np.full((len(texts), length), schema.padding, np.int32)
    last = np.zeros(len(texts), np.int64)
    keep_end = schema.predicts == "next_token"
    for row, ids in enumerate(token_ids(texts, schema, place, length)):
        kept = ids[-length:] if keep_end else ids[:length]
        x[row, : len(kept)] = kept
        last[row] = max(len(kept) - 1, 0)
    return x, last


def token_ids(texts: Sequence[str], schema: TextSchema, place: str, most: int = 0) -> list[list[int]]:
    """The ids of all tokens of each text; a tokenizer that adds special tokens makes `most` at most, if that is not 0.

    Raises:
        DataProblem: as `encode`.
    """
    if schema.unit == "tokenizer":
        keep_end = schema.predicts == "next_token"
        return [
            tokenizer_json.encode(text, schema.tokenizer, f"{place}, line {row + 1}", most, keep_end=keep_end)
            for row, text in enumerate(texts)
        ]
    known = {token: schema.first + index for index, token in enumerate(schema.vocabulary) if token}
    merged = _tokenizer(schema) if schema.unit == "bpe" else None
    found = []
    for row, text in enumerate(texts):
        given = text.lower() if schema.lower else text
        found.append(merged(given) if merged else _ids(given, schema, known, f"{place}, line {row + 1}"))
    return found


def beginning(text: str, schema: TextSchema, tokens: int) -> str:
    """So much of a text as has its first `tokens` tokens, and of a longer text at least one more.

    Raises:
        DataProblem: its tokenizer cannot encode it.
    """
    if schema.unit == "tokenizer":
        return tokenizer_json.part(text, schema.tokenizer, tokens)
    if schema.unit == "words":
        found = next(islice(WORD.finditer(text), tokens, None), None)
        return text if found is None else text[: found.end()]
    return text[: (tokens + _MARGIN) * _longest(schema)]


def end(text: str, schema: TextSchema, tokens: int) -> str:
    """So much of a text as has its last `tokens` tokens. Raises: DataProblem: as `beginning`."""
    if schema.unit == "tokenizer":
        return tokenizer_json.part(text, schema.tokenizer, tokens, keep_end=True)
    return text if schema.unit == "words" else text[-(tokens + _MARGIN) * _longest(schema) :]


def _longest(schema: TextSchema) -> int:
    """Characters of the longest token. Tokens of bpe are written with a character for each byte."""
    return max(map(len, schema.vocabulary)) if schema.unit == "bpe" else 1


def decode(ids: Sequence[int], schema: TextSchema) -> str:
    """The text of tokens; U+FFFD of bytes that are no whole character. Ids without a token, such as padding, are left out."""
    if schema.unit == "bytes":
        return bytes(each for each in ids if each < 256).decode("utf-8", "replace")
    if schema.unit == "tokenizer":
        return tokenizer_json.decode(ids, schema.tokenizer)
    places = [index - schema.first for index in ids]
    tokens = [schema.vocabulary[place] for place in places if 0 <= place < len(schema.vocabulary)]
    if schema.unit == "bpe":
        return bytes(bytes_of()[each] for token in tokens for each in token).decode("utf-8", "replace")
    return (" " if schema.unit == "words" else "").join(tokens)


def _ids(text: str, schema: TextSchema, known: Mapping[str, int], place: str) -> list[int]:
    if schema.unit == "bytes":
        return list(text.encode("utf-8"))
    tokens = WORD.findall(text) if schema.unit == "words" else list(text)
    if schema.unknown is None:
        for token in tokens:
            if token not in known:
                raise DataProblem(
                    f"{place}: {quoted(token)} is none of the {len(known)} {schema.unit} that the model knows; remove it"
                )
        return [known[token] for token in tokens]
    return [known.get(token, schema.unknown) for token in tokens]


def _tokenizer(schema: TextSchema) -> Callable[[str], list[int]]:
    """Text to ids of bpe, as its training encoded it.

    Raises:
        DataProblem: the library is not installed here.
    """
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
    except ModuleNotFoundError:
        raise DataProblem(
            "the model reads texts by bpe, which needs tokenizers here: pip install 'fedloop[data]'; or give token ids, as .npy"
        ) from None
    pairs = [(left, right) for left, _, right in (pair.partition(" ") for pair in schema.merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(schema.vocabulary)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: list(tokenizer.encode(text).ids)


def token_name(schema: TextSchema, index: int) -> str:
    """A token id as people read it; `#7` of an id without a token, such as padding."""
    if index == schema.end:
        return "<end>"
    if schema.unit == "bytes":
        return chr(index) if 32 <= index < 127 else f"0x{index:02x}"
    if schema.unit == "tokenizer":
        return tokenizer_json.token(index, schema.tokenizer) or f"#{index}"
    place = index - schema.first
    known = 0 <= place < len(schema.vocabulary) and schema.vocabulary[place]
    if known and schema.unit == "bpe":
        return bytes(bytes_of()[each] for each in known).decode("utf-8", "backslashreplace")
    return known or f"#{index}"
