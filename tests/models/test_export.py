"""Export as a user meets it: a request, a process, an artifact in the cache or one readable reason."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edge_client.data.examples import Examples
from edge_client.files import default_cache_dir
from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.train.torch_trainer import TorchRuntime, read
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import manifest
from edge_client.wire.strict import InvalidDocument
from models import user_code
from models.conversion import request_cache
from models.conversion.request import (
    ExportError,
    ExportRequest,
    export,
)
from models.zoo.spec import ModelSpec
from tests.support.artifacts import ARCHITECTURES, ROOT, exported
from tests.support.artifacts import cache_dir as kept
from tests.support.long import extended

OWN_MODELS = '''
import os
import signal

import torch
from torch import nn


def pooled(input_shape, classes):
    """Sequential, so its tensors' names begin with digits; overlapping, padded, plain and average pooling."""
    return nn.Sequential(
        nn.Unflatten(1, (1, input_shape[0])), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 8, 1), nn.SiLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 2 * 2, classes),
    )


class Orthogonal(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        return self.fc(torch.linalg.qr(x)[0].sum(1))


def orthogonal(input_shape, classes):
    return Orthogonal(classes)


def broken(input_shape, classes):
    raise KeyError("no such thing")


def talkative(input_shape, classes):
    print("a line on standard output")
    os.system("echo and one from a child")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.Dropout(0.1))


def killed(input_shape, classes):
    os.kill(os.getpid(), signal.SIGKILL)


def waiting(input_shape, classes):
    with open("pid", "w") as file:
        file.write(f"{os.getpid()}\\n")
    signal.pause()
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with the user's own models."""
    (tmp_path / "nets.py").write_text(OWN_MODELS)
    return tmp_path


def requested(build: str) -> ExportRequest:
    return ExportRequest(f"nets:{build}", {}, (8, 8), 10, batch_size=4)


@pytest.mark.extended
@pytest.mark.slow
def test_a_users_own_module_exports_and_trains_as_in_pytorch(own: Path) -> None:
    found = export(requested("pooled"), kept(), code_folder=own)
    described = manifest.from_json(found.manifest.read_bytes())
    spec = own_spec(own, "pooled")
    module = spec.build(seed=3)
    rng = np.random.default_rng(0)
    data = Examples(rng.random((10, 8, 8), np.float32), rng.integers(0, 10, 10).astype(np.int32))
    task = TrainTask(seed=1, batch_size=4, lr=0.1, epochs=1)

    got = Trainer(LiteRTRuntime(found.tflite, described)).train(read(module), task, data)

    expected = Trainer(TorchRuntime(module, spec.loss)).train(read(module), task, data)
    assert "1.weight" in got.update.delta
    for name, value in expected.update.delta.items():
        np.testing.assert_allclose(got.update.delta[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ("broken", r"failed while built at .*, line \d+: KeyError: 'no such thing'"),
        ("killed", r"the export process was killed by signal 9 \(the machine may be out of memory\)"),
        *extended(
            ("talkative", r"is random"),
            ("absent", r"nets has no function 'absent'; it has: .*pooled"),
        ),
    ],
)
@pytest.mark.slow
def test_a_model_that_cannot_be_exported_is_refused_with_its_reason(
    own: Path, build: str, reason: str
) -> None:
    with pytest.raises(ExportError, match=reason) as refused:
        export(requested(build), own / "cache", code_folder=own)

    assert str(refused.value).startswith(f"exporting nets:{build}: ")
    assert "Traceback" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.extended
@pytest.mark.slow
def test_an_operation_without_a_lowering_is_named(own: Path) -> None:
    with pytest.raises(ExportError, match=r"LiteRT cannot take this model; operation aten\.linalg_qr"):
        export(requested("orthogonal"), own / "cache", code_folder=own)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ExportRequest("charlm", {"width": 30}, (8,), 9, "int32", "next_token"), "width 30 and heads 4"),
        *extended((ExportRequest("mlp", {}, (8,), 0), r"export request.classes is 0, expected 1 or more")),
    ],
)
@pytest.mark.slow
def test_a_wrong_request_is_refused_with_its_reason(
    tmp_path: Path, request_: ExportRequest, reason: str
) -> None:
    with pytest.raises(ExportError, match=reason):
        export(request_, tmp_path, code_folder=tmp_path)


@pytest.mark.slow
@pytest.mark.extended
def test_a_code_folder_or_cache_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ExportError, match=r"the folder of the model's code, .*nowhere, does not exist"):
        export(ARCHITECTURES["cnn"], tmp_path, code_folder=tmp_path / "nowhere")
    with pytest.raises(ExportError, match=r"the cache cannot be used: .*file"):
        export(ARCHITECTURES["cnn"], tmp_path / "file" / "cache", code_folder=ROOT)


@pytest.mark.extended
@pytest.mark.slow
def test_the_second_export_is_a_hit_that_converts_nothing() -> None:
    first, _ = exported("cnn")

    # With the converter unable to be imported, a hit is the only way to an answer.
    answer = converting(ARCHITECTURES["cnn"], kept(), "import sys; sys.modules['litert_torch'] = None")

    assert answer["cached"] is True
    assert (Path(answer["tflite"]), Path(answer["manifest"])) == (first.tflite, first.manifest)
    assert "convert" not in answer["seconds"]


@pytest.mark.extended
def test_a_request_answered_before_needs_no_process_where_the_model_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = exported("cnn")
    folder = tmp_path / "artifacts"
    folder.mkdir()
    for path in (first.tflite, first.manifest):
        (folder / path.name).write_bytes(path.read_bytes())
    request = ARCHITECTURES["cnn"]
    request_cache.store(
        tmp_path,
        request_cache.digest(request.to_json()),
        request_cache.Exported(folder / first.tflite.name, folder / first.manifest.name),
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))

    again = export(request, tmp_path, code_folder=tmp_path)
    assert (again.cached, again.tflite, dict(again.seconds)) == (True, folder / first.tflite.name, {})

    (folder / first.tflite.name).write_bytes(b"damaged")
    with pytest.raises(pytest.fail.Exception, match="a process was started"):
        export(request, tmp_path, code_folder=tmp_path)


def test_the_cache_key_has_all_that_decides_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    request = ARCHITECTURES["cnn"].to_json()
    first = request_cache.digest(request)
    assert request_cache.digest(request) == first
    assert request_cache.digest(request | {"batch_size": request["batch_size"] + 1}) != first
    monkeypatch.setattr(request_cache, "version", lambda package: "another")
    assert request_cache.digest(request) != first


def test_only_models_of_our_own_are_known_by_their_request() -> None:
    assert all(
        request_cache.is_ours(name) for name in ("logreg", "mlp", "cnn", "resnet8", "charlm", "textcls")
    )
    assert not any(request_cache.is_ours(name) for name in ("nets:pooled", "adapted", "net.keras", "nothing"))


@pytest.mark.extended
@pytest.mark.slow
def test_exports_of_one_model_at_once_convert_it_once(tmp_path: Path) -> None:
    request = ExportRequest("logreg", {}, (3,), 2, batch_size=2)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: export(request, tmp_path, code_folder=tmp_path), range(3)))

    assert sorted(one.cached for one in found) == [False, True, True]
    assert len({one.tflite for one in found}) == 1
    LiteRTRuntime(found[0].tflite, manifest.from_json(found[0].manifest.read_bytes())).self_test()
    assert sorted(path.suffix for path in (tmp_path / "artifacts").iterdir()) == [".json", ".lock", ".tflite"]


@pytest.mark.slow
def test_the_export_process_dies_with_its_caller(own: Path) -> None:
    os.mkfifo(own / "pid")
    asker = subprocess.Popen(
        [sys.executable, "-P", "-c", ASKER, str(own)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with (own / "pid").open() as pipe:
            exporter = int(pipe.readline())
        watched = os.pidfd_open(exporter)
        asker.kill()
        asker.wait()
        ended, _, _ = select.select([watched], [], [], 60)
        assert ended, "the export process outlives the one that asked"
    finally:
        asker.kill()
        asker.wait()


ASKER = """
import sys
from pathlib import Path
from models.conversion.request import ExportRequest, export

export(ExportRequest("nets:waiting", {}, (8, 8), 10), Path(sys.argv[1]) / "cache", code_folder=Path(sys.argv[1]))
"""


def test_asking_imports_no_framework() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import models.conversion.request, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )

    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "jax", "litert_torch", "ai_edge_litert", "tensorflow"}


def test_a_request_survives_json() -> None:
    request = ARCHITECTURES["charlm"]

    assert ExportRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    with pytest.raises(InvalidDocument, match=r"export request has the unknown key 'batch'"):
        ExportRequest.from_json(request.to_json() | {"input_shape": [3], "batch": 3})


def test_the_cache_folder_is_the_first_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FEDLOOP_CACHE_DIR", raising=False)
    assert default_cache_dir() == Path("/home/me/.cache/fedloop")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_cache_dir() == Path("/cache/fedloop")
    monkeypatch.setenv("FEDLOOP_CACHE_DIR", "/own")
    assert default_cache_dir() == Path("/own")


def converting(request: ExportRequest, cache: Path, first: str) -> dict[str, object]:
    """The JSON answer of an export process that runs the statement `first` before anything else."""
    document = {"request": request.to_json(), "cache_dir": str(cache)}
    code = f"{first}\nimport sys\nfrom models.conversion.convert import main\nsys.argv = ['convert']\nmain()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        check=False,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def own_spec(folder: Path, build: str) -> ModelSpec:
    builder = user_code.load(f"nets:{build}", folder)
    return ModelSpec(build, lambda: builder(input_shape=(8, 8), classes=10), (8, 8), 10)
