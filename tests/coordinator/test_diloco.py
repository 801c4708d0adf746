"""AdamW on clients and DiLoCo in simulations: what the defaults are, what resumes, what it gains, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments import experiment as experiments
from coordinator.runs import simulation


def document(seed: int = 1, rounds: int = 3, **changed: Any) -> dict[str, Any]:
    """Few rounds of many steps on label-skewed digits."""
    return {
        "seed": seed,
        "data": {"dataset": "digits", "partition": "dirichlet(0.5)"},
        "model": {"name": "mlp", "hidden": [32]},
        "federation": {"clients": 5, "clients_per_round": 5, "rounds": rounds},
        "local": {"steps": 40, "batch_size": 32, "lr": 0.02},
        "strategy": {"name": "diloco"},
        "simulation": {"workers": 1, "local_baseline": "off"},
    } | changed


def resolved(**changed: Any) -> Any:
    return experiments.resolve(document(**changed), "experiment")


def test_diloco_sets_the_clients_to_adamw_with_kept_moments() -> None:
    found = resolved(local={"steps": 40})
    local = found.local.model_dump(
        exclude_none=True, exclude={"batch_size", "steps", "momentum", "clip_grad_norm"}
    )
    assert local == {
        "optimizer": "adamw",
        "lr": 0.001,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "keep_moments": True,
    }
    assert found.federation.runtimes == {"torch": 1.0}
    assert found.simulation.engine == "pool"
    assert found.strategy.options["server_lr"] == 0.7
    assert found.strategy.options["nesterov"] is True


def test_adamw_under_another_strategy_begins_afresh_in_each_round() -> None:
    local = resolved(strategy={"name": "fedavg"}, local={"optimizer": "adamw"}).local
    assert (local.keep_moments, local.weight_decay, local.lr) == (False, 0.01, 0.001)


def test_sgd_under_diloco_has_no_options_of_adamw() -> None:
    local = resolved(local={"optimizer": "sgd"}).local
    assert (local.lr, local.beta1, local.keep_moments) == (0.05, None, None)


REFUSED = [
    ({"local": {"beta1": 0.8, "optimizer": "sgd"}}, "local.beta1 = 0.8 is for local.optimizer = \"adamw\""),
    ({"strategy": {"name": "fedavg"}, "local": {"keep_moments": True}}, "local.keep_moments = true is for"),
    ({"local": {"momentum": 0.9}}, "local.momentum = 0.9 is for local.optimizer = \"sgd\""),
    ({"local": {"optimizer": "adam"}}, "local.optimizer = 'adam': input should be 'sgd' or 'adamw'"),
    ({"local": {"beta2": 1.0}}, "local.beta2 = 1.0: input should be less than 1"),
    ({"federation": {"runtimes": {"litert": 1}}}, "federation.runtimes = {litert = …}: an artifact returns weights"),
    ({"federation": {"runtimes": {"tensorflow": 1}}}, "a TensorFlow client takes steps of SGD only"),
    ({"simulation": {"engine": "cuda"}}, "does not go with simulation.engine = \"cuda\""),
    ({"simulation": {"engine": "stacked"}}, "does not go with simulation.engine = \"stacked\""),
    ({"strategy": {"name": "scaffold"}, "local": {"optimizer": "adamw"}}, "local.optimizer = 'adamw' does not go with strategy.name = 'scaffold'"),
    ({"strategy": {"name": "fednova"}, "local": {"optimizer": "adamw"}}, "'fednova'"),
    ({"strategy": {"name": "qfedavg"}, "local": {"optimizer": "adamw"}}, "'qfedavg'"),
    ({"strategy": {"name": "fedsgd"}, "local": {"optimizer": "adamw"}}, "'fedsgd'"),
    ({"strategy": {"name": "ditto"}, "local": {"optimizer": "adamw", "keep_moments": True}}, "local.keep_moments = true does not go with strategy.name = 'ditto'"),
    ({"strategy": {"name": "fedbuff"}, "local": {"optimizer": "adamw", "keep_moments": True}}, "local.keep_moments = true does not go with federation.mode = \"async\""),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_does_not_go_with_adamw_is_refused_with_the_reason(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        resolved(**changed)
    assert message in str(caught.value)


@pytest.mark.slow
def test_in_few_rounds_diloco_learns_more_than_sgd(tmp_path: Path) -> None:
    """SGD at the best of the rates 0.2, 0.5 and 1."""
    for seed in (1, 2):
        sgd: dict[str, Any] = {
            "strategy": {"name": "fedavg"},
            "local": {"steps": 40, "batch_size": 32, "lr": 0.5},
        }
        plain = fedloop.simulate(document(seed, **sgd), out=tmp_path / f"sgd-{seed}").report["final"]
        final = fedloop.simulate(document(seed), out=tmp_path / f"diloco-{seed}").report["final"]
        assert final["test_loss"] < plain["test_loss"]
        assert final["test_accuracy"] > 0.8


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_moments_that_clients_kept(tmp_path: Path) -> None:
    whole = fedloop.simulate(document(rounds=3), out=tmp_path / "whole").report["final"]
    folder = tmp_path / "resumed"
    fedloop.simulate(document(rounds=2), out=folder)
    final = simulation.resume(folder, simulation.Environment(), ["federation.rounds=3"])["final"]
    assert final["model_sha256"] == whole["model_sha256"]

    afresh = document(rounds=3, local={"steps": 40, "batch_size": 32, "lr": 0.02, "keep_moments": False})
    other = fedloop.simulate(afresh, out=tmp_path / "afresh").report["final"]
    assert other["model_sha256"] != whole["model_sha256"]
