"""Simulations in which each client has a model of its own: what the report says, what resumes, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedloop
from coordinator.commands import summaries
from coordinator.errors import UserError
from coordinator.experiments import experiment as experiments
from coordinator.experiments.personalisation import LOCAL_STRATEGIES
from coordinator.on_flower.possible import require_possible
from coordinator.runs import simulation
from edge_client.wire import arrays
from strategies import presets
from strategies.personalisation import LocalRule

PERSONAL = ("fedper", "fedrep", "ditto")


def document(strategy: str, rounds: int = 4, **changed: Any) -> dict[str, Any]:
    """Label-skewed digits: each client has rows of two classes or three, in training as in its held-out rows."""
    return {
        "seed": 3,
        "data": {"dataset": "digits", "partition": "dirichlet(0.1)"},
        "model": {"name": "mlp", "hidden": [16]},
        "federation": {"clients": 8, "clients_per_round": 6, "rounds": rounds, "runtimes": {"torch": 1}},
        "local": {"epochs": 1, "lr": 0.1},
        "strategy": {"name": strategy, **({"head_epochs": 2} if strategy == "fedrep" else {})},
        "simulation": {"workers": 1, "local_baseline": "off"},
    } | changed


def run(out: Path, strategy: str, rounds: int = 4) -> dict[str, Any]:
    report: dict[str, Any] = fedloop.simulate(document(strategy, rounds), out=out).report
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: run(folder / name, name) for name in ("fedavg", *PERSONAL)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PERSONAL)
def test_where_labels_are_skewed_own_models_beat_the_global_one_of_fedavg(
    reports: dict[str, dict[str, Any]], name: str
) -> None:
    shared, own = reports["fedavg"]["final"], reports[name]["final"]
    assert own["personalised_accuracy"] > shared["test_accuracy"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", PERSONAL)
def test_the_report_has_both_accuracies_of_each_client(reports: dict[str, dict[str, Any]], name: str) -> None:
    report, clients = reports[name], reports[name]["per_client"]
    rows = sum(each["test_rows"] for each in clients.values())
    assert rows == report["final"]["test_rows"]
    for key in ("test_accuracy", "personalised_accuracy"):
        mean = sum(each[key] * each["test_rows"] for each in clients.values()) / rows
        assert mean == pytest.approx(report["final"][key])
    local = [] if name == "ditto" else ["fc.weight", "fc.bias"]
    assert report["personalised"] == {"local_tensors": local, "clients": 8}
    summary = summaries.run_summary(report, None)
    assert "each client's own model: test accuracy 0." in summary
    assert ("as at the start in the global model: fc.weight, fc.bias" in summary) == (name != "ditto")


@pytest.mark.slow
def test_local_tensors_are_not_sent(reports: dict[str, dict[str, Any]]) -> None:
    head = 4 * (16 * 10 + 10)
    for name in ("fedper", "fedrep"):
        saved = reports["fedavg"]["bytes_up"] - reports[name]["bytes_up"]
        assert saved > 4 * 6 * head
    assert reports["ditto"]["bytes_up"] == reports["fedavg"]["bytes_up"]


@pytest.mark.slow
def test_local_tensors_survive_in_the_checkpoint(tmp_path: Path, reports: dict[str, dict[str, Any]]) -> None:
    run(tmp_path / "run", "fedrep", rounds=2)
    resumed = simulation.resume(tmp_path / "run", simulation.Environment(), ["federation.rounds=4"])
    for part in ("final", "per_client", "personalised"):
        assert resumed[part] == reports["fedrep"][part]
    checkpoint = json.loads((tmp_path / "run" / "checkpoint" / "checkpoint.json").read_text())
    for digest in checkpoint["clients"].values():
        kept = arrays.decode((tmp_path / "run" / "checkpoint" / "blobs" / digest).read_bytes())
        assert set(kept) == {"local/fc.weight", "local/fc.bias"}


@pytest.mark.slow
@pytest.mark.extended
def test_a_model_without_norms_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"strategy.local: .* no trained tensor matches; there are hidden.0.weight"
    ):
        fedloop.simulate(document("fedbn"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("strategy", "changed", "reason"),
    [
        ("fedper", {"federation.keep": "best"}, "clients keep what they trained last"),
        ("ditto", {"federation.keep": "best"}, "clients keep what they trained last"),
        ("fedrep", {"federation.early_stop": 2}, "local tensors are never trained"),
        ("fedbn", {"federation.mode": "async"}, "all clients start from the same model"),
        ("ditto", {"federation.mode": "async"}, "all clients start from the same model"),
        ("ditto", {"simulation.engine": "stacked"}, "asks each for a model of its own"),
        (
            "fedper",
            {"simulation.attack": {"name": "ipm", "clients": 1}},
            "its success is measured on the global model",
        ),
        ("fedrep", {"simulation.stragglers": {"share": 0.5}}, "would do all of strategy.head_epochs"),
        ("fedper", {"model.register": "digits"}, "it is no model to use or to register"),
        ("fedper", {"strategy.local": "fc.*"}, "expected a list of patterns"),
        ("fedper", {"strategy.local": []}, "expected a list of patterns"),
    ],
)
def test_combinations_that_make_no_sense_are_refused_with_the_reason(
    strategy: str, changed: dict[str, Any], reason: str
) -> None:
    raw = document(strategy)
    for key, value in changed.items():
        table, inner = key.split(".")
        raw[table] = {**raw[table], inner: value}
    with pytest.raises(UserError, match=reason):
        experiments.resolve(raw, "test")


def test_the_global_models_that_are_none_to_use_are_those_of_strategies_with_local_tensors() -> None:
    found = [name for name in presets.ALGORITHMS if isinstance(presets.client_rule(name), LocalRule)]
    assert found == [*LOCAL_STRATEGIES]


@pytest.mark.parametrize("name", [*PERSONAL, "fedbn"])
def test_own_models_are_refused_on_flower(name: str) -> None:
    raw = document(name)
    del raw["simulation"]["workers"]
    with pytest.raises(UserError, match=f"strategy.name = '{name}': a node keeps nothing"):
        require_possible(experiments.resolve(raw, "test"))
