"""Models with packed weights: served small, with the float model's answers, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from models import zoo
from models.compress.quantization import packed
from models.compress.quantization.gptq import nearest
from models.compress.quantization.packed import Bits
from models.pretrain.params import params_of
from models.serving.generation.support import require_layout, verify
from models.zoo.spec import ModelSpec
from tests.support.serving import Server, logits_of, rows, serving, torch_model


def write_packed(folder: Path, spec: ModelSpec, bits: Bits = 4) -> torch.nn.Module:
    """Packs the model of a folder that `torch_model` made; the module with the rounded weights, which are its params now."""
    module = spec.build(0).eval()
    matrices = {
        name: nearest(layer.weight, bits, 16)
        for name, layer in module.named_modules()
        if type(layer) is torch.nn.Linear
    }
    with torch.no_grad():
        for name, matrix in matrices.items():
            module.get_parameter(f"{name}.weight").copy_(matrix.values())
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(params_of(module)))
    (folder / "packed.safetensors").write_bytes(packed.save(module, matrices))
    return module


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serving") / "home") as running:
        yield running


@pytest.mark.slow
def test_a_version_with_packed_weights_is_served_packed_and_answers_as_its_float_params(
    server: Server, tmp_path: Path
) -> None:
    module = write_packed(torch_model(tmp_path), zoo.get("mlp", input_shape=(8, 8), classes=10))
    with torch.inference_mode():
        expected = module(torch.from_numpy(rows(5))).numpy()
    for backend, taken in (("auto", "packed"), ("torch", "torch")):
        assert server.deployed("small", tmp_path, backend=backend)["backend"] == taken
        status, answer = server.infer("small", rows(5))
        assert status == 200
        np.testing.assert_allclose(logits_of(answer), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_packed_weights_that_are_others_or_damaged_or_missing_are_not_served(
    server: Server, tmp_path: Path
) -> None:
    spec = zoo.get("mlp", input_shape=(8, 8), classes=10)
    write_packed(torch_model(tmp_path), spec)
    content = (tmp_path / "packed.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(safetensors.numpy.save(params_of(spec.build(1))))
    assert "packed computes other answers than torch" in json.dumps(server.deploy("other", tmp_path)[1])
    (tmp_path / "packed.safetensors").write_bytes(content[:-9])
    assert "is not a safetensors file" in json.dumps(server.deploy("other", tmp_path)[1])
    (tmp_path / "packed.safetensors").unlink()
    status, answer = server.deploy("other", tmp_path, backend="packed")
    assert status >= 400
    assert "backend is 'packed', expected one of torch" in json.dumps(answer)


@pytest.mark.parametrize("name", ["gpt", "charlm"])
def test_packed_models_generate_with_cached_keys_and_values(name: str, tmp_path: Path) -> None:
    options = {"width": 32, "layers": 2, "heads": 2}
    described = {
        "input_shape": [24],
        "classes": 11,
        "input_dtype": "int32",
        "task": "next_token",
        "options": options,
    }
    spec = zoo.get(name, input_shape=(24,), classes=11, input_dtype="int32", task="next_token", **options)
    module = write_packed(torch_model(tmp_path, name, **described), spec)
    small = packed.load_packed(tmp_path / "packed.safetensors", spec)
    verify(spec, small, require_layout(spec, small, deterministic=True))
    x, _ = spec.example_batch(2)
    with torch.inference_mode():
        torch.testing.assert_close(small(x), module(x), rtol=1e-5, atol=1e-5)
