"""With a cache the same tokens are generated as without, whatever is computed together and wherever it is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.serving.generation import CannotGenerate, Engine, Options, Request, Sampling
from models.serving.generation.cached_model import CachedModel
from models.zoo import ModelSpec, bert, get, gpt
from models.zoo.layout import Layout
from tests.models.serving.generation.small import (
    GREEDY,
    LENGTH,
    SPECS,
    VOCAB,
    built,
    engine_of,
    prompts,
    run,
    tokens_of,
    uncached,
)
from tests.support.long import LONG

pytestmark = pytest.mark.slow

every_model = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.mark.parametrize(
    ("spec", "deterministic"),
    [
        (spec, fixed)
        for spec in SPECS.values()
        for fixed in (False, True)
        if not (fixed and spec.name == "moe")
    ],
)
def test_many_requests_in_a_small_cache_get_the_tokens_of_a_model_without_one(
    spec: ModelSpec, deterministic: bool
) -> None:
    module = built(spec)
    options = Options(blocks=20, block_tokens=4, max_batch=4, prefill_chunk=8, deterministic=deterministic)
    engine = engine_of(spec, options, module)
    asked = prompts(3, 17, 9, 30, 1, 12, 40)

    events = run(engine, *(Request(str(at), prompt, 20, GREEDY) for at, prompt in enumerate(asked)))

    assert engine.statistics.preemptions > 0
    for at, prompt in enumerate(asked):
        tokens, logprobs = uncached(module, prompt, 20, LENGTH)
        assert tokens_of(events[str(at)]) == tokens
        assert [event.logprob for event in events[str(at)]] == pytest.approx(logprobs, abs=1e-4)


class AttendingTogether(CachedModel):
    """As on a GPU."""

    together = True


@every_model
def test_sequences_that_attend_in_one_operation_get_the_same_tokens(spec: ModelSpec) -> None:
    module, layout = built(spec), spec.layout
    assert layout is not None
    options = Options(blocks=20, block_tokens=4, max_batch=4, prefill_chunk=8)
    engine = Engine(
        module, spec, options, executor=lambda blocks: AttendingTogether(module, layout, blocks, 4)
    )
    asked = prompts(3, 17, 9, 30, 1, 12, 40)

    events = run(engine, *(Request(str(at), prompt, 20, GREEDY) for at, prompt in enumerate(asked)))

    for at, prompt in enumerate(asked):
        assert tokens_of(events[str(at)]) == uncached(module, prompt, 20, LENGTH)[0]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 17),
    st.booleans(),
)
def test_any_sizes_give_the_same_tokens(
    sizes: list[tuple[int, int]], block_tokens: int, max_batch: int, chunk: int, deterministic: bool
) -> None:
    spec = SPECS["gpt"]
    module = built(spec)
    blocks = -(-LENGTH // block_tokens)
    options = Options(blocks, block_tokens, max_batch, max(chunk, block_tokens), deterministic)
    asked = prompts(*(size for size, _ in sizes))
    requests = [
        Request(str(at), prompt, count, GREEDY)
        for at, (prompt, (_, count)) in enumerate(zip(asked, sizes, strict=True))
    ]
    engine = engine_of(spec, options, module)

    events = run(engine, *requests)

    assert engine.statistics.blocks_free == blocks
    for request in requests:
        expected, _ = uncached(module, request.prompt, request.max_tokens, LENGTH)
        assert tokens_of(events[request.id]) == expected


@pytest.mark.parametrize("name", ["gpt", "charlm"])
def test_a_thousand_tokens_are_those_of_a_model_without_a_cache(name: str) -> None:
    """In the short edition the model without a cache sees all tokens at once, in the long one each after the others."""
    length = 1010
    spec = get(name, input_shape=(length,), classes=VOCAB, width=32, layers=2, heads=4)
    module = built(spec)
    (prompt,) = prompts(10)

    events = run(Engine(module, spec, Options(max_batch=1)), Request("a", prompt, 1000, GREEDY))["a"]

    tokens = tokens_of(events)
    assert len(tokens) == 1000
    with torch.inference_mode():
        logits = module(torch.tensor([[*prompt, *tokens]], dtype=torch.int32)[:, :length])[0, 9:]
    odds = logits.log_softmax(-1)[:1000]
    assert tokens == odds.argmax(-1).tolist()
    assert [event.logprob for event in events] == pytest.approx(odds.amax(-1).tolist(), abs=1e-4)
    if LONG:
        assert tokens == uncached(module, prompt, 1000, length)[0]


def test_the_last_token_of_the_longest_sequence_is_generated() -> None:
    spec = SPECS["gpt"]
    (prompt,) = prompts(LENGTH)

    (event,) = run(engine_of(spec), Request("a", prompt, 10, GREEDY))["a"]

    assert (event.token, event.finish_reason) == (uncached(built(spec), prompt, 1, LENGTH)[0][0], "length")


def test_the_model_is_left_as_it_was() -> None:
    spec = SPECS["charlm"]
    module = built(spec)
    x, _ = spec.example_batch(2)
    before, names = module(x), [name for name, _ in module.named_modules()]

    run(engine_of(spec, module=module), Request("a", prompts(5)[0], 5, GREEDY))

    assert torch.equal(module(x), before)
    assert [name for name, _ in module.named_modules()] == names


@pytest.mark.parametrize(
    ("spec", "deterministic", "reason"),
    [
        (bert.spec((8,), 20, vocab=20, objective="masked"), False, "predicts masked tokens from both sides"),
        (get("textcls", input_shape=(8,), classes=3), False, "its task is 'classification'"),
        (get("lstm", input_shape=(8,), classes=9), False, "its layout names no attention"),
        (SPECS["moe"], True, "with deterministic = true: how many tokens an expert multiplies"),
        (replace(SPECS["gpt"], layout=None), False, "its layout names no attention"),
        (replace(SPECS["gpt"], layout=Layout((), attention=("layers.*.core",))), False, "names no attention"),
        (
            replace(SPECS["gpt"], layout=Layout((), attention=("layers.*.attention.core",))),
            False,
            "its logits differ by .* and every one of learned positions",
        ),
    ],
)
def test_other_models_are_refused_with_the_reason(spec: ModelSpec, deterministic: bool, reason: str) -> None:
    with pytest.raises(CannotGenerate, match=rf"model '{spec.name}' cannot generate.*{reason}"):
        Engine(built(spec), spec, Options(deterministic=deterministic))


def test_attention_that_sees_later_tokens_is_refused() -> None:
    spec = gpt.spec((LENGTH,), VOCAB, width=32, layers=2, heads=4)
    module = built(spec)
    for block in module.get_submodule("layers").children():
        block.attention.core.causal = False

    with pytest.raises(CannotGenerate, match="its logits differ"):
        Engine(module, spec)


def test_company_does_not_change_what_is_drawn() -> None:
    spec = SPECS["gpt"]
    module = built(spec)
    asked = [
        Request(str(at), prompt, 15, Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=at))
        for at, prompt in enumerate(prompts(5, 8, 13, 2, 21))
    ]

    together = run(engine_of(spec, Options(blocks=20, block_tokens=4, max_batch=3), module), *asked)

    for request in asked:
        alone = run(engine_of(spec, module=module), request)
        assert tokens_of(alone[request.id]) == tokens_of(together[request.id])
