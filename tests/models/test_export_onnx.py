"""ONNX: out and in again the same params and the same logits; what is broken or reaches elsewhere is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import nn

from models import zoo
from models.onnx.export import (
    OPSET,
    NotExportable,
    to_onnx,
)
from models.onnx.files import (
    BadOnnx,
    describe,
    open_file,
)
from models.onnx.parity import LogitsDiffer, require_same_logits
from models.onnx.weight_matching import import_params
from models.pretrain.params import params_of
from models.zoo import ModelSpec
from tests.support.long import extended

SPECS: dict[str, dict[str, Any]] = {
    "cnn": {"input_shape": (8, 8), "classes": 10, "channels": [2, 3]},
    "resnet8": {"input_shape": (8, 8), "classes": 3, "norm": "batch", "width": 4},
    "charlm": {"input_shape": (6,), "classes": 11, "width": 8, "heads": 2, "layers": 1, "input_dtype": "int32", "task": "next_token"},
}  # fmt: skip

Made = tuple[ModelSpec, nn.Module, ModelProto]


@pytest.fixture(scope="module")
def made() -> Callable[[str], Made]:
    """A model with weights of its own, and what it is in ONNX; each made once."""
    known: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in known:
            spec = zoo.get(name, **SPECS[name])
            module = spec.build(5)
            with torch.no_grad():  # statistics of a BatchNorm that was trained
                for buffer in module.buffers():
                    if buffer.is_floating_point():
                        buffer.uniform_(0.5, 1.5)
            known[name] = spec, module.eval(), to_onnx(module.eval(), spec)
        return known[name]

    return get


def written(folder: Path, model: ModelProto) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def changed(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def set_weight(model: ModelProto, name: str, change: Callable[[Any], Any]) -> None:
    (tensor,) = [each for each in model.graph.initializer if each.name == name]
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))


@pytest.mark.parametrize("name", [each for each in SPECS if each != "cnn"] + extended("cnn"))
@pytest.mark.slow
def test_out_and_in_again_a_model_has_the_same_params(
    made: Callable[[str], Made], tmp_path: Path, name: str
) -> None:
    spec, module, model = made(name)
    assert require_same_logits(model.SerializeToString(), module, spec) < 1e-5
    about = describe(model)
    assert about["opset"] == {"ai.onnx": OPSET}
    assert about["inputs"] == [
        {"name": "x", "dtype": spec.input_dtype, "shape": ["batch", *spec.input_shape]}
    ]
    assert about["outputs"][0]["shape"][0] == "batch"
    assert b".py" not in model.SerializeToString(), "where this machine keeps its code"

    result = import_params(
        open_file(written(tmp_path, model)), name, spec.options, tmp_path / "back.safetensors"
    )
    back = safetensors.numpy.load((tmp_path / "back.safetensors").read_bytes())
    params = params_of(module)
    assert {key: value.tobytes() for key, value in back.items()} == {
        key: value.tobytes() for key, value in params.items()
    }
    assert (tuple(result["model"]["input_shape"]), result["model"]["classes"]) == (
        spec.input_shape,
        spec.classes,
    )
    assert result["model"]["task"] == spec.task


@pytest.mark.slow
def test_a_file_that_answers_otherwise_is_found_out(made: Callable[[str], Made]) -> None:
    spec, module, model = made("cnn")
    other = changed(model)
    set_weight(other, "fc.bias", lambda bias: bias + np.eye(1, len(bias), dtype=np.float32)[0] * 1e-3)
    with pytest.raises(LogitsDiffer, match=r"row 0 .* differs by 0\.001"):
        require_same_logits(other.SerializeToString(), module, spec)


@pytest.mark.slow
def test_a_model_that_torch_cannot_follow_is_reported() -> None:
    sizes = {"width": 8, "heads": 2, "layers": 1, "experts": 2}
    spec = zoo.get("moe", input_shape=(4,), classes=5, input_dtype="int32", task="next_token", **sizes)
    with pytest.raises(NotExportable, match="cannot trace model 'moe'") as caught:
        to_onnx(spec.build(0).eval(), spec)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
def test_every_param_that_does_not_fit_is_named(made: Callable[[str], Made], tmp_path: Path) -> None:
    _, _, model = made("cnn")
    file = open_file(written(tmp_path, model))
    with pytest.raises(BadOnnx) as caught:
        import_params(file, "cnn", {"channels": [2, 4], "hidden": 5}, tmp_path / "out")
    words = str(caught.value)
    assert "conv2.weight is (3, 2, 3, 3), cnn has (4, 2, 3, 3)" in words
    assert "hidden.weight (5, 64) is missing" in words and "conv1.weight" not in words
    assert not (tmp_path / "out").exists()

    other = changed(model)
    set_weight(other, "fc.bias", lambda bias: bias * np.float32(np.nan))
    with pytest.raises(BadOnnx, match=r"fc\.bias holds NaN"):
        import_params(open_file(written(tmp_path, other)), "cnn", {"channels": [2, 3]}, tmp_path / "out")


def test_params_that_fit_in_a_file_that_computes_something_else_are_refused(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    spec, _, model = made("cnn")
    other = changed(model)
    other.graph.node[-1].output[0] = "before"
    other.graph.node.append(helper.make_node("Softmax", ["before"], ["logits"]))
    with pytest.raises(BadOnnx, match="its logits differ from those of cnn: row 0"):
        import_params(open_file(written(tmp_path, other)), "cnn", spec.options, tmp_path / "out")


def test_weights_may_lie_beside_the_file(made: Callable[[str], Made], tmp_path: Path) -> None:
    spec, module, model = made("cnn")
    onnx.save(
        changed(model), tmp_path / "m.onnx", save_as_external_data=True, location="w.data", size_threshold=0
    )
    file = open_file(tmp_path / "m.onnx")
    assert file.external == {"w.data": tmp_path / "w.data"}
    import_params(file, "cnn", spec.options, tmp_path / "back.safetensors")
    back = safetensors.numpy.load((tmp_path / "back.safetensors").read_bytes())
    assert all(np.array_equal(back[key], value) for key, value in params_of(module).items())


def reaching(model: ModelProto, location: str, length: int = 4) -> ModelProto:
    """With a weight that is said to be in another file."""
    other = changed(model)
    tensor = other.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return other


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../secret", "expected a file below its own folder"),
        ("a/../../secret", "expected a file below its own folder"),
        ("{folder}/secret", "expected a file below its own folder"),
        ("", "expected a file below its own folder"),
        ("link", "which is a link"),
        ("linked/secret", "which is a link"),
        ("nowhere", "there is no such file"),
        ("short", "4 bytes from 0; that file has 1 bytes"),
    ],
)
def test_weights_elsewhere_are_not_read(
    made: Callable[[str], Made], tmp_path: Path, location: str, message: str
) -> None:
    (tmp_path / "secret").write_bytes(bytes(4))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "short").write_bytes(b"1")
    _, _, model = made("cnn")
    with pytest.raises(BadOnnx, match=message):
        open_file(written(folder, reaching(model, location.format(folder=tmp_path))))


def test_weights_of_a_graph_within_a_graph_are_confined_too(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    other = changed(made("cnn")[2])
    tensor = TensorProto(name="deep", data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    inner = helper.make_graph([], "inner", [], [], [tensor])
    other.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner))
    with pytest.raises(BadOnnx, match=r"'deep' is in '\.\./secret'"):
        open_file(written(tmp_path, other))


def test_a_file_that_is_no_onnx_is_refused(made: Callable[[str], Made], tmp_path: Path) -> None:
    content = made("cnn")[2].SerializeToString()
    unsound = changed(made("cnn")[2])
    unsound.graph.node[0].input[0] = "nobody"
    for bad in (b"", b"\x00" * 100, content[: len(content) // 2], unsound.SerializeToString()):
        (tmp_path / "m.onnx").write_bytes(bad)
        with pytest.raises(BadOnnx, match="is not a"):
            open_file(tmp_path / "m.onnx")
