"""Whatever is asked, cancelled and lost in whatever order, each request gets its own tokens."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.serving.generation import Options, Request
from tests.models.serving.generation.small import (
    GREEDY,
    LENGTH,
    SPECS,
    built,
    engine_of,
    prompts,
    tokens_of,
    uncached,
)

pytestmark = pytest.mark.slow

SPEC = SPECS["gpt"]
MODULE = built(SPEC)
BEGINNINGS = prompts(24, 24)
ANSWER = 12


@cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    return uncached(MODULE, prompt, ANSWER, LENGTH)[0]


a_prompt = st.tuples(
    st.sampled_from(BEGINNINGS), st.integers(1, 24), st.lists(st.integers(0, 3), max_size=3)
).map(lambda parts: (*parts[0][: parts[1]], *parts[2]))
actions = st.one_of(
    a_prompt,
    st.sampled_from(["step", "step", "step", "cancel", "lose"]),
)


@given(st.lists(actions, max_size=40), st.integers(10, 30), st.booleans())
def test_each_request_gets_its_own_tokens(
    asked: list[tuple[int, ...] | str], blocks: int, deterministic: bool
) -> None:
    options = Options(blocks, 4, max_batch=3, prefill_chunk=8, deterministic=deterministic)
    engine = engine_of(SPEC, options, MODULE)
    waiting: dict[str, tuple[int, ...]] = {}
    events = []
    for at, action in enumerate(asked):
        if not isinstance(action, str):
            waiting[str(at)] = action
            engine.add(Request(str(at), action, ANSWER, GREEDY))
        elif action == "cancel" and waiting:
            cancelled = next(iter(waiting))
            engine.cancel(cancelled)
            del waiting[cancelled]
        elif action == "lose":
            engine.lose_cache()
        else:
            events += engine.step()
    for _ in range(10_000):
        if not engine.has_work:
            break
        events += engine.step()

    assert not engine.has_work
    assert engine.statistics.blocks_free == blocks
    for request_id, prompt in waiting.items():
        own = [event for event in events if event.id == request_id]
        assert tokens_of(own) == expected(prompt)
        assert [event.finish_reason for event in own[-2:]] == [None, "length"]
    ended = [event.id for event in events if event.finish_reason]
    assert len(ended) == len(set(ended)) == sum(not isinstance(action, str) for action in asked)
