"""DP-SGD: clients whose steps hide single rows, and what they spend."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedloop
from coordinator import extras
from coordinator.errors import UserError
from coordinator.experiments import experiment
from coordinator.experiments.settings import apply_settings
from coordinator.privacy.audit import epsilon
from coordinator.privacy.rows import RowSpending, RowWork, find_hardest, find_row_noise
from coordinator.runs.privacy import plan as privacy
from coordinator.runs.privacy.by_clients import Sizes
from coordinator.workers.kernels.row_gradients import PrivateTrainer, require_row_gradients
from coordinator.workers.training import ClientTasks
from coordinator.workers.workspace_arrays import Workspace
from edge_client.train import schedule
from edge_client.train.private_trainer import PrivateRuntime
from edge_client.train.torch_trainer import read
from edge_client.train.trainer import TrainTask
from models import zoo
from strategies.params import Params
from strategies.privacy.noise.correlated import Participation
from tests.support.cli import options, report_of, run_cli
from tests.support.row_models import Linear, Mixing

SETS = [
    "data.partition=iid", "model.name=logreg", "federation.clients=6", "federation.clients_per_round=3", "federation.rounds=4",
    "simulation.workers=1", "local.epochs=1", "local.batch_size=20", "privacy.mechanism=example",
    "privacy.clip_norm=0.5", "privacy.noise_multiplier=1.2", "privacy.minimum_separation=2",
]  # fmt: skip


def simulate(out: Path, *sets: str) -> fedloop.Result:
    return fedloop.simulate(apply_settings({}, [*SETS, *sets]), out=out)


def spec(name: str, **options: Any) -> Any:
    tokens = name in ("charlm", "gpt", "lstm", "moe")
    return zoo.find(
        name,
        input_shape=(12,) if tokens else (3, 32, 32) if name.startswith("resnet") else (8, 8),
        classes=30 if tokens else 10,
        input_dtype="int32" if tokens else "float32",
        task="next_token" if tokens else "classification",
        **options,
    )


@pytest.mark.parametrize(
    ("name", "one_by_one"),
    [("mlp", False), ("mlp", True), ("charlm", False), ("lstm", True), ("gpt", True), ("resnet8", False)],
)
def test_the_gradients_of_rows_are_those_of_each_row_alone(name: str, one_by_one: bool) -> None:
    chosen = spec(name, **({"norm": "group"} if name == "resnet8" else {}))
    x, y = chosen.example_batch(3)
    runtime = PrivateRuntime(chosen.build(0), chosen.loss, 1.0, 1.0, one_by_one=one_by_one)
    plain = chosen.build(0)
    found = runtime.row_gradients(x, y)
    for row in range(3):
        loss = chosen.loss(plain(x[row : row + 1]), y[row : row + 1])
        weights = [each for each in plain.parameters() if each.requires_grad]
        for one, other in zip(found, torch.autograd.grad(loss, weights), strict=True):
            torch.testing.assert_close(one[row], other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "charlm", "gpt", "lstm", "moe"])
def test_models_of_the_catalog_have_gradients_of_rows(name: str) -> None:
    """Those that opacus does not differentiate all at once are differentiated row by row."""
    assert bool(require_row_gradients(spec(name))) == (name in ("gpt", "lstm", "moe"))


def test_statistics_of_rows_are_refused() -> None:
    with pytest.raises(UserError, match=r"normalise by statistics of training rows, which no noise hides"):
        require_row_gradients(spec("resnet8", norm="batch"))


def test_rows_that_depend_on_each_other_are_differentiated_alone() -> None:
    mixing = zoo.ModelSpec(
        "mixing", Mixing, (4,), 3, loss=zoo.spec.masked_cross_entropy
    )  # fmt: skip
    assert "not those of the rows alone" in require_row_gradients(mixing)


def train(x: np.ndarray, y: np.ndarray, noise_multiplier: float, seed: int = 3, **task: Any) -> Params:
    """What a client learns of a linear model with a clipping norm of 0.5."""
    module = Linear(x.shape[1])
    runtime = PrivateRuntime(module, nn.functional.cross_entropy, 0.5, noise_multiplier, one_by_one=False)
    wanted = TrainTask(seed, **({"batch_size": len(y), "lr": 1.0, "steps": 1} | task))
    nothing: Any = np.zeros(0, np.int64)
    data = Workspace(x, y, nothing, nothing, nothing, nothing, nothing)
    clients = ClientTasks(wanted, [""], [seed], [np.arange(len(y))])
    (result,) = PrivateTrainer(runtime).train(read(module), clients, data)
    assert result.update.train_loss == 0
    return dict(result.update.delta)


def test_a_step_is_the_mean_of_clipped_gradients_with_noise() -> None:
    rng = np.random.default_rng(5)
    x = (100 * rng.normal(size=(40, 600))).astype(np.float32)
    y = rng.integers(0, 2, 40)
    quiet, noised = train(x, y, 1e-6)["layer.weight"], train(x, y, 2.0)["layer.weight"]
    # Each row's gradient is (p - y) x, far longer than the norm.
    rows = [np.outer(0.5 - np.eye(2)[label], row) for row, label in zip(x, y, strict=True)]
    expected = -sum(0.5 * row / np.linalg.norm(row) for row in rows) / 40
    np.testing.assert_allclose(quiet, expected, atol=1e-6)
    assert (noised - quiet).std() == pytest.approx(2.0 * 0.5 / 40, rel=0.1)


def test_a_batch_without_rows_makes_a_step_of_noise() -> None:
    x, y = np.ones((50, 400), np.float32), np.zeros(50, np.int64)
    seeds = range(40)
    steps = [train(x, y, 1.0, seed, batch_size=1)["layer.weight"] for seed in seeds]
    empty = [
        not len(next(schedule.poisson_batches(50, 1, epochs=None, steps=1, rng=np.random.default_rng(seed))))
        for seed in seeds
    ]
    assert any(empty)
    for step, is_empty in zip(steps, empty, strict=True):
        assert step.std() == pytest.approx(0.5, rel=0.15)
        assert (abs(step[0].mean()) < 0.2) or not is_empty


@pytest.mark.parametrize(("claimed_multiplier", "is_refuted"), [(1.0, False), (3.0, True)])
def test_canaries_refute_a_claim_of_more_noise_than_steps_have(
    claimed_multiplier: float, is_refuted: bool
) -> None:
    """Each row alone moves one input's weights; whoever sees the model guesses which rows were there. Steinke 2023."""
    count, rng = 1000, np.random.default_rng(8)
    took_part = rng.random(count) < 0.5
    x = 100 * np.eye(count, dtype=np.float32)[took_part]
    moved = train(x, np.zeros(len(x), np.int64), 0.5)["layer.weight"]
    scores = moved[0] - moved[1]
    lower = epsilon.bound_from_scores(scores, took_part, 1e-5, epsilon.CONFIDENCE)
    claimed = RowSpending(claimed_multiplier, [RowWork(500, 500, 1)], Participation(1, 1), 1e-5).after(1)
    assert lower > 1
    assert (lower > claimed.epsilon) == is_refuted, (lower, claimed.epsilon)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 2**32))
def test_a_poisson_batch_has_each_row_once_at_most(rows: int, batch_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = list(schedule.poisson_batches(rows, batch_size, epochs=2, steps=None, rng=rng))
    assert len(batches) == schedule.count(rows, batch_size, epochs=2, steps=None)
    for each in batches:
        assert len(set(each.tolist())) == len(each)
        assert batch_size < rows or len(each) == rows


def test_poisson_batches_take_rows_independently() -> None:
    rng = np.random.default_rng(1)
    taken = np.zeros((4000, 10))
    for step, batch in enumerate(schedule.poisson_batches(10, 3, epochs=None, steps=4000, rng=rng)):
        taken[step, batch] = 1
    np.testing.assert_allclose(taken.mean(0), 0.3, atol=0.04)
    between = np.corrcoef(taken.T) - np.eye(10)
    assert np.abs(between).max() < 0.08


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8).filter(any), st.integers(1, 40))
def test_the_hardest_clients_include_whoever_spends_most(rows: list[int], batch_size: int) -> None:
    hardest = find_hardest(rows, batch_size, 2, None)
    for number in filter(None, rows):
        steps = schedule.count(number, batch_size, epochs=2, steps=None)
        own = RowWork(number, batch_size, steps)
        assert any(each.probability >= own.probability and each.steps >= own.steps for each in hardest)
    assert find_hardest(rows, batch_size, None, 7) == [RowWork(min(filter(None, rows)), batch_size, 7)]


@pytest.mark.slow
def test_epsilon_is_that_of_the_steps_of_the_client_that_spends_most() -> None:
    work = find_hardest([50, 100, 400], 20, 1, None)
    spent = RowSpending(1.2, work, Participation(4, 2), 1e-4)
    each = [
        fedloop.epsilon(
            noise_multiplier=1.2, rounds=2 * one.steps, cohort=20, clients=one.rows, delta=1e-4
        ).epsilon
        for one in work
    ]
    assert spent.after(4).epsilon == spent.after(3).epsilon == max(each)
    assert spent.after(2).epsilon < spent.after(4).epsilon
    assert spent.after(0).epsilon == 0
    assert "with and without any one row of any one client" in spent.after(4).in_words()
    noise = find_row_noise(spent, 3.0)
    assert 2.95 < RowSpending(noise, work, Participation(4, 2), 1e-4).after(4).epsilon <= 3.0


@pytest.mark.slow
def test_a_run_reports_what_was_foreseen_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole").report
    planned = privacy.foresee(experiment.load(None, SETS), 6, Sizes(**whole["privacy"]["sizes"]))
    assert [row["epsilon"] for row in whole["rounds"]] == planned["epsilon"]
    assert {row["train_loss"] for row in whole["rounds"]} == {None}
    assert whole["privacy"]["adjacency"] == "add_or_remove_row"
    out = tmp_path / "killed"
    done = run_cli("simulate", "--out", out, *options(SETS), env={"FEDLOOP_FAILPOINT": "privacy.charged:3"})
    assert done.returncode == -signal.SIGKILL
    assert run_cli("simulate", "--resume", out).returncode == 0
    assert report_of(out)["final"]["model_sha256"] == whole["final"]["model_sha256"]


@pytest.mark.slow
def test_the_noise_reaches_the_model(tmp_path: Path) -> None:
    """Of one step of one client, whose gradients are of no account beside the noise."""
    sets = [each for each in SETS if "epochs" not in each and "noise" not in each]
    sets += ["federation.rounds=1", "federation.clients_per_round=1", "local.steps=1"]
    sets += ["privacy.noise_multiplier=20", "privacy.clip_norm=1e-6"]
    moved, start = (
        fedloop.simulate(apply_settings({}, [*sets, f"local.lr={lr}"]), out=tmp_path / lr).params
        for lr in ("1e6", "1e-9")
    )
    noise = np.concatenate([(moved[name] - start[name]).ravel() for name in moved])
    assert noise.std() == pytest.approx(20 / 20, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["federation.runtimes={ litert = 1 }"], "federation.runtimes asks for litert"),
        (["simulation.engine=stacked"], 'simulation.engine = "stacked" does not go with'),
        (["strategy.name=scaffold"], "its clients do more with their rows than take steps"),
        (["strategy.name=fedsgd"], "its clients do more with their rows than take steps"),
        (["privacy.sampling=poisson"], "privacy.sampling = 'poisson' does not go with"),
        (["privacy.clipping=adaptive"], "how long their gradients are"),
        (["privacy.secure_aggregation=true"], "does not go with privacy.mechanism = 'example'"),
        (["federation.mode=async"], "federation.mode = 'async' does not go with"),
        (["federation.keep=best"], "federation.keep = 'best' does not go with"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        experiment.load(None, [*SETS, *settings])
    assert words in str(caught.value)


def test_clients_train_in_pytorch_one_by_one_by_default() -> None:
    loaded = experiment.load(None, [*SETS, "strategy.name=median", "strategy.malicious=1"])
    assert dict(loaded.federation.runtimes) == {"torch": 1.0}
    assert loaded.simulation.engine == "pool"


def test_too_large_a_delta_for_the_rows_of_a_client_is_refused() -> None:
    with pytest.raises(UserError, match=r"privacy\.delta = 0\.01 is not below one over the number of rows"):
        privacy.foresee(experiment.load(None, [*SETS, "privacy.delta=0.01"]), 6, Sizes(1, (200,)))


def test_a_lacking_opacus_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    known = extras.installed_version
    monkeypatch.setattr(extras, "installed_version", lambda name: None if name == "opacus" else known(name))
    (problem,) = extras.problems_with(["torch"], "example")
    assert "needs opacus, not installed here; pip install 'fedloop[privacy]'" in problem
    assert extras.problems_with(["torch"], "central") == []
