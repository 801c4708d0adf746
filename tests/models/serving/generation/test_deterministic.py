"""With `deterministic` an answer's bits depend on its request alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from models.serving.generation import Engine, Event, Options, Request, Sampling
from models.serving.generation.batch import Batch
from models.serving.generation.cached_model import CachedModel
from models.zoo import ModelSpec, charlm, gpt
from tests.models.serving.generation.small import VOCAB, built, prompts, run, tokens_of

pytestmark = pytest.mark.slow

LENGTH = 192
SAMPLING = Sampling(temperature=0.9, seed=5, top_logprobs=3)
SPECS = {
    "gpt": gpt.spec((LENGTH,), VOCAB, width=96, layers=2, heads=4),
    "charlm": charlm.spec((LENGTH,), VOCAB, width=32, layers=2, heads=4),
}
(ASKED,) = prompts(100, seed=9)
REQUEST = Request("asked", ASKED, 40, SAMPLING)
OTHERS = [
    Request(str(at), prompt, 30 + 7 * at, Sampling(seed=at))
    for at, prompt in enumerate(prompts(3, 70, 128, 41, 12, 90, 30))
]

every_model = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture(scope="module")
def modules() -> dict[str, nn.Module]:
    return {name: built(spec) for name, spec in SPECS.items()}


def engine_of(module: nn.Module, spec: ModelSpec, blocks: int = 0, max_batch: int = 5) -> Engine:
    options = Options(blocks, block_tokens=8, max_batch=max_batch, prefill_chunk=32, deterministic=True)
    return Engine(module, spec, options)


def answer(events: Sequence[Event]) -> list[object]:
    """Everything that is said of each token; floats, whose bits count."""
    return [(event.token, event.logprob, event.top, event.finish_reason) for event in events]


@every_model
def test_bits_are_the_same_alone_and_in_company(spec: ModelSpec, modules: dict[str, nn.Module]) -> None:
    module = modules[spec.name]
    alone = answer(run(engine_of(module, spec), REQUEST)["asked"])

    for place in range(len(OTHERS) + 1):
        crowd = [*OTHERS[:place], REQUEST, *OTHERS[place:]]
        assert answer(run(engine_of(module, spec), *crowd)["asked"]) == alone


@every_model
def test_bits_are_the_same_from_a_cached_prefix(spec: ModelSpec, modules: dict[str, nn.Module]) -> None:
    module = modules[spec.name]
    alone = answer(run(engine_of(module, spec), REQUEST)["asked"])
    (ending,) = prompts(40, seed=4)
    engine = engine_of(module, spec)
    run(engine, Request("first", (*ASKED[:80], *ending), 20, Sampling(seed=1)), *OTHERS)

    events = run(engine, REQUEST)["asked"]
    again = run(engine, REQUEST)["asked"]

    assert (events[0].cached_prompt_tokens, again[0].cached_prompt_tokens) == (64, 96)
    assert answer(events) == answer(again) == alone


@every_model
def test_bits_are_the_same_when_generated_tokens_are_asked_again_as_a_prompt(
    spec: ModelSpec, modules: dict[str, nn.Module]
) -> None:
    module = modules[spec.name]
    used = engine_of(module, spec)
    generated = tokens_of(run(used, REQUEST)["asked"])
    longer = Request("longer", (*ASKED, *generated[:30]), 20, SAMPLING)

    assert answer(run(used, longer)["longer"]) == answer(run(engine_of(module, spec), longer)["longer"])


@every_model
def test_bits_are_the_same_after_preemption(spec: ModelSpec, modules: dict[str, nn.Module]) -> None:
    module = modules[spec.name]
    alone = answer(run(engine_of(module, spec), REQUEST)["asked"])
    engine = engine_of(module, spec, blocks=30)

    # the request comes last, so it is the one that is preempted
    events = run(engine, *OTHERS[:3], REQUEST)["asked"]

    assert engine.statistics.preemptions > 0
    assert answer(events) == alone


@every_model
def test_bits_are_the_same_after_the_cache_was_lost(spec: ModelSpec, modules: dict[str, nn.Module]) -> None:
    module = modules[spec.name]
    alone = answer(run(engine_of(module, spec), REQUEST)["asked"])
    engine = engine_of(module, spec)
    for request in (*OTHERS, REQUEST):
        engine.add(request)
    events = []
    for step in range(10_000):
        if not engine.has_work:
            break
        if step in (3, 30, 60):
            engine.lose_cache()
        events += engine.step()

    assert answer([event for event in events if event.id == "asked"]) == alone


@every_model
def test_logits_are_the_same_in_every_row(spec: ModelSpec, modules: dict[str, nn.Module]) -> None:
    """Sampling hides bits of logits; these are compared directly, of one token in each place of a batch of five."""
    cached = CachedModel(modules[spec.name], spec.layout, 10, 8)  # type: ignore[arg-type]
    rows = [logits_at(cached, place, company) for company in (0, 7) for place in range(5)]

    assert all(torch.equal(row, rows[0]) for row in rows)


def logits_at(cached: CachedModel, place: int, other: int) -> torch.Tensor:
    from models.serving.generation.batch import Part, assemble

    parts = [Part([other + at], 0, [2 + at], wanted=True, pad_to=1) for at in range(5)]
    parts[place] = Part([11], 0, [1], wanted=True, pad_to=1)
    batch, sources = assemble(parts, 8, LENGTH, 5)
    assert isinstance(batch, Batch)
    return cached.run(batch)[sources.index(place)].clone()
