"""Pruning: how many weights go, that they stay gone, and what it tells."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from models import options as option_tables
from models import zoo
from models.compress.pruning import sparsity, sparsity_search
from models.compress.pruning.prune import PruneOptions, prune
from models.compress.pruning.structure import rebuild
from models.compress.step import Data, StepModel, StepRefused
from models.labels import PADDING
from models.pretrain.params import params_of
from tests.support.compression import accuracy, context, digits, trained
from tests.support.long import extended

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data() -> Data:
    return digits()


@pytest.fixture(scope="module")
def cnn(data: Data) -> StepModel:
    return trained("cnn", data, epochs=6, channels=[8, 16], hidden=24)


def weights(model: StepModel) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.module.named_parameters() if p.ndim >= 2}


def zero_share(model: StepModel) -> float:
    values = list(weights(model).values())
    return sum(int((w == 0).sum()) for w in values) / sum(w.numel() for w in values)


@pytest.mark.parametrize(
    ("per_layer", "method"),
    [
        ("global", "magnitude"),
        ("uniform", "l1"),
        ("global", "group-lasso"),
        ("uniform", "activation"),
        *extended(
            ("uniform", "magnitude"), ("global", "l1"), ("uniform", "group-lasso"), ("global", "activation")
        ),
    ],
)
def test_the_requested_number_of_weights_is_zero(
    cnn: StepModel, data: Data, method: str, per_layer: str
) -> None:
    given = {"method": method, "per_layer": per_layer, "sparsity": 0.7, "epochs": 1, "regularise_epochs": 1}
    pruned = prune(cnn, data, option_tables.read(PruneOptions, given, "step"), context(cnn))
    assert zero_share(pruned) == pytest.approx(0.7, abs=2e-3)
    if per_layer == "uniform":
        for weight in weights(pruned).values():
            assert float((weight == 0).float().mean()) == pytest.approx(0.7, abs=1 / weight.numel())
    assert list(pruned.module.state_dict()) == list(cnn.module.state_dict())


def test_at_once_and_by_magnitude_the_smallest_go_and_the_others_are_untouched(
    cnn: StepModel, data: Data
) -> None:
    pruned = prune(cnn, data, PruneOptions(epochs=0, sparsity=0.6), context(cnn))
    before = torch.cat([w.detach().flatten() for w in weights(cnn).values()])
    after = torch.cat([w.detach().flatten() for w in weights(pruned).values()])
    assert before[after == 0].abs().max() <= before[after != 0].abs().min()
    assert torch.equal(after[after != 0], before[after != 0])


def test_the_model_given_is_left_as_it_was_and_the_same_seed_gives_the_same(
    cnn: StepModel, data: Data
) -> None:
    before = copy.deepcopy(cnn.module.state_dict())
    first, second = (prune(cnn, data, PruneOptions(epochs=1), context(cnn)) for _ in range(2))
    for name, tensor in cnn.module.state_dict().items():
        assert torch.equal(tensor, before[name])
    for name, tensor in first.module.state_dict().items():
        assert torch.equal(tensor, second.module.state_dict()[name])


def test_test_rows_teach_nothing(cnn: StepModel, data: Data) -> None:
    others = replace(data, x_test=np.zeros_like(data.x_test), y_test=np.zeros_like(data.y_test))
    options = PruneOptions(epochs=1, per_layer="search", sparsity=0.8)
    one, other = (prune(cnn, rows, options, context(cnn)) for rows in (data, others))
    for name, tensor in one.module.state_dict().items():
        assert torch.equal(tensor, other.module.state_dict()[name])


@pytest.mark.extended
def test_fine_tuning_brings_accuracy_back(cnn: StepModel, data: Data) -> None:
    cut = prune(cnn, data, PruneOptions(epochs=0, sparsity=0.85), context(cnn))
    tuned = prune(cnn, data, PruneOptions(epochs=6, sparsity=0.85), context(cnn))
    assert accuracy(tuned, data) > accuracy(cut, data)
    assert accuracy(tuned, data) >= accuracy(cnn, data) - 0.03


def test_zeros_outlast_a_second_pruning_and_further_training(cnn: StepModel, data: Data) -> None:
    once = prune(cnn, data, PruneOptions(epochs=0, sparsity=0.5), context(cnn))
    twice = prune(once, data, PruneOptions(epochs=1, sparsity=0.6), context(cnn))
    for name, weight in weights(once).items():
        assert (weights(twice)[name][weight == 0] == 0).all()
    module = copy.deepcopy(twice.module)
    keep = sparsity.zeros_kept(module)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    for step in range(1, 4):
        optimizer.zero_grad()
        module(torch.from_numpy(data.x_train[:32])).square().sum().backward()
        optimizer.step()
        keep(step)
    assert zero_share(replace(twice, module=module)) == zero_share(twice)


def test_zeros_outlast_params_and_export(cnn: StepModel, data: Data) -> None:
    pruned = prune(cnn, data, PruneOptions(epochs=0, sparsity=0.75), context(cnn))
    again = rebuild(pruned.spec, params_of(pruned.module))
    assert zero_share(replace(pruned, module=again)) == zero_share(pruned)


@pytest.mark.extended
def test_the_group_lasso_silences_whole_channels(cnn: StepModel, data: Data) -> None:
    options = PruneOptions(
        method="group-lasso", strength=0.2, regularise_epochs=3, epochs=0, sparsity=0.0, lr=2e-3
    )
    pruned = prune(cnn, data, options, context(cnn))
    silent = [bool((row == 0).all()) for w in weights(pruned).values() for row in w]
    assert any(silent) and not all(silent)


def test_layers_to_keep_are_kept(cnn: StepModel, data: Data) -> None:
    pruned = prune(cnn, data, PruneOptions(epochs=0, sparsity=0.9, keep="fc", freeze="conv1"), context(cnn))
    assert "fc" not in pruned.facts["layers"] and "conv1" not in pruned.facts["layers"]
    assert torch.equal(weights(pruned)["fc.weight"], weights(cnn)["fc.weight"])
    with pytest.raises(StepRefused, match="no layer to cut"):
        prune(cnn, data, PruneOptions(epochs=0, keep="conv1, conv2, fc, hidden"), context(cnn))


def test_sparse_params_compress_and_the_facts_say_that_only_transport_is_saved(
    cnn: StepModel, data: Data
) -> None:
    facts = prune(cnn, data, PruneOptions(epochs=0, sparsity=0.8), context(cnn)).facts
    assert facts["zlib_bytes"]["after"] < 0.4 * facts["zlib_bytes"]["before"]
    assert facts["sparsity"] == pytest.approx(0.8, abs=2e-3)
    assert "transport only" in facts["saves"]


def test_a_search_keeps_to_its_bound_and_spares_what_is_sensitive(cnn: StepModel, data: Data) -> None:
    options = PruneOptions(per_layer="search", sparsity=0.95, max_accuracy_drop=0.02, held_out=0.2, epochs=0)
    pruned = prune(cnn, data, options, context(cnn))
    held = pruned.facts["held_out"]
    assert held["accuracy"] >= held["dense_accuracy"] - 0.02
    assert 0.2 < pruned.facts["sparsity"] <= 0.95
    shares = {round(layer["sparsity"], 2) for layer in pruned.facts["layers"].values()}
    assert len(shares) > 1


def test_a_looser_bound_never_cuts_less(cnn: StepModel, data: Data) -> None:
    found = [
        prune(
            cnn,
            data,
            PruneOptions(per_layer="search", sparsity=0.95, max_accuracy_drop=drop, epochs=0),
            context(cnn),
        )
        for drop in (0.0, 0.05, 1.0)
    ]
    shares = [zero_share(model) for model in found]
    assert shares[0] <= shares[1] + 1e-9 <= shares[2] + 2e-9


def test_a_search_refuses_too_few_rows(cnn: StepModel, data: Data) -> None:
    few = replace(data, x_train=data.x_train[:5], y_train=data.y_train[:5])
    with pytest.raises(StepRefused, match="there are 5 in all"):
        prune(cnn, few, PruneOptions(per_layer="search"), context(cnn))


def test_rows_that_cannot_teach_are_refused(cnn: StepModel, data: Data) -> None:
    silent = replace(data, y_train=np.full_like(data.y_train, PADDING))
    with pytest.raises(StepRefused, match="none of 1438 training rows has a label"):
        prune(cnn, silent, PruneOptions(), context(cnn))
    words = replace(data, x_train=data.x_train.reshape(len(data.x_train), -1))
    with pytest.raises(StepRefused, match="shift = 2 moves images"):
        prune(cnn, words, PruneOptions(shift=2), context(cnn))


def test_the_path_takes_the_cheapest_weights_first() -> None:
    levels = len(sparsity_search.LEVELS)
    losses = {"dull": [1.0] * levels, "keen": [2.0 + level for level in range(levels)]}
    path = sparsity_search.cheapest_first({"dull": 100, "keen": 100}, 1.0, losses, most=0.6)
    assert path[0] == {}
    assert path[levels] == {"dull": 0.98}
    totals = [sum(shares.values()) / 2 for shares in path]
    assert totals == sorted(totals) and totals[-1] <= 0.6


def test_the_ramp_is_the_cubic_one() -> None:
    goal = sparsity.Goal(("fc",), 0.0, 0.8)
    assert goal.at(0) == 0.0 and goal.at(1) == 0.8
    assert goal.at(0.5) == pytest.approx(0.8 - 0.8 / 8)
    assert sparsity.Ramp(0.5, 4).progress(80) == {10: 0.25, 20: 0.5, 30: 0.75, 40: 1.0}
    assert sparsity.Ramp(0.5, 100).progress(6) == {1: 1 / 3, 2: 2 / 3, 3: 1.0}
    assert sparsity.Ramp(0.0, 4).progress(80) == sparsity.Ramp(1.0, 4).progress(0) == {0: 1.0}


def test_inputs_that_are_louder_save_their_weights(data: Data) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False))
    x = np.array([[10.0, 1.0]] * 4, np.float32)
    norms = sparsity.input_norms(layer, ["0"], x)["0"]
    assert norms[0] / norms[1] == pytest.approx(10.0)
    grouped = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, groups=2))
    x = np.ones((2, 4, 3, 3), np.float32) * np.array([1, 2, 3, 4], np.float32)[:, None, None]
    by_weight = sparsity.input_norms(grouped, ["0"], x)["0"]
    assert by_weight.shape == (6, 2, 1, 1)
    assert by_weight[0, 1] / by_weight[0, 0] == pytest.approx(2.0)
    assert by_weight[5, 1] / by_weight[5, 0] == pytest.approx(4 / 3)


def test_text_models_are_pruned_too() -> None:
    rows = np.random.default_rng(0).integers(0, 30, (24, 12)).astype(np.int32)
    labels = np.arange(24, dtype=np.int32) % 3
    text = Data(rows, labels, rows, labels)
    spec = zoo.get("textcls", input_shape=(12,), classes=3, input_dtype="int32", vocab=30, width=16)
    model = StepModel(spec, spec.build(0).eval())
    for method in ("magnitude", "activation"):
        pruned = prune(model, text, PruneOptions(epochs=1, sparsity=0.5, method=method), context(model))
        assert pruned.facts["sparsity"] == pytest.approx(0.5, abs=2e-3)
        assert "embedding" in pruned.facts["layers"]
