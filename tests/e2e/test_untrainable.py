"""What clients would train wrong is refused before the first round, and says what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import assert_refused, options, report_of, run_cli, run_here
from tests.support.require import data_dir

pytestmark = pytest.mark.slow

BATCH_NORM = ["model.name=resnet8", "model.norm=batch", "model.width=4"]
SHORT = ["federation.rounds=1", "local.steps=2", "federation.clients=4", "federation.runtimes={torch=1}"]


def test_statistics_that_nobody_trained_are_refused(tmp_path: Path) -> None:
    done = run_here("simulate", "--out", "fresh", *options([*BATCH_NORM, *SHORT]), cwd=tmp_path)
    assert_refused(done, "resnet8", "BatchNorm", "mean 0, variance 1", "GroupNorm", "model.init")


@pytest.mark.extended
def test_statistics_of_a_pretraining_are_kept(tmp_path: Path) -> None:
    done = run_cli("pretrain", "--out", "first", *options([*BATCH_NORM, "train.steps=5"]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    requested = [*BATCH_NORM, *SHORT, "model.init=first/model.safetensors"]
    done = run_cli("simulate", "--out", "second", *options(requested), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert report_of(tmp_path / "second")["rejections"] == {}


def test_a_model_that_finds_hidden_tokens_is_pretrained_on_hidden_tokens_alone(tmp_path: Path) -> None:
    data_dir("tinyshakespeare.txt")
    model = [
        "model.name=bert",
        "model.objective=masked",
        "model.vocab=65",
        "model.width=16",
        "model.layers=1",
    ]
    requested = [*model, "data.dataset=shakespeare", "data.partition=iid"]
    done = run_here("simulate", "--out", "run", *options([*requested, *SHORT]), cwd=tmp_path)
    assert_refused(done, "bert", "objective", "masked", "fedloop pretrain", "classify")


def test_a_run_of_which_no_round_changed_the_model_ends_with_an_error(tmp_path: Path) -> None:
    requested = [
        "federation.rounds=2",
        "federation.clients=3",
        "simulation.dropout=0.9999",
        "model.name=logreg",
    ]
    done = run_here(
        "simulate", "--out", tmp_path / "run", *options([*requested, "federation.runtimes={torch=1}"])
    )
    assert done.returncode == 1
    assert "no round changed the model: of 6 clients selected, 6 sent no update" in " ".join(
        done.stderr.split()
    )
    assert all(f"client-00{index}: " in done.stderr for index in range(3)), done.stderr
    assert (tmp_path / "run" / "report.json").exists()
