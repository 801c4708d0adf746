"""What requests may ask, what events say, and how requests end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_client.wire.preprocessing import TextSchema
from edge_client.wire.schema import DataSchema
from models.serving.generation import InvalidRequest, Options, Request, Sampling
from models.serving.generator import Generator
from models.serving.opening import OpenedModel
from tests.models.serving.generation.small import (
    GREEDY,
    LENGTH,
    SPECS,
    VOCAB,
    built,
    engine_of,
    letters,
    prompts,
    run,
    text_of,
    tokens_of,
    uncached,
)

SPEC = SPECS["gpt"]
MODULE = built(SPEC)
(PROMPT,) = prompts(6)


def wrong(**options: object) -> Request:
    return Request("a", PROMPT, sampling=Sampling(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "reason", "message"),
    [
        (Request("a", ()), "empty_prompt", "prompt has no token"),
        (Request("a", (1,) * 65), "prompt_too_long", "prompt has 65 tokens, the model takes at most 64"),
        (Request("a", (1, 50)), "token_out_of_vocabulary", r"prompt\[1\] is 50, expected a token id from 0 to 49"),
        (Request("a", (-1,)), "token_out_of_vocabulary", r"prompt\[0\] is -1"),
        (Request("a", (True,)), "token_out_of_vocabulary", r"prompt\[0\] is True"),
        (Request("a", PROMPT, stop_tokens=(99,)), "token_out_of_vocabulary", r"stop_tokens\[0\] is 99"),
        (Request("a", PROMPT, 0), "invalid_option", "max_tokens is 0, expected a whole number of 1 or more"),
        (wrong(temperature=-0.1), "invalid_option", "temperature is -0.1, expected 0 or more"),
        (wrong(temperature=float("nan")), "invalid_option", "temperature is nan, expected a finite number"),
        (wrong(top_p=0.0), "invalid_option", "top_p is 0.0, expected above 0 and at most 1"),
        (wrong(top_k=-1), "invalid_option", "top_k is -1"),
        (wrong(seed=-1), "invalid_option", "seed is -1, expected a whole number from 0 to 18446744073709551615"),
        (wrong(top_logprobs=101), "invalid_option", "top_logprobs is 101, expected a whole number from 0 to 100"),
        (Request("a", PROMPT, stop=("",)), "invalid_option", "stop is '', expected strings of one character"),
        (Request("a", PROMPT, stop=("x",) * 17), "invalid_option", "stop is 17, expected at most 16 strings"),
        (Request("a", (1,) * 30, 30), "cache_too_small", "59 tokens .* need 15 blocks of the cache, it has 10"),
        (Request("known", PROMPT), "duplicate_id", "request 'known' is not finished yet"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_answered_are_refused_with_the_reason(
    request_: Request, reason: str, message: str
) -> None:
    engine = engine_of(SPEC, Options(blocks=10, block_tokens=4), MODULE)
    engine.add(Request("known", PROMPT))

    with pytest.raises(InvalidRequest, match=message) as raised:
        engine.add(request_)

    assert raised.value.reason == reason
    assert engine.statistics.waiting == 1


def test_a_stop_string_needs_text() -> None:
    from models.serving.generation import Engine

    with pytest.raises(InvalidRequest, match="stop strings need text"):
        Engine(MODULE, SPEC).add(Request("a", PROMPT, stop=("x",)))


def test_the_text_ends_before_a_stop_string_that_spans_tokens() -> None:
    tokens, _ = uncached(MODULE, PROMPT, 12, LENGTH)
    text = letters(tokens)
    stop = text[5:8]
    end = text.index(stop)

    events = run(engine_of(SPEC, module=MODULE), Request("a", PROMPT, 12, GREEDY, stop=("never", stop)))["a"]

    assert text_of(events) == text[:end]
    assert (events[-1].finish_reason, len(events)) == ("stop", end + 3)


def test_text_that_only_began_like_a_stop_string_is_not_lost() -> None:
    tokens, _ = uncached(MODULE, PROMPT, 12, LENGTH)
    text = letters(tokens)

    events = run(engine_of(SPEC, module=MODULE), Request("a", PROMPT, 12, GREEDY, stop=(text[-3:] + "!",)))[
        "a"
    ]

    assert text_of(events) == text
    assert text_of(events[:-1]) == text[:-3]
    assert events[-1].finish_reason == "length"


def test_a_stop_token_ends_the_sequence_and_is_no_text() -> None:
    tokens, _ = uncached(MODULE, PROMPT, 12, LENGTH)
    place = tokens.index(tokens[6])

    events = run(engine_of(SPEC, module=MODULE), Request("a", PROMPT, 12, GREEDY, stop_tokens=(tokens[6],)))[
        "a"
    ]

    assert tokens_of(events) == tokens[: place + 1]
    assert text_of(events) == letters(tokens[:place])
    assert events[-1].finish_reason == "stop"


def test_events_name_the_most_probable_tokens() -> None:
    sampling = Sampling(temperature=0.0, top_logprobs=4)

    events = run(engine_of(SPEC, module=MODULE), Request("a", PROMPT, 3, sampling))["a"]

    for event in events:
        assert event.top[0] == (event.token, event.logprob)
        assert [value for _, value in event.top] == sorted((value for _, value in event.top), reverse=True)
        assert len({token for token, _ in event.top}) == 4


def test_a_cancelled_request_ends_and_the_others_go_on() -> None:
    asked = prompts(6, 7, 8)
    engine = engine_of(SPEC, Options(block_tokens=4, max_batch=2), MODULE)
    for at, prompt in enumerate(asked):
        engine.add(Request(str(at), prompt, 10, GREEDY))
    events = [event for _ in range(3) for event in engine.step()]

    assert engine.cancel("0") and engine.cancel("2")
    assert not engine.cancel("0") and not engine.cancel("unknown")
    while engine.has_work:
        events += engine.step()

    assert [event.finish_reason for event in events if event.finish_reason and event.id != "1"] == [
        "cancelled"
    ] * 2
    assert (
        tokens_of([event for event in events if event.id == "1"]) == uncached(MODULE, asked[1], 10, LENGTH)[0]
    )
    assert engine.statistics.blocks_free == engine.statistics.blocks


def test_a_shared_beginning_is_computed_once() -> None:
    engine = engine_of(SPEC, module=MODULE)
    (beginning,) = prompts(21)
    run(engine, Request("first", (*beginning, 3), 4, GREEDY))
    before = engine.statistics.tokens_computed

    event, *_ = run(engine, Request("second", (*beginning, 9), 4, GREEDY))["second"]
    fresh = run(engine_of(SPEC, module=MODULE), Request("second", (*beginning, 9), 4, GREEDY))["second"]

    assert event.cached_prompt_tokens == 20
    assert engine.statistics.tokens_computed - before == 2 + 3
    assert event.token == fresh[0].token


def test_requests_of_another_salt_share_nothing() -> None:
    engine = engine_of(SPEC, module=MODULE)
    (prompt,) = prompts(20)
    run(engine, Request("first", prompt, 4, GREEDY, cache_salt="one tenant"))

    event, *_ = run(engine, Request("second", prompt, 4, GREEDY, cache_salt="another"))["second"]
    again, *_ = run(engine, Request("third", prompt, 4, GREEDY, cache_salt="one tenant"))["third"]

    assert (event.cached_prompt_tokens, again.cached_prompt_tokens) == (0, 16)
    assert event.token == again.token


def test_another_beginning_shares_nothing() -> None:
    engine = engine_of(SPEC, module=MODULE)
    (beginning,) = prompts(20)
    run(engine, Request("first", beginning, 4, GREEDY))
    other = ((beginning[0] + 1) % VOCAB, *beginning[1:])

    event, *_ = run(engine, Request("second", other, 4, GREEDY))["second"]

    assert event.cached_prompt_tokens == 0
    assert event.token == uncached(MODULE, other, 1, LENGTH)[0][0]


def test_long_prompts_are_computed_in_pieces_between_the_tokens_of_others() -> None:
    first, second = prompts(4, 40)
    engine = engine_of(SPEC, Options(block_tokens=4, prefill_chunk=8), MODULE)
    engine.add(Request("first", first, 20, GREEDY))
    engine.step()
    engine.add(Request("second", second, 2, GREEDY))

    steps: list[Sequence[str]] = [[event.id for event in engine.step()] for _ in range(5)]

    assert steps == [["first"]] * 4 + [["first", "second"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0, expected 1 or more"),
        ({"blocks": -1}, "blocks is -1, expected 0 or more"),
        (
            {"prefill_chunk": 8, "deterministic": True},
            "prefill_chunk is 8, expected the 16 tokens of a block",
        ),
    ],
)
def test_sizes_of_an_engine_are_checked(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)  # type: ignore[arg-type]


def test_a_text_ends_with_the_token_that_ended_documents(tmp_path: Path) -> None:
    tokens, _ = uncached(MODULE, PROMPT, 12, LENGTH)
    end, place = tokens[6], tokens.index(tokens[6])
    vocabulary = tuple("" if token == end else chr(ord("A") + token) for token in range(VOCAB))
    text = TextSchema("characters", "next_token", vocabulary, end=end)
    schema = DataSchema("text", (LENGTH,), "int32", text=text).to_document()
    opened = OpenedModel("torch", lambda rows: rows, (LENGTH,), "int32", (LENGTH, VOCAB), VOCAB, MODULE, SPEC)
    generator = Generator(opened, {"plan": ""}, schema, tmp_path)
    sampling = {"temperature": 0.0}
    assert not generator.add(
        {"id": "a", "prompt": PROMPT, "max_tokens": 12, "sampling": sampling, "stop": []}
    )

    events = []
    while generator.has_work:
        events += generator.step()

    assert "".join(event[1] for event in events) == letters(tokens[:place])
    assert (events[-1][2], events[-1][5]) == (["<end>"], "stop")
