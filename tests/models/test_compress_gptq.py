"""GPTQ: equal to a twin that follows the equations, better than rounding on a layer's inputs, for every kind of model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models import adaptation, zoo
from models.compress import report
from models.compress.pipeline import PipelineError, plan_steps
from models.compress.pruning.lowrank import LowRankOptions, factorise
from models.compress.quantization import layer_inputs, packed
from models.compress.quantization.gptq import gptq, nearest, output_error
from models.compress.quantization.packed import Bits, PackedLinear
from models.compress.quantization.weight_only import GPTQOptions, layers, step
from models.compress.step import Context, Data, StepModel, StepRefused
from models.zoo.spec import ModelSpec
from tests.support.compressing import context, digits, trained

pytestmark = pytest.mark.slow


def _layer(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight matrix and XᵀX of correlated inputs."""
    rng = np.random.default_rng(seed)
    x = (
        rng.normal(size=(4 * columns, columns))
        @ rng.normal(size=(columns, columns))
        * rng.uniform(0.1, 3, columns)
    )
    return torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32)), torch.from_numpy(x.T @ x)


def _twin(weight: np.ndarray, squares: np.ndarray, bits: int, group: int, damping: float) -> np.ndarray:
    """Rounded weights by equations 2 and 3 of the paper: after each column, its row and column leave the inverse by elimination."""
    rows, columns = weight.shape
    group = group or columns
    inverse = np.linalg.inv(squares + damping * np.diag(squares).mean() * np.eye(columns))
    remaining, rounded = weight.astype(np.float64), np.zeros((rows, columns))
    todo = list(np.argsort(-np.diag(squares), kind="stable"))
    while todo:
        j = todo.pop(0)
        for i in range(rows):
            own = weight[i, j // group * group :][:group][: columns - j // group * group]
            low, high = min(0.0, own.min()), max(0.0, own.max())
            scale = np.float32(np.float32(high - low) / np.float32(2**bits - 1))
            zero = np.round(-low / scale)
            code = np.clip(np.round(remaining[i, j] / float(scale)) + zero, 0, 2**bits - 1)
            rounded[i, j] = float(scale) * (code - zero)
        error = (remaining[:, j] - rounded[:, j]) / inverse[j, j]
        remaining[:, todo] -= np.outer(error, inverse[j, todo])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return rounded


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [(6, 24, 8), (5, 33, 16), (4, 150, 0), (3, 300, 128), (2, 1, 0), (1, 7, 100)],
)
def test_it_equals_a_twin_that_follows_the_equations(rows: int, columns: int, group: int, bits: Bits) -> None:
    """More columns than a block too, whose late updates change only the order of sums."""
    weight, squares = _layer(rows, columns)
    expected = _twin(weight.numpy(), squares.numpy(), bits, group, 0.01)
    made = gptq(weight, squares, bits, group, 0.01).values().numpy()
    np.testing.assert_allclose(made, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("columns", "group"), [(48, 16), (130, 128), (64, 0)])
def test_a_layers_outputs_change_less_than_by_rounding(
    columns: int, group: int, seed: int, bits: Bits
) -> None:
    weight, squares = _layer(20, columns, seed)
    rounded = output_error(weight, nearest(weight, bits, group).values(), squares)
    assert output_error(weight, gptq(weight, squares, bits, group, 0.01).values(), squares) < 0.6 * rounded


def test_rounding_to_nearest_is_at_most_half_a_step_away() -> None:
    weight, _ = _layer(20, 70)
    matrix = nearest(weight, 4, 32)
    steps = matrix.scales.repeat_interleave(32, 1)[:, :70]
    assert bool(((matrix.values() - weight).abs() <= steps * 1.001).all())  # the zero point is rounded too
    assert float(((matrix.values() - weight).abs() <= steps / 2 * 1.001).float().mean()) > 0.95


def test_inputs_without_correlation_and_inputs_that_are_always_zero_are_rounded_to_nearest() -> None:
    weight, _ = _layer(6, 12)
    uncorrelated = torch.diag(torch.arange(12.0, dtype=torch.float64))
    for squares in (uncorrelated, torch.zeros(12, 12, dtype=torch.float64)):
        assert torch.equal(gptq(weight, squares, 4, 4, 0.01).codes, nearest(weight, 4, 4).codes)


def test_weights_that_are_zero_stay_zero_and_constant_rows_are_kept() -> None:
    weight, squares = _layer(8, 40)
    weight[weight.abs() < 0.5] = 0
    weight[0], weight[1], weight[2] = 0, 0.25, -3e-30
    for matrix in (gptq(weight, squares, 4, 16, 0.01), nearest(weight, 4, 16)):
        values = matrix.values()
        assert not values[weight == 0].any()
        assert torch.isfinite(values).all()
    torch.testing.assert_close(nearest(weight, 4, 16).values()[:3], weight[:3], rtol=1e-6, atol=0)


@cache
def _text(name: str, seed: int = 0, classes: int = 11, **options: Any) -> tuple[StepModel, Data]:
    """A model of token sequences, weights large enough to matter, and rows of tokens for it."""
    spec = zoo.get(
        name,
        input_shape=(12,),
        classes=classes,
        input_dtype="int32",
        task="next_token" if name in ("gpt", "charlm", "moe", "lstm") else "classification",
        **options,
    )
    module = spec.build(seed).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    rng = np.random.default_rng(seed)
    x = rng.integers(0, spec.tokens, (80, 12)).astype(np.int32)
    shape = (80, 12) if spec.task == "next_token" else (80,)
    y = rng.integers(0, classes, shape).astype(np.int32)
    return StepModel(spec, module), Data(x[:60], y[:60], x[60:], y[60:])


ANY_LOSS = {"max_accuracy_drop": 1.0}


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("gpt", {"width": 24, "layers": 2, "heads": 2}, 13),
        ("gpt", {"width": 24, "layers": 1, "heads": 2, "attention": "block_sparse", "attention_block": 4}, 7),
        ("charlm", {"width": 20, "layers": 2, "heads": 2}, 13),
        ("moe", {"width": 24, "layers": 1, "heads": 2, "experts": 3}, 6),
        ("lstm", {"width": 17, "layers": 1}, 1),
        ("bert", {"width": 24, "layers": 2, "heads": 2, "vocab": 30}, 14),
        ("textcls", {"width": 20, "layers": 1, "heads": 2, "vocab": 30}, 7),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_model_of_texts_answers_packed_as_with_the_rounded_weights(
    name: str, options: dict[str, Any], count: int, bits: Bits
) -> None:
    model, data = _text(name, **options)
    made = step(model, data, GPTQOptions(bits=bits, group=16, **ANY_LOSS), context(model))

    assert (made.precision, made.tflite) == (f"weight-int{bits}", None)
    assert made.packed is not None
    loaded = packed.load(made.packed, model.spec, "file")
    assert sum(isinstance(layer, PackedLinear) for layer in loaded.modules()) == count
    before, after = report.logits(made.module, data.x_test), report.logits(loaded, data.x_test)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5 * np.abs(before).max())
    changed = np.abs(before - report.logits(model.module, data.x_test)).max()
    assert changed > 1e-4
    assert made.facts["layers"].keys() | {name.rpartition(".")[0] for name in made.facts["float"]} >= {
        name.rpartition(".")[0] for name, p in model.module.named_parameters() if p.ndim > 1
    }


@pytest.mark.parametrize("name", ["gpt", "charlm"])
def test_the_whole_model_changes_less_than_by_rounding(name: str) -> None:
    model, data = _text(name, width=24, layers=2, heads=2)
    expected = report.logits(model.module, data.x_test)

    def change(method: str) -> float:
        options = GPTQOptions(group=8, method=method, **ANY_LOSS)  # type: ignore[arg-type]
        made = step(model, data, options, context(model))
        return float(np.square(report.logits(made.module, data.x_test) - expected).mean())

    assert change("gptq") < 0.6 * change("nearest")


def test_the_facts_say_what_each_layer_lost_and_how_much_smaller_the_matrices_are() -> None:
    model, data = _text("gpt", width=128, layers=1, heads=2)
    made = step(model, data, GPTQOptions(**ANY_LOSS), context(model))
    assert made.facts["times_smaller"] > 7.4
    assert made.facts["matrix_bytes"]["float32"] == 4 * (12 * 128**2 + 11 * 128)
    assert all(
        layer["output_error"] < layer["nearest_output_error"] for layer in made.facts["layers"].values()
    )
    assert made.facts["float"] == {
        "embedding.token.weight": "of Embedding, not Linear",
        "embedding.position.weight": "of Embedding, not Linear",
    }
    eight = step(model, data, GPTQOptions(bits=8, **ANY_LOSS), context(model))
    assert eight.facts["times_smaller"] > 3.5
    assert eight.facts["agreement"] >= made.facts["agreement"]


def test_the_inputs_of_a_layer_are_those_after_the_layers_before_it_were_quantized() -> None:
    model, data = _text("gpt", width=24, layers=2, heads=2)
    names, _ = layers(model)
    quantized = step(model, data, GPTQOptions(**ANY_LOSS), context(model)).module
    seen: dict[str, torch.Tensor] = {}

    def change(together: Any, squares: torch.Tensor) -> None:
        for name in together:
            seen[name] = squares
            weight, other = (m.get_parameter(f"{name}.weight") for m in (working.module, quantized))
            weight.copy_(other)

    for spec in (model.spec, replace(model.spec, layout=None)):  # part by part, and all at once
        working = StepModel(spec, spec.build(0).eval())
        working.module.load_state_dict(model.module.state_dict())
        seen.clear()
        layer_inputs.visit(working.module, spec, data.x_train, names, change)
        assert list(seen) == names
        for name in names:
            inputs: list[torch.Tensor] = []
            hook = quantized.get_submodule(name).register_forward_pre_hook(
                lambda layer, given, into=inputs: into.append(given[0])
            )
            with torch.no_grad():
                quantized(torch.from_numpy(data.x_train))
            hook.remove()
            rows = inputs[0].flatten(0, -2).double()
            torch.testing.assert_close(seen[name], rows.T @ rows, rtol=1e-4, atol=1e-3)


class _Twice(nn.Module):
    """Calls one layer two times, and has another that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused, self.fc = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc(torch.tanh(self.inner(torch.tanh(self.inner(x)))))
        return output


class _Encoder(nn.Module):
    """torch's own encoder, whose fused path reads weights without calling their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc(self.encoder(x.unflatten(1, (2, 4)).repeat(1, 1, 2)).mean(1))
        return output


def _own(module: nn.Module) -> tuple[StepModel, Data]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 8)).astype(np.float32), rng.integers(0, 3, 90).astype(np.int32)

    def build() -> nn.Module:
        return type(module)()

    return StepModel(ModelSpec("own", build, (8,), 3), module.eval()), Data(x[:60], y[:60], x[60:], y[60:])


def test_a_layer_that_is_called_twice_has_the_inputs_of_both_calls() -> None:
    model, data = _own(_Twice())
    found: dict[str, torch.Tensor] = {}
    layer_inputs.visit(
        model.module,
        model.spec,
        data.x_train,
        ["inner", "fc"],
        lambda names, squares: found.update({names[0]: squares}),
    )
    with torch.no_grad():
        first = torch.from_numpy(data.x_train)
        second = torch.tanh(model.module.get_submodule("inner")(first))
    both = torch.cat([first, second]).double()
    torch.testing.assert_close(found["inner"], both.T @ both, rtol=1e-5, atol=1e-4)
    made = step(model, data, GPTQOptions(**ANY_LOSS), context(model))
    assert made.facts["float"] == {"unused.weight": "not called as a layer"}


def test_a_module_that_reads_weights_past_its_layers_still_answers_the_same() -> None:
    model, data = _own(_Encoder())
    made = step(model, data, GPTQOptions(**ANY_LOSS), context(model))
    assert made.packed is not None
    loaded = packed.load(made.packed, model.spec, "file")
    with torch.inference_mode():
        x = torch.from_numpy(data.x_test)
        torch.testing.assert_close(loaded(x), made.module(x), rtol=1e-5, atol=1e-5)


def test_a_matrix_that_is_also_the_embedding_stays_float() -> None:
    model, data = _text("gpt", width=24, layers=1, heads=2, tie=True)
    made = step(model, data, GPTQOptions(**ANY_LOSS), context(model))
    assert made.facts["float"]["embedding.token.weight"] == "of Embedding, not Linear"
    assert "head" not in made.facts["layers"]
    assert made.packed is not None
    loaded = packed.load(made.packed, model.spec, "file")
    assert loaded.get_submodule("head").weight is loaded.get_submodule("embedding.token").weight
    np.testing.assert_allclose(
        report.logits(loaded, data.x_test), report.logits(made.module, data.x_test), rtol=1e-4, atol=1e-4
    )


def test_factors_are_quantized_and_layers_that_are_named_stay_float() -> None:
    mlp = trained(zoo.get("mlp", input_shape=(8, 8), classes=10, hidden=[48]))
    thin = factorise(mlp, digits(), LowRankOptions(rank=6, epochs=0), context(mlp))
    made = step(thin, digits(), GPTQOptions(keep="fc", **ANY_LOSS), context(thin))
    assert made.facts["layers"].keys() == {"hidden.0.0", "hidden.0.1"}
    assert all(reason == "kept" for reason in made.facts["float"].values())
    assert made.packed is not None
    loaded = packed.load(made.packed, made.spec, "file")
    np.testing.assert_allclose(
        report.logits(loaded, digits().x_test),
        report.logits(made.module, digits().x_test),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", ["logreg", "mlp", "cnn"])
def test_a_trained_model_keeps_its_accuracy_in_eight_bits_and_convolutions_stay_float(name: str) -> None:
    model = trained(zoo.get(name, input_shape=(8, 8), classes=10))
    made = step(model, digits(), GPTQOptions(bits=8), context(model))
    assert made.facts["accuracy"] >= made.facts["float32_accuracy"] - 0.01
    assert {name for name, why in made.facts["float"].items() if why == "a convolution"} == (
        {"conv1.weight", "conv2.weight"} if name == "cnn" else set()
    )


def test_what_cannot_be_quantized_is_refused_with_the_reason() -> None:
    model, data = _own(_Twice())
    spec = ModelSpec("conv", lambda: nn.Sequential(nn.Conv1d(1, 3, 8), nn.Flatten()), (1, 8), 3)
    convolution = StepModel(spec, spec.build(0).eval())
    with pytest.raises(
        StepRefused, match=r"no matrix to quantize in model 'conv'.*0\.weight \(a convolution\)"
    ):
        step(convolution, data, GPTQOptions(), context(convolution))
    with pytest.raises(StepRefused, match=r"inner\.weight \(kept\)"):
        step(model, data, GPTQOptions(keep="inner, fc"), context(model))
    with pytest.raises(StepRefused, match="keep names 'other', which is not a layer"):
        step(model, data, GPTQOptions(keep="other"), context(model))
    adapted = StepModel(replace(model.spec, name=adaptation.MODEL), model.module)
    with pytest.raises(StepRefused, match="this model is adapted"):
        step(adapted, data, GPTQOptions(), context(adapted))
    infinite = replace(data, x_train=np.full_like(data.x_train, 3e38))
    with pytest.raises(StepRefused, match=r"layer 'inner' on 60 calibration rows: .* infinite"):
        step(model, infinite, GPTQOptions(**ANY_LOSS), context(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits is 3, expected one of 4, 8"),
        ({"group": -1}, "group is -1, expected a whole number from 0"),
        ({"method": "best"}, "method is 'best', expected one of 'gptq', 'nearest'"),
        ({"damping": 0.0}, "damping is 0.0, expected a number from 1e-06"),
        ({"grop": 1}, "unknown key 'grop', did you mean 'group'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=rf"small.toml: step 1 \(gptq\).*{message}"):
        plan_steps([{"kind": "gptq", **options}], "small.toml")


def test_a_model_that_loses_too_much_is_refused() -> None:
    mlp = trained(zoo.get("mlp", input_shape=(8, 8), classes=10))
    coarse = StepModel(mlp.spec, mlp.spec.build(0).eval())
    coarse.module.load_state_dict(mlp.module.state_dict())
    with torch.no_grad():  # one large weight in each row leaves no step for the others
        for name in ("hidden.0", "fc"):
            coarse.module.get_parameter(f"{name}.weight")[:, 0] = 50
    data = replace(digits(), x_test=digits().x_test * (np.arange(64).reshape(8, 8) > 0))
    with pytest.raises(StepRefused, match=r"nearest int4 accuracy is .* points below float32"):
        step(coarse, data, GPTQOptions(method="nearest", group=0), Context(0, coarse))


def test_the_same_seed_gives_the_same_bytes() -> None:
    model, data = _text("charlm", width=20, layers=1, heads=2)
    options = GPTQOptions(calibration_rows=20, **ANY_LOSS)
    first, second = (step(model, data, options, Context(5, model)).packed for _ in range(2))
    assert first == second
    assert step(model, data, options, Context(6, model)).packed != first
