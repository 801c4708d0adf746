"""What is left of a text has the tokens that the whole text has there."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.data.connector import DataProblem
from edge_client.serving import texts
from edge_client.serving.texts import beginning, end, token_ids
from edge_client.serving.tokenizer_json import bytes_of
from edge_client.wire.preprocessing import TextSchema
from tests.models.hugging_face import small_tokenizers

LETTERS = tuple("abcdefghijklmnopqrstuvwxyzéßτς .,0123456789")
BYTES = tuple(sorted(bytes_of()))
SCHEMAS = {
    "bytes": TextSchema("bytes", "class"),
    "characters": TextSchema("characters", "class", LETTERS, unknown=99, lower=True),
    "words": TextSchema("words", "class", ("the", "a", "i"), unknown=99, lower=True),
    "bpe": TextSchema(
        "bpe", "class", (*BYTES, "th", "the", "Ġthe", "an"), merges=("t h", "th e", "Ġ the", "a n")
    ),
    "byte level": TextSchema("tokenizer", "class", tokenizer=small_tokenizers.byte_level().to_str()),
    "sentence pieces": TextSchema(
        "tokenizer", "class", tokenizer=small_tokenizers.sentence_pieces().to_str()
    ),
    "word pieces": TextSchema("tokenizer", "class", tokenizer=small_tokenizers.word_pieces().to_str()),
}
NATURAL = st.lists(
    st.sampled_from(["the", "a", "Then", "ΣΑΣ", "straße", "İ", "1234", ".", " ", "\n", "theatheathe", "é"]),
    max_size=60,
).map(" ".join) | st.text(max_size=80)


@pytest.mark.parametrize("unit", SCHEMAS)
@given(NATURAL, st.integers(1, 12))
def test_a_cut_text_has_the_same_tokens(unit: str, text: str, tokens: int) -> None:
    schema = SCHEMAS[unit]
    [whole] = token_ids([text], schema, "text")
    [first], [last] = (token_ids([cut(text, schema, tokens)], schema, "text") for cut in (beginning, end))
    assert first[:tokens] == whole[:tokens]
    assert last[-tokens:] == whole[-tokens:]
    assert (len(first) > tokens) == (len(whole) > tokens)


@pytest.mark.parametrize("unit", SCHEMAS)
def test_little_is_left_of_a_long_text(unit: str) -> None:
    text = "the " * 100_000
    assert len(beginning(text, SCHEMAS[unit], 100)) < 4_000


TOKENIZERS = [name for name, schema in SCHEMAS.items() if schema.unit == "tokenizer"]


@pytest.mark.parametrize("unit", TOKENIZERS)
@given(text=NATURAL)
def test_ids_are_those_of_the_library(unit: str, text: str) -> None:
    from tokenizers import Tokenizer

    schema = SCHEMAS[unit]
    library = Tokenizer.from_str(schema.tokenizer)
    expected = library.encode(text)
    assert token_ids([text], schema, "text") == [expected.ids]
    assert texts.decode(expected.ids, schema) == library.decode(expected.ids)
    assert schema.tokens == library.get_vocab_size()


@pytest.mark.parametrize("predicts", ["class", "next_token"])
@pytest.mark.parametrize("unit", TOKENIZERS)
def test_special_tokens_stay_when_a_text_is_cut(unit: str, predicts: Literal["class", "next_token"]) -> None:
    from tokenizers import Tokenizer

    schema = replace(SCHEMAS[unit], predicts=predicts)
    library = Tokenizer.from_str(schema.tokenizer)
    library.enable_truncation(6, direction="right" if predicts == "class" else "left")
    x, last = texts.encode(["to be or not to be, or", "be"], schema, 6, "text")
    for row, text in zip(x.tolist(), ("to be or not to be, or", "be"), strict=True):
        ids = library.encode(text).ids
        assert row == ids + [schema.padding] * (6 - len(ids))
    assert last[0] == 5


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # the library panics
        {"model": {"type": "WordPiece", "vocab": {}, "unk_token": "x", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}},
    ],
)  # fmt: skip
def test_a_broken_tokenizer_is_told(change: dict[str, Any]) -> None:
    content = json.dumps({**json.loads(SCHEMAS["word pieces"].tokenizer), **change})
    with pytest.raises(DataProblem, match="tokenizer"):
        token_ids(["be"], TextSchema("tokenizer", "class", tokenizer=content), "text")
