"""Attacks of the privacy audit: what they find in plain updates, and that they find nothing where a defence works."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import UserError
from coordinator.experiments.privacy.section import Privacy
from coordinator.privacy.audit import canaries, epsilon, mechanism, membership, natural, similarity
from coordinator.privacy.audit.defences import PLAIN, Defences, Overrides, View, observe, of_experiment, views
from coordinator.privacy.audit.similarity import Measure
from coordinator.workers.audit import inversion
from edge_client.data.examples import Examples
from edge_client.train import torch_trainer
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire.preprocessing import TextSchema
from edge_client.wire.schema import ColumnSchema, DataSchema
from models import datasets, zoo
from strategies.params import Params
from strategies.privacy.central import CentralNoise
from strategies.update import Update

CLIP_NORM = 0.5
SUM_OF_16 = View("secure aggregation", group_size=16)
NOISED = View("local noise", clips=True, noise=1.0)
DENSE = ["logreg", "mlp"]


@cache
def digits() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    data = datasets.load("digits", seed=0)
    return np.asarray(data.x, np.float32), np.asarray(data.y, np.int32)


@cache
def model(name: str) -> tuple[Any, torch_trainer.TorchRuntime, Params]:
    spec = zoo.get(name, input_shape=(8, 8), classes=10)
    module = spec.build(1)
    return spec, torch_trainer.TorchRuntime(module, spec.loss), torch_trainer.read(module)


def update_of_row(name: str, row: int) -> Update:
    """What a client sends after one SGD step on one digit."""
    (x, y), (_, runtime, params) = digits(), model(name)
    rows = Examples(x[row : row + 1], y[row : row + 1])
    return Trainer(runtime).train(params, TrainTask(0, 8, 0.1, steps=1), rows).update


def attack(name: str, view: View) -> tuple[list[similarity.Match], list[list[int]]]:
    """Attacks on the digits 0 to 2, each in a sum with those that follow it if the view is of a sum."""
    (x, _), (spec, _, params) = digits(), model(name)
    measure, rng, matches, labels = Measure.of(x), np.random.default_rng(0), [], []
    known = inversion.Known(
        params,
        np.zeros((8, 8), np.float32),
        np.ones((8, 8), np.float32),
        4 if view.group_size > 1 else 1,
        100,
        0,
    )
    for row in range(3 if view.group_size == 1 else 1):
        updates = [update_of_row(name, row + at) for at in range(view.group_size)]
        found = inversion.invert(spec, known, observe(view, updates, CLIP_NORM, rng))
        assert found.rows is not None
        behind = x[row : row + view.group_size]
        matches.append(similarity.match(measure, found.rows, behind, x[100:164], rng))
        labels.append(found.labels)
    return matches, labels


@pytest.mark.parametrize("name", [*DENSE, pytest.param("cnn", marks=pytest.mark.slow)])
def test_plain_updates_of_single_digits_are_inverted(name: str) -> None:
    matches, labels = attack(name, PLAIN)
    # Measured: 1.000 from dense layers, whose inversion is exact, and 0.998 or more by optimisation.
    assert min(each.similarity for each in matches) > (0.95 if name == "cnn" else 0.999)
    assert max(each.guess for each in matches) < 0.9
    assert labels == [[int(label)] for label in digits()[1][:3]]


@pytest.mark.parametrize("view", [SUM_OF_16, NOISED], ids=["sum of 16", "noised"])
@pytest.mark.parametrize("name", [*DENSE, pytest.param("cnn", marks=pytest.mark.extended)])
def test_defended_updates_tell_no_more_of_digits_than_guessing(name: str, view: View) -> None:
    matches, _ = attack(name, view)
    assert np.mean([similarity.leaked(each.similarity, each.guess) for each in matches]) < 0.25


def test_clipping_alone_hides_nothing() -> None:
    matches, _ = attack("mlp", View("clipped", clips=True))
    assert min(each.similarity for each in matches) > 0.999


def test_an_embedding_tells_which_tokens_occurred() -> None:
    spec = zoo.get("charlm", input_shape=(8,), classes=30)
    module = spec.build(1)
    params = torch_trainer.read(module)
    rng = np.random.default_rng(0)
    rows = Examples(
        rng.integers(0, 30, (1, 8)).astype(np.int32), rng.integers(0, 30, (1, 8)).astype(np.int32)
    )
    runtime = torch_trainer.TorchRuntime(module, spec.loss)
    update = Trainer(runtime).train(params, TrainTask(0, 8, 0.1, steps=1), rows).update
    known = inversion.Known(params, np.zeros(0, np.float32), np.zeros(0, np.float32), 1, 1, 0)
    occurred = np.unique(rows.x).tolist()
    plain, noised = (
        inversion.invert(spec, known, observe(view, [update], CLIP_NORM, rng)) for view in (PLAIN, NOISED)
    )
    assert plain.tokens is not None and noised.tokens is not None
    assert similarity.token_score(plain.tokens, occurred) == (1.0, occurred)
    assert similarity.token_score(noised.tokens, occurred)[0] == 0.5


def test_labels_of_many_rows_are_dealt_out_in_proportion() -> None:
    bias = np.array([0.6, -0.1, 0.3, -0.8], np.float32)
    assert inversion.recover_labels(bias, 6) == [0, 0, 0, 0, 2, 2]
    assert inversion.recover_labels(None, 6) == []


def test_who_adds_noise_decides_what_the_coordinator_sees() -> None:
    central, local = (
        views(Defences(1, CLIP_NORM, 1.0, where), cohort=10, clients=20) for where in ("central", "local")
    )
    assert [(each.group_size, each.noise) for each in central] == [(1, 0.0), (1, 0.0), (10, 1.0)]
    assert [(each.group_size, each.noise) for each in local] == [(1, 0.0), (1, 1.0)]
    together = views(Defences(8, CLIP_NORM, 1.0, "central"), cohort=10, clients=20)
    assert [(each.group_size, each.noise) for each in together] == [(1, 0.0), (8, 0.0), (10, 1.0)]


def test_noise_without_a_clip_norm_is_refused() -> None:
    with pytest.raises(UserError, match="--clip-norm"):
        of_experiment(Privacy(), None, Overrides(noise_multiplier=1.0))


def test_options_replace_what_the_experiment_says() -> None:
    table = Privacy(clip_norm=0.5, secure_aggregation=True, group_size=8)
    assert of_experiment(table, 2.0, Overrides()) == Defences(8, 0.5, 2.0)
    assert of_experiment(table, 2.0, Overrides(4, 1.0, 0.0)) == Defences(4, 1.0, 0.0)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(8, 8), (3, 5, 9), (2, 3)]))
def test_only_equal_images_have_the_ssim_1(seed: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    one, other = (rng.random(shape).astype(np.float32) for _ in range(2))
    same, different = similarity.ssim(one, np.stack([one, other]), 1.0)
    assert same == pytest.approx(1.0)
    assert different < 0.95
    assert similarity.ssim(other, one[None], 1.0)[0] == pytest.approx(different)


def test_the_mean_row_of_a_table_is_similar_to_no_row() -> None:
    rows = np.random.default_rng(0).normal(5, 2, (40, 6)).astype(np.float32)
    measure = Measure.of(rows)
    assert measure.name == "cosine"
    assert measure.compare(rows[0], rows[:1])[0] == pytest.approx(1.0)
    assert not measure.compare(rows.mean(axis=0), rows).any()


def test_rows_are_shown_in_their_own_columns_and_units() -> None:
    schema = DataSchema(
        kind="table",
        input_shape=(5,),
        input_dtype="float32",
        columns=(
            ColumnSchema("age", unit="years", mean=50.0, deviation=10.0),
            ColumnSchema("sex", "category", categories=("f", "m"), other=True),
            ColumnSchema("seen", "date", mean=19_000.0, deviation=100.0),
        ),
        scale="federated",
    )
    row = np.array([1.5, 0, 1, 0, 0.5], np.float32)
    assert natural.natural_row(row, schema) == {"age": "65 years", "sex": "m", "seen": "2022-02-27"}


def test_tokens_are_shown_as_text() -> None:
    text = TextSchema("characters", "next_token", ("\n", " ", "a", "b"))
    schema = DataSchema(kind="text", input_shape=(4,), input_dtype="int32", text=text)
    assert natural.natural_tokens([0, 1, 2], schema) == ["'\\n'", "' '", "a"]
    assert natural.natural_tokens([7], None) == ["7"]


def test_losses_tell_members_only_if_they_differ() -> None:
    rng = np.random.default_rng(0)
    same = membership.judge(rng.exponential(1, 2000), rng.exponential(1, 1000))
    smaller = membership.judge(rng.exponential(0.5, 2000), rng.exponential(1, 1000))
    assert not same.is_seen and abs(same.auc - 0.5) < same.auc_margin
    # P[Exp(2) < Exp(1)] = 2 / 3
    assert smaller.is_seen and smaller.auc == pytest.approx(2 / 3, abs=0.03)
    perfect = membership.judge(np.zeros(10), np.ones(10))
    assert (perfect.auc, perfect.advantage, perfect.low_rate_tpr) == (1.0, 1.0, 1.0)
    constant = membership.judge(np.ones(10), np.ones(10))
    assert (constant.auc, constant.advantage, constant.low_rate_tpr) == (0.5, 0.0, 0.0)


def test_the_bound_holds_as_often_as_stated_for_randomised_response() -> None:
    """Randomised response is the worst (epsilon, 0)-private mechanism: at most 5 % of audits may exceed it."""
    rng, claimed = np.random.default_rng(0), 1.0
    truth = 1 / (1 + math.exp(-claimed))
    bounds = np.array([epsilon.lower_bound(500, 500, int(rng.binomial(500, truth)), 0.0) for _ in range(100)])
    assert (bounds > claimed).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)
    assert np.median(bounds) > 0.7


def test_no_guess_right_more_often_than_chance_refutes_nothing() -> None:
    assert epsilon.lower_bound(1000, 1000, 500, 1e-5) == 0.0
    assert epsilon.lower_bound(1000, 1000, 1000, 0.0) == pytest.approx(-math.log(0.05 ** (-1 / 1000) - 1))


CLAIMED, DELTA = 4.3772, 1e-5
"""Of the Gaussian mechanism with noise multiplier 1, released once."""


CANARIES = 1000


def bound_of(noise: float) -> canaries.Bound:
    """The bound of a run's own mechanism with this noise multiplier, of which the claim is that of 1."""
    own = CentralNoise(CLIP_NORM, noise, cohort=10)
    release = mechanism.release_of(own, CANARIES, np.random.default_rng)
    rng = np.random.default_rng(4)
    return canaries.measure(release, CLIP_NORM, 1, 1.0, DELTA, rng, CANARIES, claimed=CLAIMED)


def test_the_bound_of_the_right_noise_stays_under_the_claim() -> None:
    found = bound_of(1.0)
    assert 1.0 < found.lower < CLAIMED < found.strongest
    assert not found.is_refuted


def test_the_bound_of_too_little_noise_exceeds_the_claim() -> None:
    assert bound_of(0.1).is_refuted
