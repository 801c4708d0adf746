"""A search tries pipelines from the least change on, trains the promising ones in full, and chooses by what holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models import zoo
from models.compress import pipeline, report
from models.compress.ladder import Candidate, ladder
from models.compress.micro_interpreter import MicroModel
from models.compress.pipeline import PlannedStep
from models.compress.quantization import quantize
from models.compress.search import Budget, Outcome, Search, choose, lower_bound, steps_of
from models.compress.step import StepModel
from tests.support.compressing import cnn, digits

STATIC = {"kind": "quantize", "precision": "static-int8", "max_accuracy_drop": 1.0}
FOLD = {"kind": "fold", "show_operators": False}
HALF = {"kind": "structured", "ratio": 0.5, "rounds": 1, "epochs": 5}


def outcome(name: str, accuracy: float, size: int, memory: int = 8_000, latency: float = 10.0) -> Outcome:
    return Outcome(
        name, (STATIC,), "full", "cnn", "static-int8", accuracy, size, memory, "tflite-micro", latency, b""
    )


def test_the_ladder_goes_from_the_model_itself_to_narrow_students() -> None:
    spec = zoo.get("resnet8", input_shape=(8, 8), classes=10, norm="batch")
    found = {candidate.name: candidate for candidate in ladder(spec)}
    assert list(found) == [
        "float32", "dynamic-int8", "static-int8", "fold", "structured-25", "structured-50", "structured-75",
        "distil-half", "distil-half-structured-50", "distil-quarter",
    ]  # fmt: skip
    assert found["distil-quarter"].steps[0]["student"] == "resnet8(norm='batch', width=4)"
    assert not found["fold"].trains
    assert found["structured-50"].trains
    few, many = found["structured-50"].short()[0]["epochs"], found["structured-50"].steps[0]["epochs"]
    assert 1 <= few < many


def test_a_model_that_no_device_can_run_is_distilled_in_any_case() -> None:
    spec = zoo.get("gpt", input_shape=(8,), classes=20, input_dtype="int32", task="next_token", width=16)
    names = [candidate.name for candidate in ladder(spec, "charlm(width=16)")]
    assert names == ["distil", "distil-structured-50", "distil-half", "distil-quarter"]


def test_options_of_a_kind_are_those_of_all_its_steps() -> None:
    spec = zoo.get("cnn", input_shape=(8, 8), classes=10)
    steps = [step for each in ladder(spec, sets={"structured": {"epochs": 40}}) for step in each.steps]
    assert {step["epochs"] for step in steps if step["kind"] == "structured"} == {40}


def test_the_smallest_within_a_standard_error_of_the_best_that_fits_is_chosen() -> None:
    tried = [
        outcome("large", 0.99, 90_000),
        outcome("good", 0.97, 30_000),
        outcome("alike", 0.965, 20_000),
        outcome("worse", 0.93, 5_000),
    ]
    chosen = choose(tried, Budget(size_bytes=50_000, accuracy=0.9), 200)
    assert chosen is not None
    assert chosen.name == "alike"  # 0.97 has a standard error of 0.012 on 200 rows; worse is beyond it
    assert choose(tried, Budget(size_bytes=50_000, accuracy=0.98), 200) is None


def test_a_perfect_score_on_few_rows_is_no_certainty() -> None:
    tried = [outcome("large", 1.0, 90_000), outcome("alike", 0.995, 20_000), outcome("worse", 0.98, 5_000)]
    chosen = choose(tried, Budget(), 200)
    assert chosen is not None and chosen.name == "alike"  # one row of 200, and four are too many
    for rows in (20, 200, 359, 10_000):  # one row fewer is no difference, three are
        assert 1 - 3 / rows < lower_bound(1.0, rows) < 1 - 1 / rows
    assert lower_bound(0.9, 10**6) == pytest.approx(0.9 - 0.0003, abs=1e-6)


def test_an_exceeded_bound_is_reported_as_a_share_of_it() -> None:
    budget = Budget(memory_bytes=4_000, size_bytes=10_000, latency_us=20.0, accuracy=0.95)
    missed = budget.missed(outcome("", 0.76, 15_000))
    assert missed == pytest.approx({"memory": 1.0, "size": 0.5, "accuracy": 0.2})
    assert not Budget().missed(outcome("", 0.1, 10**9, 10**9, 1e9))


def test_the_front_is_what_no_other_one_beats_in_everything() -> None:
    tried = [outcome("a", 0.9, 100), outcome("b", 0.9, 90), outcome("c", 0.95, 200), outcome("d", 0.8, 200)]
    assert report.pareto_front([each.costs for each in tried]) == [1, 2]
    same = [outcome("a", 0.9, 100), outcome("same", 0.9, 100)]
    assert report.pareto_front([each.costs for each in same]) == [0, 1]


@pytest.mark.slow
@pytest.mark.extended
def test_a_candidate_that_fails_is_named_and_the_others_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Candidate("broken", (STATIC,))
    fine = Candidate("fine", ({"kind": "quantize", "precision": "float32"},))

    def planned(steps: object, where: str) -> list[PlannedStep]:
        return [PlannedStep("step", None, fails if where == "broken" else passes)]

    def fails(*given: object) -> StepModel:
        raise KeyError("a library's own")

    def passes(model: StepModel, *given: object) -> StepModel:
        return replace(model, tflite=quantize.to_tflite(model.module, model.spec))

    monkeypatch.setattr(pipeline, "plan_steps", planned)
    search = Search(cnn(), digits(), tmp_path, 0, Budget(), lambda line: None)
    found = search.run([broken, fine])

    assert [each.name for each in found.outcomes] == ["fine"]
    assert [(each.name, each.reason) for each in found.refused] == [
        ("broken", """failed with KeyError: "a library's own\"""")
    ]
    with pytest.raises(KeyError):
        Search(cnn(), digits(), tmp_path / "all", 0, Budget(), lambda line: None).run([broken])


@pytest.mark.extended
@pytest.mark.slow
def test_candidates_share_steps_and_a_second_search_runs_none_again(tmp_path: Path) -> None:
    lines: list[Mapping[str, Any]] = []
    budget = Budget(memory_bytes=64_000, accuracy=0.9)
    candidates = [
        Candidate("refused", ({"kind": "micro", "arena_bytes": 100},)),
        Candidate("static", (STATIC,)),
        Candidate("half", (HALF, STATIC)),
        Candidate("half-fold", (HALF, FOLD, STATIC)),
    ]
    found = Search(cnn(), digits(), tmp_path, 3, budget, lines.append).run(candidates)

    def steps(stage: str) -> list[Any]:
        return [line for line in lines if line.get("stage") == stage and "pipeline_step" in line]

    trained = [line for line in steps("compress") if line["kind"] == "structured" and len(line) == 4]
    assert len(trained) == 2  # one short, shared by two, and one in full
    assert sum(line["kind"] == "source" for line in steps("compress")) == 1
    assert [(each.name, "arena needs" in each.reason) for each in found.refused] == [("refused", True)]
    rungs = {each.name: each.rung for each in found.outcomes}
    assert rungs["static"] == "full"
    assert sorted((rungs["half"], rungs["half-fold"])) == ["full", "short"]
    chosen = found.chosen
    assert chosen is not None
    MicroModel(chosen.tflite, chosen.memory_bytes)
    last = steps_of(chosen, budget)[-1]
    assert (last["kind"], last["arena_bytes"]) == ("micro", 64_000)

    lines.clear()
    again = Search(cnn(), digits(), tmp_path, 3, Budget(size_bytes=1), lines.append).run(candidates[1:])

    assert not steps("compress")
    assert again.chosen is None
    assert again.nearest is not None
    assert again.nearest.size_bytes == min(each.size_bytes for each in again.outcomes)
