"""Laws of drawing tokens, and of texts that come in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.serving.generation import Sampling
from models.serving.generation.sampling import choose, distribution, draw, generator_of, logprobs_of
from models.serving.generation.text import TextStream

ODDS = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LOGPROBS = np.log(ODDS).astype(np.float32)


def shares(sampling: Sampling) -> np.ndarray:
    odds = distribution(LOGPROBS, sampling)
    return odds / odds.sum()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), ODDS),
        (Sampling(top_k=2), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(top_p=0.5), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(top_p=0.66), [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        (Sampling(top_k=3, top_p=0.7), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(temperature=0.5), ODDS**2 / (ODDS**2).sum()),
        (Sampling(top_k=1), [0, 1, 0, 0, 0]),
        (Sampling(temperature=1e-320), [0, 1, 0, 0, 0]),
    ],
)
def test_temperature_and_restrictions_give_the_distribution_of_their_definition(
    sampling: Sampling, expected: object
) -> None:
    np.testing.assert_allclose(shares(sampling), expected, rtol=1e-6, atol=1e-12)


def test_draws_follow_the_distribution() -> None:
    generator = np.random.default_rng(0)
    drawn = np.bincount([draw(LOGPROBS, Sampling(top_k=4), generator) for _ in range(20_000)], minlength=5)

    np.testing.assert_allclose(
        drawn / 20_000, [0.1 / 0.95, 0.4 / 0.95, 0, 0.25 / 0.95, 0.2 / 0.95], atol=0.015
    )


def test_equal_seeds_draw_equal_tokens_and_others_do_not() -> None:
    def tokens(seed: int | None) -> list[int]:
        generator = generator_of(Sampling(seed=seed))
        return [draw(LOGPROBS, Sampling(), generator) for _ in range(40)]

    assert tokens(7) == tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


def test_each_row_is_drawn_by_its_own_options() -> None:
    logprobs = logprobs_of(torch.tensor([[0.0, 5.0, 1.0], [0.0, 5.0, 1.0]], dtype=torch.bfloat16))
    samplings = [Sampling(temperature=0.0), Sampling(temperature=1e6, seed=1)]
    generators = [generator_of(sampling) for sampling in samplings]

    drawn = [choose(logprobs, samplings, generators) for _ in range(50)]

    assert {first for first, _ in drawn} == {1}
    assert {second for _, second in drawn} == {0, 1, 2}


def utf8(tokens: object) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")  # type: ignore[call-overload,no-any-return]


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_pieces_are_the_text_up_to_the_first_stop_string(text: str, stops: list[str]) -> None:
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    stops = [stop.encode("utf-8", errors="replace").decode("utf-8") for stop in stops]
    stream = TextStream(utf8, stops)
    pieces = []
    for token in text.encode():
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.flush())

    # The stop string that is complete first ends the text.
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    complete = [stop for stop in stops if ends and text.find(stop) + len(stop) == min(ends) and stop in text]
    expected = text[: min(text.find(stop) for stop in complete)] if complete else text
    assert "".join(pieces) == expected
    assert stream.stopped == bool(complete)


# The first, the later and no byte of a character, and ASCII.
ANY_BYTES = st.lists(
    st.sampled_from([0x41, 0x80, 0xA1, 0xBD, 0xC3, 0xD0, 0xE4, 0xED, 0xF0, 0x9F, 0xFF]), max_size=100
)


@given(ANY_BYTES)
def test_pieces_of_any_bytes_are_their_text(tokens: list[int]) -> None:
    stream = TextStream(utf8)

    pieces = [*(stream.push(token) for token in tokens), stream.flush()]

    assert "".join(pieces) == utf8(tokens)


def test_bytes_that_are_no_text_do_not_hold_it_back() -> None:
    stream = TextStream(utf8)

    pieces = [stream.push(token) for token in (*[0xFF] * 4, 0xC3, 0xA9, ord("a"), 0xE2, 0x82, 0xAC)]

    assert pieces == ["", "", "", "\ufffd", "\ufffd", "\ufffd\ufffdé", "a", "", "", "€"]


def test_bytes_that_are_no_text_are_decoded_a_few_at_a_time() -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return utf8(tokens)

    stream = TextStream(decode)
    pieces = [*(stream.push(0xFF) for _ in range(1_000)), stream.flush()]

    assert "".join(pieces) == "\ufffd" * 1_000
    assert longest < 100


def all_or_none(tokens: Sequence[int]) -> str:
    """Bytes in a row are characters if all of them are, as Llama 2's decoder has it."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(tokens)


@given(st.text(max_size=20))
def test_pieces_of_bytes_that_are_decoded_in_a_row_are_their_text(text: str) -> None:
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    stream = TextStream(all_or_none)

    pieces = [stream.push(token) for token in text.encode()]

    assert "".join([*pieces, stream.flush()]) == text


def test_bytes_that_spoil_what_was_returned_take_nothing_back() -> None:
    stream = TextStream(all_or_none)

    pieces = [stream.push(token) for token in (*"你".encode(), 0xFF)]

    assert "".join([*pieces, stream.flush()]) == "你\ufffd"


def test_the_text_of_a_token_may_depend_on_the_prompt() -> None:
    """A blank at the beginning of a text is none of it, as sentence pieces have it; half a character before it changes nothing."""

    def pieces(ids: Sequence[int]) -> str:
        return "".join({1: " to", 2: " be"}[each] for each in ids)[1:]

    assert TextStream(pieces, before=[1]).push(2) == " be"
    assert TextStream(pieces).push(2) == "be"
    assert TextStream(utf8, before=[0xC3]).push(ord("a")) == "a"
