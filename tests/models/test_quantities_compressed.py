"""Models that predict a quantity are trained, cut and shrunk as classifiers are, and compared by R2."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models import zoo
from models.compress import pipeline
from models.compress.distil import distillation_loss
from models.compress.search import Budget, Search, lower_bound_of_r2
from models.compress.step import Data, StepModel
from models.compress.tuning import Tuning, own_loss, tune
from models.labels import counting, filling
from models.pretrain.data.batches import Arrays, Batches, Share
from models.zoo.spec import squared_error


@cache
def prices() -> Data:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(600, 6)).astype(np.float32)
    y = (x @ [1.0, -0.5, 0.25, 0, 0.5, -0.25] + 0.3 * x[:, 0] * x[:, 1]).astype(np.float32)
    y = (y - y.mean()) / y.std()
    return Data(x[:400], y[:400], x[400:], y[400:])


@cache
def trained() -> StepModel:
    data = prices()
    spec = zoo.get("mlp", input_shape=(6,), classes=1, task="regression", hidden=[32, 32])
    module = spec.build(0)
    rows, rng = Arrays(data.x_train, data.y_train), np.random.default_rng(0)
    tune(module, rows, Tuning(epochs=20, lr=5e-3), rng, own_loss(spec))
    return StepModel(spec, module)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "least"),
    [
        ({"kind": "distil", "student": "mlp(hidden=[8])", "epochs": 30, "lr": 5e-3}, 0.9),
        pytest.param({"kind": "prune", "sparsity": 0.5, "epochs": 2}, 0.9, marks=pytest.mark.extended),
        pytest.param(
            {"kind": "prune", "per_layer": "search", "sparsity": 0.8, "epochs": 2},
            0.9,
            marks=pytest.mark.extended,
        ),
        pytest.param({"kind": "structured", "ratio": 0.5, "epochs": 3}, 0.9, marks=pytest.mark.extended),
        pytest.param({"kind": "lowrank", "epochs": 2}, 0.9, marks=pytest.mark.extended),
        pytest.param({"kind": "codebook", "bits": 5, "epochs": 1}, 0.9, marks=pytest.mark.extended),
        pytest.param({"kind": "mixed"}, 0.9, marks=pytest.mark.extended),
        pytest.param({"kind": "qat", "epochs": 2, "max_accuracy_drop": 0.1}, 0.9, marks=pytest.mark.extended),
        pytest.param({"kind": "micro"}, 0.9, marks=pytest.mark.extended),
    ],
    ids=lambda each: each["kind"] if isinstance(each, dict) else "",
)
def test_every_step_keeps_r2(step: dict[str, Any], least: float, tmp_path: Path) -> None:
    done = pipeline.run(pipeline.plan_steps([step], "test"), trained(), prices(), tmp_path, seed=0)
    before, after = (each.record["figures"] for each in done)
    assert before["accuracy"] is None is after["accuracy"]
    assert before["r2"] > 0.95
    assert after["r2"] > least


def test_a_student_of_a_quantity_learns_the_teachers_answers() -> None:
    answers, taught = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.5], [2.0]])
    labels = torch.tensor([1.0, 3.0])
    loss = distillation_loss(answers, taught, labels, 3.0, 0.75, squared_error)
    assert float(loss) == pytest.approx(0.75 * 0.125 + 0.25 * 0.5)
    unlabelled = torch.full((2,), filling(labels))
    assert not counting(unlabelled).any()
    alone = distillation_loss(answers, taught, unlabelled, 3.0, 0.75, squared_error)
    assert float(alone) == pytest.approx(0.75 * 0.125)


def test_a_batch_of_quantities_is_filled_with_labels_that_do_not_count() -> None:
    data = prices()
    source = Arrays(data.x_train[:5], data.y_train[:5])
    batch = Batches(source, 5, 0, Share(rows=(1, 1), place=1, pad_to=8))[0]
    assert (batch.counted, batch.y.dtype, counting(batch.y).tolist()) == (
        5,
        torch.float32,
        [True, *[False] * 3],
    )


def test_the_bound_on_r2_narrows_with_rows_and_near_one() -> None:
    assert lower_bound_of_r2(0.9, 100) < lower_bound_of_r2(0.9, 10_000) < 0.9
    assert lower_bound_of_r2(1.0, 100) == 1.0
    assert lower_bound_of_r2(0.5, 10_000) == pytest.approx(0.5 - 2 * 0.5**0.5 / 100 * 0.5)
    assert lower_bound_of_r2(-0.2, 100) == -0.2


@pytest.mark.extended
def test_a_search_chooses_by_r2(tmp_path: Path) -> None:
    from models.compress.ladder import ladder

    source, tried = trained(), ("float32", "dynamic-int8", "distil-half")
    found = Search(source, prices(), tmp_path, 0, Budget(accuracy=0.9), lambda line: None).run(
        [each for each in ladder(source.spec) if each.name in tried]
    )
    assert found.chosen is not None and found.chosen.quality >= 0.9
    assert len(found.outcomes) == len(tried)
