"""A profile's seconds are where the time went, and none is counted twice."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.datacenter import pretrain_report
from models.pretrain import plan as plans
from models.pretrain import profiling, trainer, world
from models.pretrain.profiling import Span, Split, flops_of_row, length, merge, subtract
from models.pretrain.training import ProfileOptions
from models.zoo import gpt
from tests.models.pretrain import curves
from tests.support import ranks

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


STEPS = 3
DELAY_SECONDS = 0.3

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda ends: (min(ends), max(ends))))


def moments(given_: Sequence[Span]) -> set[int]:
    """Unit cells that spans with whole ends cover."""
    return {cell for begin, end in given_ for cell in range(int(begin), int(end))}


@given(spans)
def test_united_spans_cover_the_same_and_lie_apart(some: list[Span]) -> None:
    found = merge(some)
    assert moments(found) == moments(some)
    assert all(first[1] < second[0] for first, second in pairwise(found))
    assert length(some) == len(moments(some))


@given(spans, spans)
def test_overlapped_communication_is_subtracted(some: list[Span], others: list[Span]) -> None:
    assert moments(subtract(some, others)) == moments(some) - moments(others)
    assert length(subtract(some, others)) + len(moments(some) & moments(others)) == length(some)


@given(spans, spans, spans, spans)
def test_a_moment_counts_for_the_first_that_claims_it(
    loader: list[Span], compute: list[Span], collectives: list[Span], messages: list[Span]
) -> None:
    found = profiling._split((5.0, 30.0), loader, compute, collectives, messages)
    step = set(range(5, 30))
    assert found.communication == len(step & moments(collectives) - moments(compute) - moments(loader))
    assert found.bubble == len(
        step & moments(messages) - moments(collectives) - moments(compute) - moments(loader)
    )
    assert found.seconds == 25


def test_operations_of_a_transformer_are_six_a_param_and_token_and_its_attention() -> None:
    """Chowdhery 2022, appendix B: 6 N + 12 L H Q T a token, N without embeddings, which are looked up."""
    length_, vocab, width, layers = 32, 96, 64, 3
    spec = gpt.spec((length_,), vocab, width=width, layers=layers, heads=4)
    matrices = layers * 12 * width**2 + width * vocab
    expected = length_ * (6 * matrices + 12 * layers * width * length_)
    assert flops_of_row(spec) == (expected, "operators counted")


def profiled(plan: str, folder: str, slow_rank: int = -1) -> tuple[float, list[float]]:
    """Profiles a small training; a slow rank sleeps before its backward pass. Gives seconds watched, and losses."""
    with world.join(plans.parse(plan)) as here:
        spec = curves.small_gpt()
        training = trainer.build(spec, curves.tokens(), curves.settings(), here, seed=5)
        if here.rank == slow_rank:
            forward = training.run

            def late(batch: Any) -> torch.Tensor:
                time.sleep(DELAY_SECONDS)
                return forward(batch)

            training.run = late
        profiler = profiling.Profiler(
            ProfileOptions(start=2, steps=STEPS), Path(folder), spec, here, training.options.batch_size
        )
        losses: list[float] = []
        trainer.train(training, lambda progress: losses.extend(progress.losses), 1, around=profiler.around)
        return sum(profiler._seconds), losses


def test_seconds_add_up_to_the_step_and_waiting_for_a_slow_process_is_exposed(tmp_path: Path) -> None:
    (seconds, losses), _ = ranks.run(
        2, "tests.models.pretrain.test_profiling:profiled", "dp=2", str(tmp_path), 1
    )
    (without,) = ranks.run(1, "tests.models.pretrain.curves:curve", "dp=1")
    np.testing.assert_allclose(losses, without, atol=1e-5)

    profile = json.loads((tmp_path / "profile" / profiling.NAME).read_text())
    first = Split(**profile["ranks"][0]["mean_seconds"])
    assert first.seconds * STEPS == pytest.approx(seconds, rel=0.05)
    assert first.compute > 0
    assert first.communication > DELAY_SECONDS / 2  # the other half, if the machine held it up as well
    late = Split(**profile["ranks"][1]["mean_seconds"])
    assert late.communication < first.communication
    assert late.other >= DELAY_SECONDS
    assert profile["tokens_per_second"] == pytest.approx(8 * 16 / profile["step_seconds"])
    assert profile["mfu"] == pytest.approx(
        profile["flops_per_step"] / profile["step_seconds"] / profile["peak_flops"]
    )
    for rank in (0, 1):
        events = json.loads((tmp_path / "profile" / f"trace-rank{rank}.json").read_text())["traceEvents"]
        reduced = sum(event.get("name") == "gloo:all_reduce" for event in events)
        assert reduced == STEPS + STEPS - 1  # gradients in the steps, losses between them
    memory = profile["ranks"][0]["memory"]
    assert max(memory["bytes"]) == memory["peak_bytes"] > 0

    page = pretrain_report.write_page(tmp_path / "profile").read_text()
    assert "data:image/png;base64," in page
    assert f"{profile['exposed_share']:.1%}" in page


@pytest.mark.extended
def test_stages_that_wait_for_each_other_have_a_bubble(tmp_path: Path) -> None:
    plan = "pp=2,schedule=naive,microbatches=2"
    ranks.run(2, "tests.models.pretrain.test_profiling:profiled", plan, str(tmp_path), 0)
    profile = json.loads((tmp_path / "profile" / profiling.NAME).read_text())
    assert profile["bubble_share"] > 0
    waiting = Split(**profile["ranks"][1]["mean_seconds"])
    assert waiting.bubble > DELAY_SECONDS / 2
    assert waiting.bubble > waiting.communication
