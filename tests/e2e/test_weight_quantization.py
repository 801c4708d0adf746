"""A step `gptq` from a pretraining on real text to a packed model that answers, predicts and is registered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from models import zoo
from models.compress import report
from models.compress.pruning.structure import rebuild
from models.compress.quantization.packed import PackedLinear, load_packed
from models.job import read_params
from models.zoo.spec import ModelSpec
from tests.coordinator.registry.test_commands import fedloop, served
from tests.support import require
from tests.support.cli import options, report_of, run_cli

pytestmark = pytest.mark.slow

PLAYS = (
    "data.dataset=shakespeare",
    "data.length=16",
    "data.test_rows=60",
    "model.name=gpt",
    "model.width=128",
    "model.layers=1",
    "model.heads=4",
    "train.steps=20",
)
PIPELINE = """
rows = 100
test_rows = 40

[[step]]
kind = "gptq"
bits = 4
group = 128
"""


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `plays` is a pretraining, and `small` what a pipeline made of it."""
    folder = tmp_path_factory.mktemp("weights")
    data = require.data_dir("tinyshakespeare.txt")
    (folder / "small.toml").write_text(PIPELINE)
    for command in (
        ("pretrain", "--out", "plays", "--data-dir", str(data), *options(PLAYS)),
        ("compress", "plays", "--pipeline", "small.toml", "--out", "small"),
    ):
        done = run_cli(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert "gptq: 7 matrices, " in done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with served(tmp_path_factory.mktemp("coordinator") / "home"):
        yield


def spec_of(folder: Path) -> ModelSpec:
    about = json.loads((folder / "model.json").read_text())
    known = {key: about[key] for key in ("name", "classes", "input_dtype", "task")}
    return zoo.get(**known, input_shape=tuple(about["input_shape"]), **about["options"])


def test_the_packed_model_answers_as_the_float_one_and_is_six_times_smaller(plays: Path) -> None:
    small, spec = plays / "small", spec_of(plays / "small")
    packed = load_packed(small / "packed.safetensors", spec)
    assert sum(isinstance(layer, PackedLinear) for layer in packed.modules()) == 7
    rows = np.load(small / "arrays" / "x_test.npy")
    expected = report.logits(rebuild(spec, read_params(small / "model.safetensors")), rows)
    np.testing.assert_allclose(report.logits(packed, rows), expected, rtol=1e-5, atol=1e-5)

    final, (step,) = report_of(small)["final"], report_of(small)["steps"]
    assert (final["packed"], final["precision"], final["file"]) == ("packed.safetensors", "weight-int4", None)
    assert step["facts"]["times_smaller"] > 6
    assert final["bytes"] == (small / "packed.safetensors").stat().st_size
    digest = hashlib.sha256((small / "packed.safetensors").read_bytes()).hexdigest()
    assert report_of(small)["lineage"]["packed_sha256"] == digest


def test_its_folder_predicts_and_is_registered(coordinator: None, plays: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("First Citizen: speak")
    predicted = run_cli("predict", plays / "small", tmp_path / "text.txt")
    assert predicted.returncode == 0, predicted.stderr
    fedloop("add", plays / "plays", "--name", "plays")
    assert fedloop("add", plays / "small", "--name", "plays").stdout.startswith("plays:2  compress")
    fedloop("export", "plays:2", "--out", tmp_path / "back")
    back = tmp_path / "back" / "packed.safetensors"
    assert back.read_bytes() == (plays / "small" / "packed.safetensors").read_bytes()
