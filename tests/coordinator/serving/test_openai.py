"""OpenAI's completions: every field is checked, choices and usage are counted right, streams end as they should."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from coordinator.errors import Refusal
from coordinator.serving.inference import GeneratedText, GenerationRequest
from coordinator.serving.openai_api import answers
from coordinator.serving.openai_api.fields import parse
from tests.support.memory_inference import BreakingInference, MemoryInference

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def service() -> MemoryInference:
    return MemoryInference()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "plays", "prompt": "a", "max_tokens": 3} | fields


async def answer(service: Any, **fields: Any) -> dict[str, Any]:
    found = await answers.completions(service, body(**fields), clock=lambda: 1_700_000_000.9)
    assert isinstance(found, bytes)
    document: dict[str, Any] = json.loads(found)
    return document


async def stream(service: Any, **fields: Any) -> list[Any]:
    """The documents of all events; the text of those that hold none."""
    events = await answers.completions(service, body(stream=True, **fields))
    assert not isinstance(events, bytes)
    texts = [event.decode() async for event in events]
    assert all(each.startswith("data: ") and each.endswith("\n\n") for each in texts)
    contents = [each.removeprefix("data: ").strip() for each in texts]
    return [json.loads(each) if each.startswith("{") else each for each in contents]


async def test_completion_has_its_text_reason_and_usage(service: MemoryInference) -> None:
    found = await answer(service)
    assert found["object"] == "text_completion"
    assert (found["model"], found["created"], found["id"][:5]) == ("plays", 1_700_000_000, "cmpl-")
    assert found["choices"] == [{"index": 0, "text": "bcd", "logprobs": None, "finish_reason": "length"}]
    assert found["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}


async def test_fields_reach_the_service(service: MemoryInference) -> None:
    await answer(service, temperature=0.5, top_p=0.25, top_k=3, seed=7, stop="zz", logprobs=2, user="u")
    assert service.asked == [
        GenerationRequest(
            "plays",
            "a",
            3,
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            seed=7,
            stop=("zz",),
            logprobs=2,
        )
    ]


async def test_absent_and_null_fields_have_the_defaults_of_openai() -> None:
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "best_of",
        "echo",
        "logprobs",
        "seed",
        "stop",
        "stream",
    )
    neutral = {"suffix": None, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0}
    asked = parse({"model": "plays", "prompt": "a", **dict.fromkeys(names), **neutral})
    assert asked == parse({"model": "plays", "prompt": "a"})
    assert asked.template == GenerationRequest("plays", "", 16, temperature=1.0, top_p=1.0)
    assert (asked.n, asked.best_of, asked.echo, asked.stream) == (1, 1, False, False)


async def test_prompts_are_texts_or_token_ids(service: MemoryInference) -> None:
    for prompt, expected in (
        ("a", ["a"]),
        (["a", "k"], ["a", "k"]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ):
        service.asked.clear()
        found = await answer(service, prompt=prompt)
        assert [each.prompt for each in service.asked if isinstance(each, GenerationRequest)] == expected
        assert [each["index"] for each in found["choices"]] == list(range(len(expected)))


async def test_choices_of_a_prompt_follow_each_other_with_consecutive_seeds(service: MemoryInference) -> None:
    found = await answer(service, prompt=["a", "k"], n=2, seed=5)
    assert [each["text"] for each in found["choices"]] == ["bcd", "bcd", "lmn", "lmn"]
    asked = [each for each in service.asked if isinstance(each, GenerationRequest)]
    assert [(each.prompt, each.seed) for each in asked] == [("a", 5), ("a", 6), ("k", 5), ("k", 6)]
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}


async def test_best_of_keeps_the_most_probable_texts() -> None:
    class Sampled(MemoryInference):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[GeneratedText]:
            assert request.seed is not None and request.logprobs == 0
            logprob = {1: -3.0, 2: -1.0, 3: -2.0}[request.seed]
            yield GeneratedText(
                str(request.seed),
                ("t",),
                (logprob,),
                finish_reason="length",
                prompt_tokens=1,
                completion_tokens=1,
            )

    found = await answer(Sampled(), n=2, best_of=3, seed=1)
    assert [each["text"] for each in found["choices"]] == ["2", "3"]
    assert [each["logprobs"] for each in found["choices"]] == [None, None]
    assert found["usage"]["completion_tokens"] == 3


async def test_stop_strings_end_a_text(service: MemoryInference) -> None:
    [choice] = (await answer(service, max_tokens=20, stop=["e", "z"]))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("bcd", "stop")


async def test_echo_repeats_the_prompt(service: MemoryInference) -> None:
    assert (await answer(service, echo=True))["choices"][0]["text"] == "abcd"
    events = await stream(service, echo=True)
    assert [each["choices"][0]["text"] for each in events[:-1]] == ["ab", "c", "d"]


async def test_logprobs_name_the_token_itself_and_the_most_probable(service: MemoryInference) -> None:
    [choice] = (await answer(service, logprobs=1))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["b", "c", "d"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -1.0, "b": -0.5}, {"a": -1.0, "c": -0.5}, {"a": -1.0, "d": -0.5}],
        "text_offset": [0, 1, 2],
    }
    events = await stream(service, logprobs=0)
    assert [each["choices"][0]["logprobs"]["text_offset"] for each in events[:-1]] == [[0], [1], [2]]


async def test_stream_has_an_event_for_each_piece(service: MemoryInference) -> None:
    events = await stream(service)
    assert events[-1] == "[DONE]"
    assert [each["choices"][0]["text"] for each in events[:-1]] == ["b", "c", "d"]
    assert [each["choices"][0]["finish_reason"] for each in events[:-1]] == [None, None, "length"]
    assert len({each["id"] for each in events[:-1]}) == 1 and "usage" not in events[0]


async def test_stream_tells_its_usage_last(service: MemoryInference) -> None:
    *pieces, last, done = await stream(service, n=2, stream_options={"include_usage": True})
    assert {each["usage"] for each in pieces} == {None}
    assert (last["choices"], last["usage"]["total_tokens"], done) == ([], 7, "[DONE]")
    texts = {
        index: "".join(c["text"] for e in pieces for c in e["choices"] if c["index"] == index)
        for index in (0, 1)
    }
    assert texts == {0: "bcd", 1: "bcd"}


WRONG: list[dict[str, Any]] = [
    {"model": None}, {"model": 3}, {"prompt": None}, {"prompt": []}, {"prompt": [1, "a"]}, {"prompt": [[]]},
    {"prompt": [True]}, {"prompt": [-1]}, {"prompt": {"a": 1}}, {"max_tokens": 0}, {"max_tokens": 1.5},
    {"max_tokens": True}, {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": "1"}, {"top_p": 1.5},
    {"top_p": False}, {"top_k": -1}, {"seed": "s"}, {"seed": 2**63}, {"n": 0}, {"n": 129}, {"best_of": 0},
    {"echo": 1}, {"logprobs": 6}, {"logprobs": -1}, {"logprobs": True}, {"stop": ""}, {"stop": ["a"] * 5},
    {"stop": [1]}, {"stream": "yes"}, {"stream_options": {"include_usage": True}}, {"priority": 1}, {"user": 3},
    {"suffix": "end"}, {"logit_bias": {"50256": -100}}, {"presence_penalty": 0.5}, {"frequency_penalty": False},
    {"messages": []},
]  # fmt: skip


@pytest.mark.parametrize("fields", WRONG, ids=str)
async def test_wrong_field_is_named(service: MemoryInference, fields: dict[str, Any]) -> None:
    [name] = fields
    with pytest.raises(Refusal) as caught:
        await answers.completions(service, body(**fields))
    assert (caught.value.status, caught.value.details["param"]) == (400, name)
    assert json.loads(answers.encode_refusal(caught.value))["error"]["param"] == name
    assert service.asked == []


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1, 2]}, "echo"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "other"),
    ],
)
async def test_fields_that_contradict_each_other_are_refused(
    service: MemoryInference, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(Refusal) as caught:
        await answers.completions(service, body(**fields))
    assert (caught.value.status, caught.value.details["param"]) == (400, name)


@pytest.mark.parametrize("streams", [False, True])
async def test_refusal_of_the_service_comes_before_the_first_event(
    service: MemoryInference, streams: bool
) -> None:
    service.refusal = Refusal(429, "queue_full", "too many wait", retry_after_seconds=1)
    with pytest.raises(Refusal) as caught:
        await answers.completions(service, body(stream=streams))
    error = json.loads(answers.encode_refusal(caught.value))["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    with pytest.raises(Refusal) as caught:
        await answers.completions(service, body(stream=streams, model="nobody"))
    assert caught.value.status == 404


async def test_refusal_within_a_stream_is_its_last_event() -> None:
    service = BreakingInference(breaks=True)
    *_, last = await stream(service, prompt=["a", "b"])
    assert last["error"] == {
        "message": "the server ends now", "type": "server_error", "param": None, "code": "draining",
    }  # fmt: skip
    assert service.left == 2


async def test_closed_stream_ends_its_generations() -> None:
    service = BreakingInference()
    events = await answers.completions(service, body(stream=True, n=3))
    assert not isinstance(events, bytes)
    async with aclosing(events):
        await anext(events)
    assert service.left == 3


async def test_cancelled_completion_ends_its_generations() -> None:
    service = BreakingInference()
    waiting = asyncio.ensure_future(answers.completions(service, body(n=3)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert service.left == 3


async def test_models_are_those_that_generate(service: MemoryInference) -> None:
    listed = json.loads(await answers.models(service))
    assert listed == {
        "object": "list",
        "data": [{"id": "plays", "object": "model", "created": 0, "owned_by": "fedloop"}],
    }
    assert json.loads(await answers.model(service, "plays")) == listed["data"][0]
    for name in ("digits", "nobody"):
        with pytest.raises(Refusal) as caught:
            await answers.model(service, name)
        assert (caught.value.status, caught.value.code) == (404, "unknown_model")
