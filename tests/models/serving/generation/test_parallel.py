"""Ranks that each have a part of the model generate what one process does, and go on when one of them dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from models.pretrain import plan as plans
from models.pretrain.params import save
from models.pretrain.plan import PlanError
from models.serving.generation import CannotGenerate, Engine, Options, Request, Sampling
from models.serving.generation.parallel import Parallel, Ranks, require_plan
from models.zoo import ModelSpec, get, gpt
from tests.models.serving.generation.small import GREEDY, SPECS, VOCAB, built, prompts, run, tokens_of
from tests.support.long import extended

pytestmark = pytest.mark.slow

SPEC = gpt.spec((64,), VOCAB, width=32, layers=4, heads=4)
OPTIONS = Options(blocks=24, block_tokens=4, max_batch=3, prefill_chunk=8)
ASKED = [
    Request("greedy", prompts(9)[0], 25, GREEDY),
    Request("drawn", prompts(14, seed=1)[0], 25, Sampling(seed=3, top_p=0.9)),
    Request("long", prompts(30, seed=2)[0], 20, GREEDY),
    Request("late", prompts(5, seed=3)[0], 25, GREEDY),
]


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("params") / "model.safetensors"
    save(built(SPEC), path)
    return path


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    events = run(Engine(built(SPEC), SPEC, OPTIONS), *ASKED)
    return {request_id: tokens_of(own) for request_id, own in events.items()}


def meta() -> nn.Module:
    with torch.device("meta"):
        return SPEC.module()


@contextmanager
def engine_of(
    params: Path, plan: str, options: Options = OPTIONS, seconds: float = 120.0
) -> Iterator[tuple[Engine, Ranks]]:
    started: list[Ranks] = []
    parallel = Parallel(SPEC.described(), params, plans.parse(plan), options.block_tokens, seconds)

    def start(blocks: int) -> Ranks:
        started.append(parallel(blocks))
        return started[0]

    engine = Engine(meta(), SPEC, options, executor=start)
    with closing(started[0]):
        yield engine, started[0]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2", "tp=4", "pp=2", "tp=2,pp=2"])
def test_ranks_generate_the_tokens_of_one_process_with_their_share_of_the_cache(
    plan: str, params: Path, alone: dict[str, list[int]]
) -> None:
    with engine_of(params, plan) as (engine, ranks):
        events = run(engine, *ASKED)

        assert {request_id: tokens_of(own) for request_id, own in events.items()} == alone
        parsed = plans.parse(plan)
        whole = 4 * 2 * (24 + 1) * 4 * 32 * 4  # layers, keys and values, blocks, tokens, features, bytes
        assert ranks.measure() == [whole // parsed.processes] * parsed.processes


@pytest.mark.slow
def test_ranks_that_connect_when_they_first_exchange_something_generate_the_same(
    params: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with engine_of(params, "pp=2", seconds=20) as (engine, _):
        events = run(engine, *ASKED)

        assert {request_id: tokens_of(own) for request_id, own in events.items()} == alone


@pytest.mark.slow
def test_ranks_share_the_heads_of_keys_and_values(tmp_path: Path) -> None:
    spec = SPECS["llama"]
    save(built(spec), tmp_path / "model.safetensors")
    parallel = Parallel(
        spec.described(), tmp_path / "model.safetensors", plans.parse("tp=2"), OPTIONS.block_tokens
    )
    expected = run(Engine(built(spec), spec, OPTIONS), *ASKED)
    ranks = parallel(OPTIONS.blocks)

    with closing(ranks):
        events = run(Engine(built(spec), spec, OPTIONS, executor=lambda blocks: ranks), *ASKED)

        assert ranks.measure() == [2 * 2 * (24 + 1) * 4 * 8 * 4] * 2
    assert {key: tokens_of(own) for key, own in events.items()} == {
        key: tokens_of(own) for key, own in expected.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2", *extended("pp=2")])
def test_after_a_rank_is_killed_the_same_tokens_come(
    plan: str, params: Path, alone: dict[str, list[int]]
) -> None:
    with engine_of(params, plan) as (engine, ranks):
        for request in ASKED:
            engine.add(request)
        tokens: dict[str, list[int]] = {request.id: [] for request in ASKED}
        killed = {5: 0, 20: 1}
        for step in range(1000):
            if step in killed:
                os.kill(ranks.pids[killed[step]], signal.SIGKILL)
            for event in engine.step():
                tokens[event.id].append(event.token or 0)
            if not engine.has_work:
                break

        assert tokens == alone
        assert engine.statistics.caches_lost == 2


@pytest.mark.extended
@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_and_the_same_tokens_come(
    params: Path, alone: dict[str, list[int]]
) -> None:
    with engine_of(params, "tp=2", seconds=20) as (engine, ranks):
        for request in ASKED:
            engine.add(request)
        events = [event for _ in range(6) for event in engine.step()]
        os.kill(ranks.pids[1], signal.SIGSTOP)
        while engine.has_work:
            events += engine.step()

        assert engine.statistics.caches_lost >= 1
        assert {each.id: tokens_of([e for e in events if e.id == each.id]) for each in ASKED} == alone


@pytest.mark.slow
def test_ranks_swap_caches_out_and_in(params: Path) -> None:
    options = Options(blocks=24, block_tokens=4, max_batch=4, prefill_chunk=8, deterministic=True)
    alone = run(Engine(built(SPEC), SPEC, options), *ASKED)
    with engine_of(params, "tp=2", options) as (engine, _):
        events = run(engine, *ASKED)

        assert engine.statistics.preemptions > 0
        assert [tokens_of(events[each.id]) for each in ASKED] == [tokens_of(alone[each.id]) for each in ASKED]


@pytest.mark.slow
def test_a_group_whose_params_do_not_fit_says_why(tmp_path: Path) -> None:
    other = gpt.spec((64,), VOCAB, width=16, layers=4, heads=4)
    save(built(other), tmp_path / "other.safetensors")

    with pytest.raises(CannotGenerate, match=r"other\.safetensors does not fit model 'gpt'"):
        Parallel(SPEC.described(), tmp_path / "other.safetensors", plans.parse("tp=2"))(4)


@pytest.mark.parametrize(
    ("spec", "plan", "reason"),
    [
        (SPEC, "dp=2", "dp=2 does not apply to generation, only tp, pp, split do"),
        (SPEC, "tp=2,sequence=true", "sequence=True does not apply to generation"),
        (SPEC, "tp=3", "tp=3 must divide the 4 heads"),
        (SPEC, "pp=5", "5 stages need as many layers, the model has 4"),
        (
            get("charlm", input_shape=(8,), classes=9),
            "tp=2",
            "tp needs a model that says how its matrices split",
        ),
        (gpt.spec((8,), 9, width=8, layers=2, heads=2, tie=True), "pp=2", "stages cannot share a param"),
    ],
)
def test_plans_that_do_not_fit_are_refused_with_the_reason(spec: ModelSpec, plan: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        require_plan(plans.parse(plan), spec)
