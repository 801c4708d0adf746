"""Training in between: what is frozen stays, statistics included, and what cannot be trained is refused in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from models.compress.step import Data, StepRefused
from models.compress.tuning import Tuning, is_within, labelled_rows, named_layers, tune
from models.labels import PADDING
from models.pretrain.data.batches import Arrays

X = np.random.default_rng(0).normal(size=(12, 6, 6)).astype(np.float32)
Y = (np.arange(12) % 3).astype(np.int32)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.conv2 = nn.Conv2d(2, 2, 3)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.conv2(self.norm(self.conv(x.unsqueeze(1)))).flatten(1))
        return logits


def tuned(x: np.ndarray = X, **options: object) -> nn.Module:
    torch.manual_seed(0)
    module = Normed()
    tuning = Tuning(**{"epochs": 1, "batch_size": 4, **options})  # type: ignore[arg-type]
    tune(
        module,
        Arrays(x, Y),
        tuning,
        np.random.default_rng(0),
        lambda m, x, y: nn.functional.cross_entropy(m(x), y.long()),
    )
    return module


def moved(module: nn.Module) -> set[str]:
    """Layers of which some tensor is not what it was."""
    torch.manual_seed(0)
    before = Normed().state_dict()
    return {
        name.rpartition(".")[0]
        for name, value in module.state_dict().items()
        if not torch.equal(value, before[name])
    }


def test_a_frozen_layer_keeps_its_params_and_its_statistics_and_another_that_begins_alike_learns() -> None:
    assert moved(tuned(freeze="conv, norm")) == {"conv2", "fc"}
    assert moved(tuned()) == {"conv", "norm", "conv2", "fc"}
    assert moved(tuned(epochs=0)) == set()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"freeze": "conv3"}, r"freeze names 'conv3', which is not a layer of this model; it has conv, norm, conv2, fc"),
        ({"freeze": "conv,norm,conv2,fc"}, "leaves nothing to train"),
        ({"lr": 1e3, "epochs": 30}, "the loss of epoch .* is nan; lower lr = 1000"),
        ({"x": X.reshape(12, 36), "shift": 1}, r"shift = 1 moves images by pixels, but examples of shape \(36,\)"),
    ],
)  # fmt: skip
def test_untrainable_models_are_refused(options: dict[str, object], fault: str) -> None:
    with pytest.raises(StepRefused, match=fault):
        tuned(**options)  # type: ignore[arg-type]


def test_only_rows_with_a_label_that_counts_are_learnt_from() -> None:
    y = np.array([[1, PADDING], [PADDING, PADDING], [0, 2]], np.int32)
    x = np.arange(6, dtype=np.int32).reshape(3, 2)
    rows = labelled_rows(Data(x, y, x, y))
    np.testing.assert_array_equal(rows.x, x[[0, 2]])
    with pytest.raises(StepRefused, match="none of 3 training rows has a label"):
        labelled_rows(Data(x, np.full_like(y, PADDING), x, y))


def test_a_name_means_a_layer_and_all_that_is_in_it() -> None:
    names = named_layers(
        nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1)), "ab": nn.Linear(1, 1)}), " a.0 ,", "keep"
    )
    assert names == ("a.0",)
    assert is_within("a.0.weight", names) and is_within("a.0", names)
    assert not is_within("a.01.weight", names) and not is_within("a", names)
