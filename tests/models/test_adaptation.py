"""Few trained params on a frozen, 8-bit backbone: what is trained, what stays, and the whole model afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.train.torch_trainer import TorchRuntime, load, read
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays, manifest
from models import adaptation, zoo
from models.conversion import flatbuffer
from models.conversion.request import ExportRequest, export
from models.zoo import adapted as zoo_adapted
from models.zoo.resolve import ModelNotFound
from models.zoo.spec import ModelSpec
from strategies.params import Params
from tests.support.artifacts import BATCH, ROOT, cache_dir, lived_in, local_examples
from tests.support.long import extended

SHAPE, CLASSES = (12,), 5
BASE = zoo.get("mlp", input_shape=SHAPE, classes=CLASSES, hidden=[16, 8])
TASK = TrainTask(seed=5, batch_size=BATCH, lr=0.1, epochs=1)


@pytest.mark.parametrize("written", ["heads", "lora", "lora(0)", "lora(2, 0)", "lora(2)(3)", "lora(99999)"])
def test_an_unknown_adaptation_is_refused(written: str) -> None:
    with pytest.raises(adaptation.AdaptationError, match="expected"):
        adaptation.parse(written)


def test_alpha_is_the_rank_unless_given() -> None:
    assert adaptation.parse("lora(4)").scale == 1
    assert adaptation.parse("lora( 4 , 8 )").scale == 2


def test_a_backbone_is_off_by_half_a_step_at_most_and_is_its_own_backbone() -> None:
    params = {"w": np.random.default_rng(0).normal(0, 2, (6, 3, 3)).astype(np.float32), "b": np.ones(6, "f4")}
    params["w"][2] = 0

    frozen = adaptation.quantize_backbone(params)
    full = adaptation.dequantize_backbone(frozen)

    assert frozen["w"].dtype == np.int8
    np.testing.assert_array_equal(full["b"], params["b"])
    half = np.abs(params["w"]).max(axis=(1, 2), keepdims=True) / 254
    assert (np.abs(full["w"] - params["w"]) <= half * 1.0001).all()
    np.testing.assert_array_equal(
        adaptation.dequantize_backbone(adaptation.quantize_backbone(full))["w"], full["w"]
    )


@pytest.mark.parametrize("how", ["head", "lora(2, 4)"])
def test_the_first_model_is_the_shipped_one_on_its_backbone(how: str, tmp_path: Path) -> None:
    spec, frozen = adapted(how, tmp_path)
    module = spec.build(3)
    x = torch.randn(7, *SHAPE)

    torch.testing.assert_close(module(x), with_params(adaptation.dequantize_backbone(frozen))(x))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "trained"),
    [
        (
            "lora(2, 4)",
            {"fc.weight", "fc.bias"} | {f"hidden.{i}.lora_{part}" for i in (0, 1) for part in "ab"},
        ),
        *extended(("head", {"fc.weight", "fc.bias"})),
    ],
)
@pytest.mark.slow
def test_a_step_is_pytorchs_in_litert_and_the_merged_model_answers_as_the_adapted_one(
    how: str, trained: set[str], tmp_path: Path
) -> None:
    spec, frozen = adapted(how, tmp_path)
    runtime = litert(spec, how, tmp_path)
    module = spec.build(3)
    params = lived_in(read(module), seed=1)
    data = local_examples(spec, 2 * BATCH + 3, seed=2)

    got, expected = (
        Trainer(each).train(params, TASK, data).update.delta
        for each in (runtime, TorchRuntime(module, spec.loss))
    )

    assert set(got) == set(expected) == set(params) == trained
    for name in trained:
        np.testing.assert_allclose(got[name], expected[name], atol=1e-5)
        assert np.abs(got[name]).max() > 1e-4
    after = {name: params[name] + got[name] for name in params}
    full = adaptation.merge(frozen, after, adaptation.parse(how))
    assert {name: value.shape for name, value in full.items()} == {
        name: value.shape for name, value in read(BASE.build(0)).items()
    }
    if how == "head":
        frozen_ones = adaptation.dequantize_backbone(frozen)
        for name in full.keys() - trained:
            np.testing.assert_array_equal(full[name], frozen_ones[name])
    np.testing.assert_allclose(
        runtime.logits(after, data.x), with_params(full)(torch.from_numpy(data.x)).detach(), atol=1e-5
    )


def test_running_statistics_are_part_of_the_backbone(tmp_path: Path) -> None:
    base = zoo.get("resnet8", input_shape=(8, 8), classes=10, norm="batch", width=8)
    frozen = adaptation.quantize_backbone(lived_in(read(base.build(0)), seed=4))
    module = of(base, "head", written(frozen, tmp_path)).build(0)

    assert set(module.state_dict()) == {"fc.weight", "fc.bias"}
    moved = module.state_dict(keep_vars=True)["fc.weight"]
    assert [parameter is moved for _, parameter in module.named_parameters()] == [True, False]
    merged = adaptation.merge(frozen, read(module), adaptation.parse("head"))
    assert merged.keys() == read(base.build(0)).keys()


def test_a_model_that_cannot_be_adapted_like_this_is_refused_in_words(tmp_path: Path) -> None:
    logreg = zoo.get("logreg", input_shape=SHAPE, classes=CLASSES)
    path = written(adaptation.quantize_backbone(read(logreg.build(0))), tmp_path)
    with pytest.raises(ModelNotFound, match=r"no linear layer besides its head 'fc'; take adapt = 'head'"):
        of(logreg, "lora(2)", path)
    with pytest.raises(ModelNotFound, match="No such file"):
        of(logreg, "head", tmp_path / "absent.safetensors")


def test_the_head_of_a_model_of_quantities_learns_by_squared_error(tmp_path: Path) -> None:
    shape = {"input_shape": (3,), "classes": 1, "task": "regression"}
    base = zoo.get("mlp", hidden=[4], **shape)  # type: ignore[arg-type]
    params = {name: value.numpy() for name, value in base.build(0).state_dict().items()}
    path = written(adaptation.quantize_backbone(params), tmp_path)
    options = {"base": "mlp", "base_options": {"hidden": [4]}, "adapt": "head", "backbone": str(path)}
    spec = zoo.get(adaptation.MODEL, **shape, **options)  # type: ignore[arg-type]
    assert (spec.task, spec.loss) == ("regression", base.loss)
    module = spec.build(0)
    assert {name for name, each in module.named_parameters() if each.requires_grad} == {
        "fc.weight",
        "fc.bias",
    }
    x, y = spec.example_batch(4)
    assert module(x).shape == (4, 1) and float(spec.loss(module(x), y)) >= 0


def test_a_file_that_is_not_this_models_backbone_is_refused(tmp_path: Path) -> None:
    """A param that it lacks would start at random, and nobody would know."""
    frozen = adaptation.quantize_backbone(read(BASE.build(0)))
    fewer = {name: value for name, value in frozen.items() if name != "hidden.1.bias"}
    other = adaptation.quantize_backbone(
        read(zoo.get("mlp", input_shape=SHAPE, classes=CLASSES, hidden=[16, 9]).build(0))
    )
    for wrong, fault in (
        (fewer, "the backbone has no 'hidden.1.bias', so it is not this model's"),
        ({**frozen, "extra": np.zeros(1, "f4")}, "the backbone has 'extra', which the model has not"),
        (other, r"the backbone's 'hidden.1.weight' is \(9, 16\), the model's \(8, 16\)"),
    ):
        with pytest.raises(ModelNotFound, match=fault):
            of(BASE, "head", written(wrong, tmp_path))
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ModelNotFound, match=r"text is not a readable \.safetensors file"):
        of(BASE, "head", tmp_path / "text")


class Backwards(torch.nn.Module):
    """Its layers are named in another order than they are called in, and one is not called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = torch.nn.Linear(6, CLASSES), torch.nn.Linear(*SHAPE, 6)
        self.spare = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.first(x).relu())
        return logits


def test_the_head_is_the_linear_layer_that_is_called_last(tmp_path: Path) -> None:
    base = ModelSpec("backwards", Backwards, SHAPE, CLASSES)
    path = str(written(adaptation.quantize_backbone(read(base.build(0))), tmp_path))
    assert set(read(zoo_adapted.spec(base, "head", path).build(0))) == {"last.weight", "last.bias"}
    assert set(read(zoo_adapted.spec(base, "lora(1)", path).build(0))) == {
        "last.weight",
        "last.bias",
        "first.lora_a",
        "first.lora_b",
    }


@pytest.mark.parametrize(
    ("trained", "fault"),
    [
        ({"fd.bias": (5,)}, "'fd.bias' belongs to 'fd.bias', which the backbone does not have"),
        ({"fc.bias": (4,)}, r"'fc.bias' makes \(4,\) of 'fc.bias', which is \(5,\) in the backbone"),
        ({"hidden.0.lora_a": (2, 12)}, "'hidden.0.lora_a' comes without 'hidden.0.lora_b'"),
        ({"hidden.0.lora_b": (16, 2)}, "'hidden.0.lora_b' comes without 'hidden.0.lora_a'"),
        ({"hidden.0.lora_a": (2, 9), "hidden.0.lora_b": (16, 2)}, r"makes \(16, 9\) of 'hidden.0.weight', which is \(16, 12\)"),
    ],
)  # fmt: skip
def test_adapters_that_do_not_fit_the_backbone_are_not_merged(
    trained: dict[str, tuple[int, ...]], fault: str
) -> None:
    frozen = adaptation.quantize_backbone(read(BASE.build(0)))
    arrays_ = {name: np.zeros(shape, np.float32) for name, shape in trained.items()}
    with pytest.raises(adaptation.AdaptationError, match=fault):
        adaptation.merge(frozen, arrays_, adaptation.parse("lora(2)"))


def test_a_tensor_without_values_is_its_own_backbone() -> None:
    empty = {"w": np.zeros((0, 3), np.float32)}
    assert adaptation.dequantize_backbone(adaptation.quantize_backbone(empty))["w"].shape == (0, 3)


def adapted(how: str, folder: Path) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """An adapted model, and its backbone."""
    frozen = adaptation.quantize_backbone(lived_in(read(BASE.build(0)), seed=9))
    return of(BASE, how, written(frozen, folder)), frozen


def written(frozen: Params, folder: Path) -> Path:
    path = folder / "backbone.safetensors"
    path.write_bytes(arrays.encode(frozen))
    return path


def of(base: ModelSpec, how: str, backbone: Path) -> ModelSpec:
    return zoo.get(
        adaptation.MODEL,
        input_shape=base.input_shape,
        classes=base.classes,
        base=base.name,
        base_options=dict(base.options),
        adapt=how,
        backbone=str(backbone),
    )


def litert(spec: ModelSpec, how: str, folder: Path) -> LiteRTRuntime:
    options = {
        "base": BASE.name,
        "base_options": dict(BASE.options),
        "adapt": how,
        "backbone": str(folder / "backbone.safetensors"),
    }
    request = ExportRequest(adaptation.MODEL, options, SHAPE, CLASSES, batch_size=BATCH)
    found = export(request, cache_dir(), code_folder=ROOT)
    described = manifest.from_json(found.manifest.read_bytes())
    assert str(folder) not in found.manifest.read_text()
    kept = flatbuffer.tensors(found.tflite.read_bytes())
    large = [tensor.dtype for tensor in kept if tensor.constant and tensor.size >= 16 * 12]
    assert large and set(large) == {"int8"}
    return LiteRTRuntime(found.tflite, described)


def with_params(params: Params) -> torch.nn.Module:
    module = BASE.build(0).eval()
    load(module, params)
    return module
