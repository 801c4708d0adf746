"""Releases: golden answers that right runtimes pass and wrong ones do not, and manifests that claim only what was seen."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.numpy

from coordinator.exporting import PRECISIONS
from edge_client.infer import selftest
from edge_client.infer.runtime import load
from edge_client.train.golden import SelfTestFailed
from edge_client.wire import inference
from edge_client.wire.inference import InferenceManifest
from models.compress.quantize import convert
from models.compress.step import Precision
from models.export.inference import NotReleasable, Options, readable, release
from models.export.verify import RUNTIMES, verify
from models.job import JobError
from models.pretrain.params import params_of
from tests.support.cli import run_cli, run_here
from tests.support.releases import Released, constrained_python, model, released, source, tflite

pytestmark = pytest.mark.slow

CLAIMS: dict[Precision, set[str]] = {
    "float32": {"litert", "tflite-runtime", "tflite-micro"},
    "weight-int8": {"litert", "tflite-runtime"},
    "dynamic-int8": {"litert"},
    "static-int8": {"litert", "tflite-runtime", "tflite-micro"},
}


def manifest_of(made: Released) -> InferenceManifest:
    return inference.from_json((made.folder / "manifest.json").read_bytes())


def rewritten(made: Released, folder: Path, **changed: Any) -> Path:
    """The release with another manifest."""
    folder.mkdir()
    (folder / "manifest.json").write_text(replace(manifest_of(made), **changed).to_json())
    (folder / "model.tflite").write_bytes((made.folder / "model.tflite").read_bytes())
    return folder


@pytest.mark.parametrize("precision", CLAIMS)
def test_a_release_claims_the_runtimes_that_answer_right_and_says_why_not_others(
    precision: Precision,
) -> None:
    constrained_python()

    made = released(precision)

    assert set(manifest_of(made).runtimes) == CLAIMS[precision]
    assert {v["runtime"] for v in made.report["verdicts"] if not v["refused"]} == CLAIMS[precision]
    assert selftest.require(load(made.folder)) == made.verdict("litert")["accuracy"]
    assert made.report["takes_batches"] and manifest_of(made).minimum_runtime != "unknown"


@pytest.mark.parametrize("precision", ["dynamic-int8", "weight-int8"])
def test_a_runtime_that_computes_garbage_is_refused_by_its_own_answers(
    precision: Precision, tmp_path: Path
) -> None:
    """tflite-runtime 2.14 opens a dynamic-int8 file without a word, tflite-micro one of int8 weights."""
    python = constrained_python()
    forged = rewritten(released(precision), tmp_path / "forged", runtimes=RUNTIMES)
    runtime = "tflite-runtime" if precision == "dynamic-int8" else "tflite-micro"

    verdicts = {verdict.runtime: verdict for verdict in verify(forged, python)}

    assert verdicts["litert"].passed
    assert "self-test failed: infer gave logits of row" in verdicts[runtime].refused


def test_the_constrained_device_refuses_what_is_not_for_it_before_it_answers() -> None:
    python = constrained_python()
    folder = released("dynamic-int8").folder

    command = [str(python.parent / "fedloop-edge"), "predict", "none.npy", "--release", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 2
    assert "digits:1 (dynamic-int8) is for litert; this device has tflite-runtime" in done.stderr


def test_a_runtime_that_is_not_here_is_not_claimed(tmp_path: Path) -> None:
    made = rewritten(released("static-int8"), tmp_path / "all", runtimes=RUNTIMES)

    verdict = {each.runtime: each for each in verify(made, tmp_path / "no-python")}["tflite-runtime"]

    assert not verdict.passed and "no-python does not exist" in verdict.refused
    (tmp_path / "no-program").touch()
    verdict = {each.runtime: each for each in verify(made, tmp_path / "no-program")}["tflite-runtime"]
    assert not verdict.passed and "no-program is not executable" in verdict.refused


@pytest.mark.parametrize(
    "content", [b"", b"PK: a zip, and not a flatbuffer", b"\x1c\0\0\0TFL3" + b"\xff" * 60]
)
def test_a_file_that_is_no_tflite_is_refused_in_words(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(content)
    with pytest.raises(JobError, match=r"model\.tflite is no \.tflite file"):
        readable(tmp_path / "model.tflite")
    with pytest.raises(JobError, match="No such file"):
        readable(tmp_path / "absent.tflite")


def test_memory_and_arena_are_measured() -> None:
    manifest = manifest_of(released("static-int8"))

    assert manifest.memory_bytes >= manifest.file.size_bytes
    assert manifest.arena_bytes is not None and 1024 <= manifest.arena_bytes <= 65_536
    assert manifest_of(released("dynamic-int8")).arena_bytes is None


@pytest.mark.parametrize("precision", CLAIMS)
def test_every_class_of_every_golden_row_counts(precision: Precision, tmp_path: Path) -> None:
    """Moved by three tolerances, each is refused: no answer is so loose that it says nothing."""
    made = released(precision)
    manifest = manifest_of(made)
    allowed = manifest.golden.tolerance
    for row, place in [(0, 0), (3, 7), (len(manifest.golden.logits) - 1, 9)]:
        logits = [list(each) for each in manifest.golden.logits]
        logits[row][place] += 3 * (allowed.absolute + allowed.relative * abs(logits[row][place]))
        golden = replace(manifest.golden, logits=tuple(map(tuple, logits)))
        folder = rewritten(made, tmp_path / f"{row}-{place}", golden=golden)

        with pytest.raises(SelfTestFailed, match=f"logits of row {row} with class {place}"):
            selftest.require(load(folder))


def test_too_few_real_rows_right_is_refused(tmp_path: Path) -> None:
    made = released("float32")
    golden = manifest_of(made).golden
    wrong = replace(golden, real_y=tuple((label + 1) % 10 for label in golden.real_y))

    with pytest.raises(SelfTestFailed, match="64 real rows with accuracy"):
        selftest.require(load(rewritten(made, tmp_path / "wrong", golden=wrong)))


def test_a_file_of_another_model_is_not_released(tmp_path: Path) -> None:
    made, data = model()
    other = made.spec.build(99).eval()

    with pytest.raises(NotReleasable, match="are off by"):
        release(
            replace(source("float32"), module=other), data.x_test, data.y_test, Options(), tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_worse_than_its_model_is_not_released(tmp_path: Path) -> None:
    _, data = model()
    untrained = replace(source("float32"), tflite=_of_untrained())

    with pytest.raises(NotReleasable, match="its float model's"):
        release(untrained, data.x_test, data.y_test, Options(), tmp_path / "out")


def test_a_file_without_its_float_model_is_checked_against_its_own_plain_kernels(tmp_path: Path) -> None:
    _, data = model()
    alone = replace(source("dynamic-int8"), module=None)

    report = release(alone, data.x_test, data.y_test, Options(real_rows=0), tmp_path / "out")

    assert report["golden"]["asked_of"] == "file"
    assert selftest.require(load(tmp_path / "out")) is None


def test_the_command_makes_a_release_from_a_folder(tmp_path: Path) -> None:
    folder = _compressed(tmp_path / "compressed")
    out = tmp_path / "release"

    done = run_cli("export", folder, "--name", "digits", "--version", "3", "--out", out, "--device-class", "pi", "--json")  # fmt: skip

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    manifest = inference.from_json((out / "manifest.json").read_bytes())
    assert (manifest.model, manifest.version, manifest.precision) == ("digits", 3, "static-int8")
    assert manifest.device_classes == ("pi",) and manifest.lineage.parent == "ab" * 32
    assert manifest.golden.least_accuracy > 0.5
    assert report["runtimes"] == list(manifest.runtimes)
    assert "not tried" in next(v["refused"] for v in report["verdicts"] if v["runtime"] == "tflite-runtime")


def test_the_float_params_of_a_federated_run_become_an_integer_file_again(tmp_path: Path) -> None:
    made, _ = model()
    run, out = tmp_path / "run", tmp_path / "release"
    run.mkdir()
    (run / "experiment.toml").write_text(
        'seed = 7\n[data]\ndataset = "digits"\n[model]\nname = "cnn"\nhidden = 32\n'
    )
    safetensors.numpy.save_file(params_of(made.module), run / "model.safetensors")

    done = run_cli("export", run, "--name", "digits", "--version", "2", "--out", out, "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"] > 0.9
    manifest = inference.from_json((out / "manifest.json").read_bytes())
    assert (manifest.precision, manifest.version) == ("static-int8", 2)
    assert "tflite-micro" in manifest.runtimes
    assert manifest.params_sha256 == manifest.lineage.parent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--name", "Digits"), "--name 'Digits'"),
        (("--name", "digits", "--precision", "int3"), "--precision int3: is unknown"),
        (("--name", "digits", "--tflite", "none.tflite"), "--tflite none.tflite: there is no such file"),
    ],
)
def test_a_wrong_argument_is_one_message(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run_here("export", _compressed(tmp_path / "c"), "--out", tmp_path / "release", *arguments)

    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_precisions_of_the_command_are_those_of_compression() -> None:
    assert get_args(Precision) == PRECISIONS


def _of_untrained() -> bytes:
    made, _ = model()
    with tempfile.TemporaryDirectory() as folder:
        convert(made.spec.build(1).eval(), made.spec, Path(folder) / "model")
        return (Path(folder) / "model").read_bytes()


def _compressed(folder: Path) -> Path:
    """What a compression leaves."""
    made, data = model()
    (folder / "arrays").mkdir(parents=True)
    np.save(folder / "arrays" / "x_test.npy", data.x_test)
    np.save(folder / "arrays" / "y_test.npy", data.y_test)
    (folder / "model.tflite").write_bytes(tflite("static-int8"))
    safetensors.numpy.save_file(params_of(made.module), folder / "model.safetensors")
    described = {
        key: getattr(made.spec, key) for key in ("name", "options", "classes", "input_dtype", "task")
    }
    document = {**described, "input_shape": list(made.spec.input_shape), "precision": "static-int8"}
    (folder / "model.json").write_text(json.dumps(document, default=asdict))
    (folder / "lineage.json").write_text(json.dumps({"parent": {"model_sha256": "ab" * 32}}))
    return folder
