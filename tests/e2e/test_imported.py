"""Models from elsewhere on their way to devices: `fedloop model import`, its export from the registry, a release, predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from models.compress.report import logits
from models.pretrain.params import params_of
from tests.coordinator.registry.test_commands import fedloop, served
from tests.support.cli import assert_refused, run_cli, run_here
from tests.support.compressing import cnn, digits

pytestmark = pytest.mark.slow

EDGE = Path(sys.executable).parent / "fedloop-edge"
CNN = ["--set", "model.name=cnn"]
DATA = ["--data", "digits"]


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with served(tmp_path_factory.mktemp("coordinator") / "home"):
        yield


def safetensors_file(folder: Path) -> list[str]:
    safetensors.numpy.save_file(params_of(cnn().module), folder / "net.safetensors")
    return [str(folder / "net.safetensors")]


def hugging_face_folder(folder: Path) -> list[str]:
    """In two shards, with their index."""
    params = params_of(cnn().module)
    place = folder / "hf"
    place.mkdir()
    names = {
        name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(params))
    }
    for shard in set(names.values()):
        safetensors.numpy.save_file({n: params[n] for n in params if names[n] == shard}, place / shard)
    index = {"metadata": {"total_size": sum(each.nbytes for each in params.values())}, "weight_map": names}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "config.json").write_text('{"architectures": ["Net"]}')
    return [str(place)]


def onnx_file(folder: Path) -> list[str]:
    from models.onnx.export import to_onnx

    (folder / "net.onnx").write_bytes(to_onnx(cnn().module, cnn().spec).SerializeToString())
    return [str(folder / "net.onnx"), "--model", "cnn"]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(safetensors_file, marks=pytest.mark.extended),
        pytest.param(hugging_face_folder, marks=pytest.mark.extended),
        onnx_file,
    ],
)
def test_a_model_from_elsewhere_is_released_and_predicts(
    coordinator: None, made: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    name = made.__name__.replace("_", "-")
    fedloop("import", *made(tmp_path), "--name", name)
    fedloop("export", f"{name}:1", "--out", tmp_path / "fetched")
    known = CNN if made is not onnx_file else []  # its model.json says it

    none = run_here("export", tmp_path / "fetched", "--name", name, "--out", tmp_path / "release")
    done = run_cli(
        "export", tmp_path / "fetched", "--name", name, *DATA, *known, "--out", tmp_path / "release"
    )

    assert_refused(none, "an imported model", "--data")
    assert ("model.name" in none.stderr) == bool(known)
    assert done.returncode == 0, done.stderr
    rows = digits().x_test[:20]
    np.save(tmp_path / "rows.npy", rows)
    result = subprocess.run(
        [EDGE, "predict", tmp_path / "rows.npy", "--release", tmp_path / "release", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    labels = [each["label"] for each in json.loads(result.stdout)["predictions"]]
    assert labels == logits(cnn().module, rows).argmax(-1).tolist()


@pytest.mark.extended
def test_missing_or_unfit_weights_are_named(coordinator: None, tmp_path: Path) -> None:
    safetensors_file(tmp_path)
    onnx_file(tmp_path)
    (tmp_path / "as-it-is").mkdir()
    (tmp_path / "net.onnx").rename(tmp_path / "as-it-is" / "model.onnx")

    def refused(folder: Path, *words: str, requested: list[str]) -> None:
        done = run_here("export", folder, "--name", "net", *requested, "--out", tmp_path / "release")
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        for word in words:
            assert word in done.stderr

    refused(tmp_path / "as-it-is", "import its model.onnx with --model NAME", requested=DATA)
    refused(tmp_path, "unknown, did you mean 'phrasebank'", requested=["--data", "phrasebonk", *CNN])
    refused(tmp_path, "params of model 'mlp'", requested=[*DATA, "--set", "model.name=mlp"])
    refused(tmp_path, "data.lable", requested=[*DATA, "--set", "data.lable=x", *CNN])
    refused(tmp_path, "expected data.KEY=VALUE or model.KEY=VALUE", requested=[*DATA, "--set", "x.y=1"])


@pytest.mark.extended
def test_a_table_of_ones_own_is_read_and_compress_takes_it_too(tmp_path: Path) -> None:
    from models import zoo

    rows, features = 80, 4
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features))
    y = np.where(x[:, 0] > 0, "yes", "no")
    lines = [",".join([*(f"{value:.4f}" for value in row), label]) for row, label in zip(x, y, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,c,d,kind", *lines]) + "\n")
    module = zoo.get("mlp", input_shape=(features,), classes=2).build(0)
    (tmp_path / "there").mkdir()
    safetensors.numpy.save_file(params_of(module), tmp_path / "there" / "model.safetensors")
    requested = ["--data", tmp_path / "table.csv", "--set", "data.label=kind", "--set", "model.name=mlp"]

    done = run_cli("compress", tmp_path / "there", *requested, "--json", "--out", tmp_path / "small")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"]["model"] == "mlp"
    assert json.loads((tmp_path / "small" / "lineage.json").read_text())["data_public"] is False
