"""What is left of a text has the tokens that the whole text has there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.serving import texts
from edge_client.serving.texts import beginning, end, token_ids
from edge_client.wire.preprocessing import TextSchema

LETTERS = tuple("abcdefghijklmnopqrstuvwxyzéßτς .,0123456789")
BYTES = tuple(sorted(texts._bytes_of()))
SCHEMAS = {
    "bytes": TextSchema("bytes", "class"),
    "characters": TextSchema("characters", "class", LETTERS, unknown=99, lower=True),
    "words": TextSchema("words", "class", ("the", "a", "i"), unknown=99, lower=True),
    "bpe": TextSchema(
        "bpe", "class", (*BYTES, "th", "the", "Ġthe", "an"), merges=("t h", "th e", "Ġ the", "a n")
    ),
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
    assert len(beginning(text, SCHEMAS[unit], 100)) < 1_000
