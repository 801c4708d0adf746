"""`fedloop compress-search`: into the arena of a microcontroller, into nothing at all, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from edge_client.files import file_sha256
from models import zoo
from models.compress.micro_interpreter import MicroModel
from models.pretrain.params import params_of
from tests.support.cli import assert_refused, report_of, run_cli, run_here

pytestmark = pytest.mark.slow


@pytest.mark.extended
def test_a_resnet_is_brought_into_an_arena_and_runs_in_it(tmp_path: Path) -> None:
    model = ("model.name=resnet8", "model.norm=batch", "model.width=8", "train.epochs=6")
    sets = [word for each in model for word in ("--set", each)]
    done = run_cli("pretrain", *sets, "--out", "teacher", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    budget = ("--memory", "10KB", "--size", "64KiB", "--accuracy", "0.95", "--first")

    done = run_cli("compress-search", "teacher", *budget, "--out", "small", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "chosen: static-int8" in done.stdout
    out = tmp_path / "small"
    report = report_of(out)
    tried = {row["name"]: row for row in report["search"]["candidates"]}
    assert list(tried) == ["float32", "dynamic-int8", "static-int8"]
    assert "memory" in tried["float32"]["missed"]
    assert tried["dynamic-int8"]["runtime"] == "litert"
    assert [step["kind"] for step in tomllib.loads((out / "pipeline.toml").read_text())["step"]] == [
        "quantize",
        "micro",
    ]
    micro = MicroModel((out / "model.tflite").read_bytes(), 10_000)
    x, y = (np.load(out / "arrays" / f"{name}_test.npy") for name in "xy")
    accuracy = float((micro.predict(x).argmax(-1) == y).mean())
    assert accuracy >= 0.95
    assert accuracy == pytest.approx(report["steps"][-1]["facts"]["micro_accuracy"])
    chosen_by = np.load(out / "search" / "arrays" / "x_test.npy")
    rows, others = ({row.tobytes() for row in part} for part in (x, chosen_by))
    assert not rows & others
    assert (out / "step-02-micro" / "model.cc").is_file()
    assert (out / "search" / "pareto.png").stat().st_size > 10_000

    done = run_cli("export", "small", "--name", "digits", "--out", "release", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
def test_where_nothing_fits_the_nearest_is_named(tmp_path: Path) -> None:
    done = run_cli("pretrain", "--set", "model.name=logreg", "--out", "teacher", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    done = run_cli("compress-search", "teacher", "--size", "1KB", "--out", "small", cwd=tmp_path)

    assert done.returncode == 1
    assert "none fits accuracy >= 0." in done.stdout and "size <= 1,000 bytes" in done.stdout
    assert "the nearest is " in done.stdout and "which misses size by " in done.stdout
    assert not (tmp_path / "small" / "model.tflite").exists()
    assert (tmp_path / "small" / "search" / "result.json").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no budget is given; expected at least one of --memory, --size, --latency"),
        (("--accuracy", "0.9"), "no budget is given"),
        (("--memory", "64XB"), "--memory 64XB: expected a number above 0 and a unit (B, KB, MB, GB, KiB"),
        (("--size", "0KB"), "--size 0KB: expected a number above 0"),
        (("--memory", "0.4B"), "--memory 0.4B: expected a number above 0"),
        (("--latency", "fast"), "--latency fast: expected a number above 0 and a unit (us, ms, s)"),
        (("--size", "9KB", "--accuracy", "95"), "--accuracy 95.0: expected a share above 0 and at most 1"),
        (("--size", "9KB", "--set", "structured.ratios=1"), "ratios"),
        (("--size", "9KB", "--set", "prune.sparsity=0.5"), "prune"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(
    tmp_path_factory: pytest.TempPathFactory, source: Path, options: tuple[str, ...], message: str
) -> None:
    here = tmp_path_factory.mktemp("refused")
    assert_refused(run_here("compress-search", str(source), *options, "--out", "out", cwd=here), message)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its rows, as a pretraining leaves them; the model is not trained."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "data" / "arrays").mkdir(parents=True)
    for part in ("train", "test"):
        np.save(folder / "data" / "arrays" / f"x_{part}.npy", np.zeros((100, 8, 8), np.float32))
        np.save(folder / "data" / "arrays" / f"y_{part}.npy", np.arange(100, dtype=np.int32) % 10)
    shape = {"input_shape": [8, 8], "classes": 10}
    (folder / "model.json").write_text(
        json.dumps(
            {"name": "logreg", "options": {}, "input_dtype": "float32", "task": "classification", **shape}
        )
    )
    module = zoo.get("logreg", input_shape=(8, 8), classes=10).build(0)
    safetensors.numpy.save_file(params_of(module), folder / "model.safetensors")
    lineage = {"model_sha256": file_sha256(folder / "model.safetensors"), "seed": 7}
    (folder / "lineage.json").write_text(json.dumps(lineage))
    return folder
