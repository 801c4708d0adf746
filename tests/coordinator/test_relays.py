"""Runs with relays: the same model as without, what each relay passes on, and rounds in which too few of them can."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments import experiment
from strategies import presets
from strategies.relays import add_relays
from tests.coordinator.test_engine import everyone, fleet_of, silent
from tests.support import runs
from tests.support.federation import PARAMS, run_plan
from tests.support.long import extended
from tests.support.memory_fleet import honest


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "scaffold", "fednova", "feddyn"])
def test_a_run_with_relays_ends_in_the_bits_of_one_without(name: str) -> None:
    flat = run_plan(name, rounds=3, clients_per_round=7, over_select=1.3)
    relayed = replace(flat, strategy=add_relays(flat.strategy, 3))
    (last, _), (other, seen) = runs.run(flat, everyone(12)), runs.run(relayed, everyone(12))
    assert runs.bits(other) == runs.bits(last)
    assert [each["relay"] for each in seen.of("relay_folded")] == [0, 1, 2] * 3
    assert sum(each["updates"] for each in seen.of("relay_folded")) == 3 * 7


def test_a_round_in_which_too_few_relays_have_enough_updates_leaves_the_model_unchanged_and_says_so() -> None:
    strategy = add_relays(presets.get("median", malicious=1), 3, 1)
    plan = replace(run_plan(rounds=1, clients_per_round=12), strategy=strategy)
    answers = [honest(1.0)] * 12
    answers[0] = answers[1] = silent
    last, seen = runs.run(plan, fleet_of(*answers))
    assert (last.params["w"] == PARAMS["w"]).all()
    assert seen.records[0].accepted == 0
    words = "2 of 3 relays have the 3 updates that the rule needs; expected 3 such relays"
    assert seen.of("relays_incomplete") == [{"event": "relays_incomplete", "round": 1, "words": words}]
    assert not seen.of("quorum_missed") and not seen.of("relay_folded")


def test_runs_on_devices_have_relays_if_these_know_what_to_fold() -> None:
    document = {"data": {"dataset": "digits"}, "federation": {"relays": 2, "clients_per_round": 8}}
    assert experiment.check(document, "devices")[1] == []
    for name in ("fednova", "qfedavg"):
        _, problems = experiment.check(document | {"strategy": {"name": name}}, "devices")
        why = f"{name} weighs updates by figures that relays on other machines do not pass on"
        assert problems == [f"federation.relays = 2: {why}; leave it out, or take another strategy"]
        assert experiment.check(document | {"strategy": {"name": name}}, "simulation")[1] == []


def simulate(out: Path, **changed: Any) -> dict[str, Any]:
    """A small simulation; `changed`: keys of its tables."""
    document: dict[str, Any] = {
        "data": {"partition": "iid"},
        "model": {"name": "mlp"},
        "federation": {"clients": 40, "clients_per_round": 37, "rounds": 3, "runtimes": {"torch": 1}},
        "local": {"epochs": 1, "lr": 0.1},
        "strategy": {"name": "scaffold"},
        "simulation": {"workers": 2, "local_baseline": "off"},
    }
    document |= {table: document[table] | keys for table, keys in changed.items()}
    return fedloop.simulate(document, out=out).report


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", *extended("scaffold")])
def test_a_simulation_with_relays_ends_in_the_bits_of_one_without(tmp_path: Path, name: str) -> None:
    """Clients of FedAvg train as one computation, and which ones train together shows in the last bits."""
    flat = simulate(tmp_path / "flat", strategy={"name": name})
    relayed = simulate(tmp_path / "relays", strategy={"name": name}, federation={"relays": 4})
    assert relayed["final"]["model_sha256"] == flat["final"]["model_sha256"]
    events = [json.loads(line) for line in (tmp_path / "relays" / "events.jsonl").read_text().splitlines()]
    folded = [each["updates"] for each in events if each["event"] == "relay_folded"]
    assert folded == [9, 9, 9, 10] * 3


@pytest.mark.slow
def test_sites_too_few_for_the_relays_are_refused_once_the_data_is_known(tmp_path: Path) -> None:
    rows = ["a,b,label,site", *(f"{n},{n % 7},{n % 2},s{n % 5}" for n in range(100))]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    document = {
        "data": {"path": str(tmp_path / "rows.csv"), "dataset": "csv", "label": "label", "site": "site"},
        "model": {"name": "logreg"},
        "federation": {"relays": 3, "runtimes": {"torch": 1}},
        "strategy": {"name": "median"},
    }
    with pytest.raises(
        UserError, match=r"federation.relays = 3 leaves 1 of federation.clients_per_round = 5 to a relay"
    ):
        fedloop.simulate(document, out=tmp_path / "run")
