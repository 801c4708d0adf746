"""`fedloop model` against a real `fedloop serve`, and a SIGKILL of it between files and row, and after."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import Result
from typer.testing import CliRunner

from coordinator import extras, failpoints
from coordinator.commands.model import app
from coordinator.errors import UserError
from coordinator.operator.client import Refused, Unreachable
from edge_client.processes.process import tie_to_parent
from tests.support import model_folders as left
from tests.support.cli import FEDLOOP, assert_refused, run_here
from tests.support.long import extended

pytestmark = pytest.mark.slow

Fedloop = Callable[..., Result]


@contextmanager
def served(home: Path, failpoint: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator; commands of this process find it."""
    command = [str(FEDLOOP), "serve", "--home", str(home), "--operator", "127.0.0.1:0"]
    command += ["--device", "127.0.0.1:0"]
    with (home.parent / "serve.log").open("ab") as log, pytest.MonkeyPatch.context() as patch:
        environment = {**os.environ, "FEDLOOP_FAILPOINT": failpoint}
        process = subprocess.Popen(
            tie_to_parent(command), stdout=subprocess.PIPE, stderr=log, env=environment
        )
        assert process.stdout is not None
        try:
            patch.setenv("FEDLOOP_COORDINATOR", json.loads(process.stdout.readline())["operator"])
            patch.setenv("FEDLOOP_ADMIN_TOKEN", (home / "admin.token").read_text().strip())
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with served(tmp_path_factory.mktemp("coordinator") / "home"):
        yield


def fedloop(*args: str | Path) -> Result:
    """`fedloop model …`; a user's mistake is raised as an exception."""
    done = CliRunner().invoke(app, [str(each) for each in args])
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_from_folders_to_a_graph_and_back(coordinator: None, tmp_path: Path) -> None:
    params = left.pretrained(tmp_path / "teacher")
    student, small = left.compressed(tmp_path / "small", params)
    left.release(tmp_path / "release", 3, student, small)
    assert fedloop("add", tmp_path / "teacher", "--name", "digits").stdout.startswith("digits:1  pretrain")
    assert fedloop("add", tmp_path / "small", "--name", "digits").stdout.startswith("digits:2  compress")
    assert fedloop("add", tmp_path / "release", "--name", "digits").stdout.startswith("digits:3  release")

    assert fedloop("alias", "digits:2", "champion").stdout == "digits@champion means digits:2\n"
    moved = fedloop("alias", "digits:3", "champion", "--expect", "2").stdout
    assert moved == "digits@champion means digits:3, before digits:2\n"
    with pytest.raises(Refused, match="digits@champion now refers to digits:3"):
        fedloop("alias", "digits:1", "champion", "--expect", "2")
    assert fedloop("aliases", "digits").stdout.splitlines()[0].endswith("champion: digits:2 -> digits:3")

    assert "champion = 3" in fedloop("list").stdout
    listed = json.loads(fedloop("list", "digits", "--json").stdout)
    assert [version["number"] for version in listed] == [3, 2, 1]
    assert "made from data " + left.DATA in fedloop("show", "digits:1").stdout
    assert json.loads(fedloop("show", "digits@champion", "--json").stdout)["number"] == 3

    lines = fedloop("lineage", "digits@champion").stdout.splitlines()
    order = ["lineage of digits:3", "data dddd", "digits:1", "digits:2", "digits:3 @champion"]
    places = [next(place for place, line in enumerate(lines) if each in line) for each in order]
    assert places == sorted(places)
    assert '"digits:2" -> "digits:3"' in fedloop("lineage", "digits:1", "--dot").stdout
    assert json.loads(fedloop("lineage", "digits:1", "--json").stdout)["cut"] is False

    found = json.loads(fedloop("diff", "digits:1", "digits:2", "--json").stdout)["differences"]
    assert {"what": "stage", "before": "pretrain", "after": "compress"} in found
    assert "have the same" in fedloop("diff", "digits:1", "digits:1").stdout

    fedloop("export", "digits:3", "--out", tmp_path / "back")
    for name in ("manifest.json", "model.tflite"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "release" / name).read_bytes()
    again = fedloop("add", tmp_path / "back", "--name", "digits").stdout
    assert again.startswith("digits:3  release")


def test_a_model_from_elsewhere_is_imported(coordinator: None, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(left.params(60))
    fedloop("import", tmp_path / "m.safetensors", "--name", "foreign")
    (tmp_path / "m.tflite").write_bytes(left.tflite(60))
    fedloop("import", tmp_path / "m.tflite", "--name", "foreign", "--parent", "foreign:1")
    graph = json.loads(fedloop("lineage", "foreign", "--json").stdout)
    assert graph["edges"] == [{"parent": "foreign:1", "child": "foreign:2", "relation": "params"}]


def trained_cnn(folder: Path) -> bytes:
    """A pretraining's folder with a working model; returns its params."""
    shapes = {"conv1": (2, 1, 3, 3), "conv2": (3, 2, 3, 3), "fc": (10, 48)}
    rng = np.random.default_rng(3)
    tensors = {f"{layer}.weight": rng.normal(size=shape) for layer, shape in shapes.items()}
    tensors |= {f"{layer}.bias": rng.normal(size=shape[0]) for layer, shape in shapes.items()}
    left.pretrained(folder)
    (folder / "report.json").unlink()
    params = safetensors.numpy.save({key: tensors[key].astype(np.float32) for key in sorted(tensors)})
    digest = left.write(folder, "model.safetensors", params)
    left.write(folder, "lineage.json", {"model_sha256": digest, "data_fingerprint": left.DATA})
    model = {"name": "cnn", "options": {"channels": [2, 3]}, "input_shape": [8, 8], "classes": 10}
    left.write(folder, "model.json", {**model, "sha256": digest})
    return params


@pytest.mark.extended
def test_a_model_keeps_its_params_through_onnx(coordinator: None, tmp_path: Path) -> None:
    params = trained_cnn(tmp_path / "trained")
    fedloop("add", tmp_path / "trained", "--name", "net")
    result = json.loads(
        fedloop("export", "net:1", "--format", "onnx", "--out", tmp_path / "out", "--json").stdout
    )
    assert result["opset"] == {"ai.onnx": 20} and result["verified"]["largest_difference"] < 1e-4
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.onnx", "onnx.json"}

    file = tmp_path / "out" / "model.onnx"
    fedloop("import", file, "--name", "net", "--model", "cnn", "--option", "channels=[2, 3]")
    found = json.loads(fedloop("show", "net:2", "--json").stdout)
    assert (found["kind"], found["stage"]) == ("onnx", "import")
    assert found["about"]["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 8, 8]}]
    assert found["about"]["model"]["name"] == "cnn"
    fedloop("export", "net:2", "--out", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == params
    assert (tmp_path / "back" / "model.onnx").read_bytes() == file.read_bytes()

    fedloop("import", file, "--name", "as-it-is")
    files = json.loads(fedloop("show", "as-it-is", "--json").stdout)["files"]
    assert [each["path"] for each in files] == ["model.onnx", "onnx.json"]
    with pytest.raises(UserError, match=r"has no model\.safetensors with a model\.json"):
        fedloop("export", "as-it-is", "--format", "onnx", "--out", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_an_invalid_or_unsuitable_onnx_file_is_refused(coordinator: None, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"nothing of the kind")
    done = run_here("model", "import", tmp_path / "m.onnx", "--name", "net")
    assert_refused(done, str(tmp_path / "m.onnx"), "is not a")
    for words, *args in (
        ("is unknown, did you mean 'cnn'?", "--model", "cn"),
        ("model.chanels is not an option of cnn", "--model", "cnn", "--option", "chanels=3"),
        ("expected one of the catalog", "--model", "os:system"),
        ("--option needs --model", "--option", "hidden=3"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            fedloop("import", tmp_path / "m.onnx", "--name", "net", *args)
    with pytest.raises(UserError, match="apply to ONNX files only"):
        fedloop("import", tmp_path / "m.tflite", "--name", "net", "--model", "cnn")
    with pytest.raises(UserError, match="expected files, onnx or hugging-face"):
        fedloop("export", "net:1", "--format", "onxn", "--out", tmp_path / "out")


def test_without_the_packages_for_onnx_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        extras, "installed_version", lambda name: None if name == "onnxruntime" else version(name)
    )
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"needs onnxruntime, not installed here; pip install 'fedloop\[onnx\]'"
    ):
        fedloop("import", tmp_path / "m.onnx", "--name", "net")


def test_a_large_file_is_sent_in_pieces(coordinator: None, tmp_path: Path) -> None:
    large = left.tflite(0) + bytes(5 * 2**20)
    (tmp_path / "m.tflite").write_bytes(large)
    fedloop("import", tmp_path / "m.tflite", "--name", "large")
    fedloop("export", "large", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "model.tflite").read_bytes() == large


def test_mistakes_are_reported_in_one_line(coordinator: None, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_bytes(left.params(9))
    done = run_here("model", "add", tmp_path / "run", "--name", "digits")
    assert_refused(done, str(tmp_path / "run"), "model.safetensors", "lineage.json")
    (tmp_path / "model.pt").write_bytes(b"x")
    assert_refused(run_here("model", "import", tmp_path / "model.pt", "--name", "digits"), "pickles")
    with pytest.raises(UserError, match="no name for a model"):
        fedloop("import", _tflite(tmp_path), "--name", "Not/This")
    with pytest.raises(UserError, match="not a release folder"):
        left.pretrained(tmp_path / "run")
        fedloop("add", tmp_path / "run", "--name", "digits", "--renumber")
    with pytest.raises(Refused, match="there is no model nobody"):
        fedloop("show", "nobody:1")
    with pytest.raises(Refused, match="names no version"):
        fedloop("show", "a:b:c")
    with pytest.raises(UserError, match="no run matches 'nobody'; there are no runs"):
        fedloop("add-run", "nobody", "--name", "digits")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"x")
    fedloop("import", _tflite(tmp_path), "--name", "mistakes")
    with pytest.raises(UserError, match="the folder is not empty"):
        fedloop("export", "mistakes", "--out", tmp_path / "full")


@pytest.mark.parametrize(
    "failpoint",
    extended(*failpoints.REGISTRY_NAMES),  # test_run_registration has one for `make test`
)
def test_a_kill_during_registration_leaves_nothing_half_done(tmp_path: Path, failpoint: str) -> None:
    """A client without a response asks again, and there is one version in every case."""
    home = tmp_path / "home"
    left.pretrained(tmp_path / "run")
    with served(home, failpoint) as process:
        with pytest.raises(Unreachable):
            fedloop("add", tmp_path / "run", "--name", "digits")
        process.wait(60)
        stored = {path.name for path in (home / "blobs").iterdir()}
    with served(home):
        known = json.loads(fedloop("list", "--json").stdout)
        assert len(known) == (failpoint == "registry.committed")
        kept = {path.name for path in (home / "blobs").iterdir()}
        assert kept == (stored if known else set())
        again = json.loads(fedloop("add", tmp_path / "run", "--name", "digits", "--json").stdout)
        assert again["version"] == "digits:1"
        fedloop("export", "digits:1", "--out", tmp_path / "back")
        assert (tmp_path / "back" / "model.safetensors").read_bytes() == left.params(0)


def _tflite(folder: Path) -> Path:
    (folder / "m.tflite").write_bytes(left.tflite(70))
    return folder / "m.tflite"
