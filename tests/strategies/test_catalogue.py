"""The catalogue of strategies: complete, true, and what the documentation prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from coordinator.experiments.schema import Runtime
from strategies import catalogue, presets
from strategies.codes import known
from tests.support.cli import assert_refused, run_here
from tests.support.strategies_table import TABLES, with_table


@pytest.mark.parametrize(
    ("path", "rows"), zip(TABLES, (2 * len(presets.ALGORITHMS), len(known.CODES)), strict=True)
)
def test_a_documented_table_is_that_of_the_code(path: Path, rows: int) -> None:
    page = path.read_text("utf-8")
    assert page == with_table(path), "run: python -m tests.support.strategies_table"
    assert page.partition(f"<!-- /{TABLES[path][0]} -->")[0].count("\n| `") == rows


@pytest.mark.parametrize("name", known.CODES)
def test_every_code_has_a_meaning_and_a_paper(name: str) -> None:
    described = catalogue.describe_code(name)
    assert len(described.meaning) > 10 and described.options == known.OPTIONS[name]
    assert described.paper[1].startswith("https://arxiv.org/abs/")


@pytest.mark.parametrize("name", presets.ALGORITHMS)
def test_every_strategy_has_a_meaning_a_paper_and_options(name: str) -> None:
    described = catalogue.describe(name)
    assert len(described.meaning) > 10
    assert described.paper[1].startswith("https://arxiv.org/abs/")
    assert described.options == presets.OPTIONS[name]
    assert described.fewest_updates >= 3 or not presets.is_robust(name)


def test_the_runtimes_are_those_of_an_experiment() -> None:
    assert get_args(Runtime) == catalogue.RUNTIMES


def test_every_paper_is_cited() -> None:
    described = [*catalogue.describe_all(), *catalogue.describe_codes()]
    assert {each.cited for each in described} == set(catalogue.PAPERS)


@pytest.mark.parametrize(
    ("name", "updates", "expected"),
    [
        ("krum", 10, 4),
        ("krum", 9, 4),
        ("bulyan", 10, 1),
        ("bulyan", 11, 2),
        ("bulyan", 2, 0),
        ("fedavg", 10, 0),
    ],
)
def test_how_many_malicious_updates_are_borne(name: str, updates: int, expected: int) -> None:
    assert presets.tolerated(name, updates) == expected


def test_the_command_lists_all_and_shows_one() -> None:
    listed = json.loads(run_here("strategies", "--json").stdout)
    assert [each["name"] for each in listed] == [*presets.ALGORITHMS, *known.CODES]
    one = json.loads(run_here("strategies", "bulyan", "--json").stdout)
    assert one == next(each for each in listed if each["name"] == "bulyan")
    assert (one["modes"], one["malicious"]) == (["sync"], "f of 4f + 3")
    assert one["options"]["malicious"] == {
        "default": 1,
        "expected": "a whole number >= 0",
        "meaning": "malicious updates in a round that it bears",
    }
    shown = run_here("strategies", "fedprox").stdout
    assert "Li 2020, Algorithm 2" in shown and "strategy.mu" in shown and ">= 0" in shown
    everything = run_here("strategies").stdout
    assert (
        "FedAvg with a proximal term" in everything
        and "one bit a value after a random rotation" in everything
    )


def test_the_command_shows_a_code() -> None:
    one = json.loads(run_here("strategies", "qsgd", "--json").stdout)
    assert (one["kind"], one["modes"], one["error_feedback"]) == ("code", ["sync", "async"], False)
    assert one["options"]["bits"]["expected"] == "one of 2, 4, 8"
    assert "uplink.share" in run_here("strategies", "topk").stdout
    assert "no options" in run_here("strategies", "sign").stdout


def test_an_unknown_strategy_is_answered_with_the_nearest() -> None:
    assert_refused(run_here("strategies", "multi-krum"), "did you mean 'multi_krum'")
