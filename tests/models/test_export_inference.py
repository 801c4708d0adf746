"""Releases: golden answers that right runtimes pass and wrong ones do not, and manifests that claim only what was seen."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import flatbuffers
import numpy as np
import pytest
import safetensors.numpy
from ai_edge_litert import schema_py_generated as schema

from coordinator.datacenter.compression_pipeline import PRECISIONS
from edge_client.infer import golden_check
from edge_client.infer.runtime import Model, load
from edge_client.train.golden import SelfTestFailed
from edge_client.wire import inference
from edge_client.wire.inference import InferenceManifest
from models import zoo
from models.compress.quantization import recipes
from models.compress.quantization.quantize import to_tflite
from models.compress.report import logits as logits_of
from models.compress.step import Precision
from models.job import JobError
from models.pretrain.params import params_of
from models.release.golden import MAX_LOOSENESS, NotReleasable
from models.release.inference import (
    ReleaseOptions,
    Source,
    read_tflite,
    release,
)
from models.release.verify import RUNTIMES, verify
from tests.support import compressing
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
def test_a_release_claims_the_runtimes_that_answer_right_and_gives_reasons_for_the_others(
    precision: Precision,
) -> None:
    constrained_python()

    made = released(precision)

    assert set(manifest_of(made).runtimes) == CLAIMS[precision]
    assert {v["runtime"] for v in made.report["verdicts"] if not v["refused"]} == CLAIMS[precision]
    assert golden_check.require(load(made.folder)) == made.verdict("litert")["accuracy"]
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


@pytest.mark.extended
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
    with pytest.raises(JobError, match=r"model\.tflite is not a \.tflite file"):
        read_tflite(tmp_path / "model.tflite")
    with pytest.raises(JobError, match="No such file"):
        read_tflite(tmp_path / "absent.tflite")


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
            golden_check.require(load(folder))


@pytest.mark.parametrize("precision", ["float32", "static-int8"])
def test_a_changed_weight_is_noticed_without_any_real_row(precision: Precision, tmp_path: Path) -> None:
    """The largest weight of each layer with its sign turned: as a damaged or badly converted file would have it."""
    made = released(precision)
    manifest, content = manifest_of(made), (made.folder / "model.tflite").read_bytes()
    assert manifest.golden.real_y == ()
    changed = list(_with_a_weight_turned(content, np.float32 if precision == "float32" else np.int8))
    assert len(changed) == 4

    for spoilt in changed:
        with pytest.raises(SelfTestFailed, match="logits of row"):
            golden_check.require_answers(Model(spoilt, manifest).predict, manifest)


@pytest.mark.extended
def test_a_distant_file_must_give_its_own_answers_which_a_damaged_one_does_not(
    tmp_path: Path,
) -> None:
    """Its ranges clip: a fourth of the logits' span off, so that the float model's answers would pass damaged files."""
    made, data = compressing.cnn(), compressing.digits()
    float32 = to_tflite(made.module, made.spec)
    clipped = recipes.quantize(
        float32, "static-int8", recipes.calibrate(float32, data.x_train[:100] * np.float32(0.6))
    )
    clipping = Source(made.spec, clipped, "static-int8", made.module)

    report = release(
        clipping, data.x_test, data.y_test, ReleaseOptions(max_accuracy_drop=0.2), tmp_path / "out"
    )

    assert report["golden"]["asked_of"] == "file"
    assert report["golden"]["share_of_span"] <= MAX_LOOSENESS
    manifest = inference.from_json((tmp_path / "out" / "manifest.json").read_bytes())
    content = (tmp_path / "out" / "model.tflite").read_bytes()
    spoilt = list(_with_a_weight_turned(content, np.int8, 8))
    assert len(spoilt) == 3
    for each in spoilt:
        with pytest.raises(SelfTestFailed, match="logits of row"):
            golden_check.require_answers(Model(each, manifest).predict, manifest)


@pytest.mark.extended
def test_rows_of_large_inputs_are_golden_too_and_the_wrong_model_is_refused_by_them(tmp_path: Path) -> None:
    spec = zoo.get("cnn", input_shape=(3, 96, 96), classes=4, channels=[2, 2], hidden=4)
    module = spec.build(0).eval()
    rng = np.random.default_rng(0)
    x = rng.random((12, 3, 96, 96), dtype=np.float32)
    large = Source(spec, to_tflite(module, spec), "float32", module)
    y = logits_of(module, x).argmax(-1).astype(np.int32)

    report = release(large, x, y, ReleaseOptions(real_rows=4), tmp_path / "out")

    assert (report["golden"]["rows"], report["golden"]["real_rows"]) == (8, 1)
    assert report["golden"]["share_of_span"] < 0.01
    manifest = inference.from_json((tmp_path / "out" / "manifest.json").read_bytes())
    assert len(manifest.golden.real_x[0]) == 3 * 96 * 96 > 16_384
    assert golden_check.require(load(tmp_path / "out")) == 1.0
    other = Model(to_tflite(spec.build(1).eval(), spec), manifest)
    with pytest.raises(SelfTestFailed, match="logits of row"):
        golden_check.require_answers(other.predict, manifest)


def test_the_question_tells_of_the_data_only_its_size(tmp_path: Path) -> None:
    """The same spread for rows of the same order of magnitude: no mean, no deviation, no extreme."""
    _, data = model()
    one, other = (
        release(source("float32"), rows, data.y_test[:90], ReleaseOptions(), tmp_path / name)
        for name, rows in (("one", data.x_test[:90]), ("other", data.x_test[90:180] * np.float32(0.97)))
    )
    assert one["golden"]["asked_of"] == other["golden"]["asked_of"] == "float model"
    spreads = [
        json.loads((tmp_path / name / "manifest.json").read_bytes())["golden"]["x"]
        for name in ("one", "other")
    ]
    assert spreads[0] == spreads[1] and float(spreads[0]["scale"]).hex().startswith("0x1.0000")


def test_too_few_real_rows_right_is_refused(tmp_path: Path) -> None:
    made = released("float32", real_rows=64)
    golden = manifest_of(made).golden
    wrong = replace(golden, real_y=tuple((label + 1) % 10 for label in golden.real_y))

    with pytest.raises(SelfTestFailed, match="64 real rows with accuracy"):
        golden_check.require(load(rewritten(made, tmp_path / "wrong", golden=wrong)))


def test_a_file_of_another_model_is_not_released(tmp_path: Path) -> None:
    made, data = model()
    other = made.spec.build(99).eval()

    with pytest.raises(NotReleasable, match="are off by"):
        release(
            replace(source("float32"), module=other),
            data.x_test,
            data.y_test,
            ReleaseOptions(),
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_worse_than_its_model_is_not_released(tmp_path: Path) -> None:
    _, data = model()
    untrained = replace(source("float32"), tflite=_of_untrained())

    with pytest.raises(NotReleasable, match="its float model's"):
        release(untrained, data.x_test, data.y_test, ReleaseOptions(), tmp_path / "out")


def test_a_file_without_its_float_model_is_checked_against_its_own_plain_kernels(tmp_path: Path) -> None:
    _, data = model()
    alone = replace(source("dynamic-int8"), module=None)

    report = release(alone, data.x_test, data.y_test, ReleaseOptions(), tmp_path / "out")

    assert report["golden"]["asked_of"] == "file"
    assert golden_check.require(load(tmp_path / "out")) is None


def test_the_command_makes_a_release_from_a_folder(tmp_path: Path) -> None:
    folder = _compressed(tmp_path / "compressed")
    out = tmp_path / "release"

    done = run_cli("export", folder, "--name", "digits", "--version", "3", "--out", out, "--device-class", "pi", "--json")  # fmt: skip

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    manifest = inference.from_json((out / "manifest.json").read_bytes())
    assert (manifest.model, manifest.version, manifest.precision) == ("digits", 3, "static-int8")
    assert manifest.device_classes == ("pi",) and manifest.lineage.parent == "ab" * 32
    assert manifest.golden.real_x == manifest.golden.real_y == ()
    assert {path.name for path in out.iterdir()} == {"manifest.json", "model.tflite", "report.json"}
    assert report["runtimes"] == list(manifest.runtimes)
    assert "not tried" in next(v["refused"] for v in report["verdicts"] if v["runtime"] == "tflite-runtime")


@pytest.mark.extended
def test_the_float_params_of_a_federated_run_become_an_integer_file_again(tmp_path: Path) -> None:
    made, _ = model()
    run, out = tmp_path / "run", tmp_path / "release"
    run.mkdir()
    (run / "experiment.toml").write_text(
        'seed = 7\n[data]\ndataset = "digits"\n[model]\nname = "cnn"\nhidden = 32\n'
    )
    safetensors.numpy.save_file(params_of(made.module), run / "model.safetensors")
    (run / "report.json").write_text('{"final": {"test_accuracy": 0.97, "test_rows": 359}}')

    done = run_cli("export", run, "--name", "digits", "--version", "2", "--out", out, "--json")

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["accuracy"] > 0.9
    assert f"{report['test_rows']} {report['scored']}".startswith("180 of the run's 359 held-out rows")
    assert report["run"] == {"test_accuracy": 0.97, "test_rows": 359}
    manifest = inference.from_json((out / "manifest.json").read_bytes())
    assert (manifest.precision, manifest.version) == ("static-int8", 2)
    assert "tflite-micro" in manifest.runtimes
    assert manifest.params_sha256 == manifest.lineage.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--name", "Digits"), "--name 'Digits'"),
        (("--name", "digits", "--precision", "int3"), "--precision int3: is unknown"),
        (("--name", "digits", "--tflite", "none.tflite"), "--tflite none.tflite: there is no such file"),
    ],
)
def test_a_wrong_argument_is_one_message(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run_here("export", _compressed(tmp_path / "c"), "--out", tmp_path / "release", *arguments)

    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_precisions_of_the_command_are_those_of_compression() -> None:
    assert get_args(Precision) == PRECISIONS


def _with_a_weight_turned(content: bytes, dtype: type[np.generic], count: int = 1) -> Iterator[bytes]:
    """The file once for each layer, with the largest `count` of its weights turned."""
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    places = {
        tensor.buffer
        for tensor in model.subgraphs[0].tensors
        if tensor.type == (schema.TensorType.FLOAT32 if dtype is np.float32 else schema.TensorType.INT8)
    }
    for place in sorted(places):
        data = model.buffers[place].data
        values = np.frombuffer(bytes(data), dtype).copy() if data is not None else np.zeros(0, dtype)
        if values.size < 64:  # a bias
            continue
        largest = np.argsort(-np.abs(values.astype(np.float32)), kind="stable")[:count]
        values[largest] = -values[largest]
        model.buffers[place].data = np.frombuffer(values.tobytes(), np.uint8)
        builder = flatbuffers.Builder(len(content))
        builder.Finish(model.Pack(builder), b"TFL3")
        model.buffers[place].data = data
        yield bytes(builder.Output())


def _of_untrained() -> bytes:
    made, _ = model()
    return to_tflite(made.spec.build(1).eval(), made.spec)


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
