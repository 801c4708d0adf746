"""What a device can train is known from metadata; a small daemon imports none of it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_client.data.examples import PADDING, Examples
from edge_client.train.resolve import (
    CannotRun,
    installed_models,
    installed_runtimes,
    masked_cross_entropy,
    require_compatible,
    runtime_for,
)
from edge_client.wire.device import ModelRef
from models.zoo import spec


def test_installed_runtimes_have_their_versions() -> None:
    assert installed_runtimes() == {
        "litert": version("ai-edge-litert"),
        "torch": version("torch"),
        "tensorflow": version("tensorflow-cpu"),
    }


def test_installed_models_are_those_of_the_entry_points() -> None:
    assert {"cnn", "logreg", "resnet8"} <= set(installed_models())


def test_a_task_may_divide_the_outputs_of_layers_that_the_model_has() -> None:
    shape = ((8, 8), 10, "float32", "classification")
    plain, divided = (
        runtime_for("torch", ModelRef("mlp", {"hidden": [4]}, *shape, divisors=divisors), None, None)
        for divisors in ({}, {"hidden.0": 0.25})
    )
    params = {name: value.detach().numpy() for name, value in plain.module.named_parameters()}  # type: ignore[attr-defined]
    x = np.random.default_rng(1).random((6, 8, 8), np.float32)
    wider = {**params, "fc.weight": params["fc.weight"] * 4}
    np.testing.assert_allclose(divided.logits(params, x), plain.logits(wider, x), rtol=1e-5, atol=1e-6)
    with pytest.raises(CannotRun, match=r"the model 'mlp' lacks a layer of the task: .*7"):
        runtime_for("torch", ModelRef("mlp", {"hidden": [4]}, *shape, divisors={"hidden.7": 0.5}), None, None)
    with pytest.raises(CannotRun, match="no TensorFlow twin of this width"):
        runtime_for(
            "tensorflow", ModelRef("mlp", {"hidden": [4]}, *shape, divisors={"hidden.0": 0.5}), None, None
        )


def test_knowing_all_that_imports_no_framework_and_no_numpy() -> None:
    code = (
        "import json, sys\n"
        "import edge_client.data, edge_client.eligibility, edge_client.train.process\n"
        "from edge_client.train import resolve\n"
        "resolve.installed_runtimes(), resolve.installed_models()\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)

    loaded = set(json.loads(done.stdout))

    assert not loaded & {
        "torch",
        "tensorflow",
        "jax",
        "ai_edge_litert",
        "numpy",
        "scipy",
        "models",
        "pyarrow",
        "PIL",
    }


def test_the_loss_of_a_bare_module_is_that_of_ours() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 4), (3, 5, 4)):
        logits = torch.randn(shape, generator=generator)
        y = torch.randint(0, 4, shape[:-1], generator=generator).int()
        y.view(-1)[0] = PADDING
        torch.testing.assert_close(masked_cross_entropy(logits, y), spec.masked_cross_entropy(logits, y))


IMAGES = ModelRef("cnn", {}, (8, 8), 10, "float32", "classification")
TEXT = ModelRef("charlm", {}, (5,), 30, "int32", "next_token")


def examples(x_shape: tuple[int, ...], y_shape: tuple[int, ...], dtype: str, label: int = 0) -> Examples:
    return Examples(np.zeros(x_shape, dtype), np.full(y_shape, label, np.int32))


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (examples((3, 8, 8), (3,), "float32", 9), IMAGES),
        (examples((2, 5), (2, 5), "int32", 29), TEXT),
        (examples((0, 8, 8), (0,), "float32"), IMAGES),
    ],
)
def test_fitting_data_passes(data: Examples, model: ModelRef) -> None:
    require_compatible(data, model)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (
            examples((3, 64), (3,), "float32"),
            IMAGES,
            r"examples of shape \[64\], the model 'cnn' takes \[8, 8\]",
        ),
        (examples((3, 8, 8), (3,), "int32"), IMAGES, r"examples of int32, the model 'cnn' takes float32"),
        (
            examples((3, 8, 8), (3,), "float32", 10),
            IMAGES,
            r"a label 10, the model 'cnn' has 10 classes, 0 to 9",
        ),
        (examples((2, 5), (2,), "int32"), TEXT, r"labels of shape \[\], the model 'charlm' takes \[5\]"),
    ],
)
def test_data_that_does_not_fit_is_reported_in_plain_text(
    data: Examples, model: ModelRef, message: str
) -> None:
    with pytest.raises(CannotRun, match=message) as refused:
        require_compatible(data, model)

    assert refused.value.code == "no_data"


def test_nothing_of_the_device_names_the_package_of_models() -> None:
    for path in (Path(__file__).parents[2] / "edge_client").rglob("*.py"):
        text = path.read_text("utf-8")
        assert "import models" not in text and "from models" not in text, path
