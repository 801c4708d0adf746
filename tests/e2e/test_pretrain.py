"""`fedloop pretrain` and `fedloop compress` from start to end, by two plans, and what they refuse."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
import shutil
import signal
import tomllib
from pathlib import Path

import pytest
import safetensors.numpy

from coordinator.datacenter import pretrain_config
from models.pretrain.plan import ParallelPlan
from tests.support import require
from tests.support.cli import assert_refused, options, report_of, run_cli, run_here, started

pytestmark = pytest.mark.slow

PLAYS = (
    "data.dataset=shakespeare",
    "data.length=32",
    "data.test_rows=100",
    "model.width=32",
    "model.layers=2",
    "train.steps=40",
    "train.lr=0.01",
)
GUIDE = (Path(__file__).parents[2] / "docs" / "pretraining.md").read_text("utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL) for line in block.splitlines()]
QUICK = ("rows=400", "test_rows=60", "distil.epochs=2", "quantize.max_accuracy_drop=0.1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the same training by two plans."""
    data = require.data_dir("tinyshakespeare.txt")
    folder = tmp_path_factory.mktemp("plays")
    for plan in ("dp=2", "tp=2,pp=2"):
        out = folder / plan
        done = run_cli(
            "pretrain", "--plan", plan, "--out", out, "--data-dir", data, *options(PLAYS), cwd=folder
        )
        assert done.returncode == 0, done.stderr
        assert "step 40/40" in done.stderr  # it showed its progress
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the guide's first two commands were run as they are written: they train and compress digits."""
    folder = tmp_path_factory.mktemp("guided")
    for line in COMMANDS[:2]:
        run_as_written(line, folder)
    return folder


def run_as_written(line: str, folder: Path) -> None:
    done = run_cli(*shlex.split(line)[1:], cwd=folder, env={"XDG_STATE_HOME": str(folder / "state")})
    assert done.returncode == 0, (line, done.stderr)


@pytest.mark.extended
def test_a_finished_one_goes_on_by_another_plan(guided: Path, tmp_path: Path) -> None:
    """Its curve is the beginning of a longer training's, which was never interrupted."""
    short = options(("train.epochs=2",))
    longer = options(("train.epochs=4",))
    done = run_cli("pretrain", *short, "--out", tmp_path / "resumed")
    assert done.returncode == 0, done.stderr
    done = run_cli("pretrain", "--resume", tmp_path / "resumed", "--plan", "dp=2", *longer)
    assert done.returncode == 0, done.stderr
    assert "plan: dp=1 -> dp=2" in done.stderr and "train.epochs: 2 -> 4" in done.stderr
    found, straight = losses(tmp_path / "resumed"), losses(guided / "runs" / "digits")
    assert len(found) == 180
    assert found == pytest.approx(straight[: len(found)], abs=1e-5)
    assert report_of(tmp_path / "resumed")["steps"] == len(found)
    shorter = run_here("pretrain", "--resume", tmp_path / "resumed", *options(("train.epochs=3",)))
    assert_refused(shorter, "trained for 180 steps and cannot be set to 135", "--set train.steps")
    assert report_of(tmp_path / "resumed")["steps"] == len(found)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "curve.jsonl").read_text().splitlines()]


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in safetensors.numpy.load(path.read_bytes()).items()}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.extended
def test_both_plans_have_the_same_losses_which_fall(trained: dict[str, Path]) -> None:
    one, other = (losses(folder) for folder in trained.values())
    assert len(one) == 40
    assert one == pytest.approx(other, abs=1e-3)  # 1e-5 over 20 steps; rounding grows with the steps
    assert one[-1] < one[0] - 0.5


def test_a_training_leaves_curves_a_checkpoint_and_its_lineage(trained: dict[str, Path]) -> None:
    for plan, folder in trained.items():
        names = {path.name for path in folder.iterdir()}
        assert {"config.toml", "curves.png", "events.jsonl", "checkpoints", "model.json"} <= names
        lineage = json.loads((folder / "lineage.json").read_text())
        assert lineage["model_sha256"] == sha256(folder / "model.safetensors")
        assert set(lineage["plan"].split(",")) >= set(plan.split(","))
        assert lineage["seed"] == 7
        assert report_of(folder)["final"]["model_sha256"] == lineage["model_sha256"]
    one, other = (json.loads((folder / "lineage.json").read_text()) for folder in trained.values())
    assert one["data_fingerprint"] == other["data_fingerprint"]
    assert one["config_sha256"] != other["config_sha256"]


@pytest.mark.extended
def test_compress_takes_what_a_split_training_has_left(trained: dict[str, Path], tmp_path: Path) -> None:
    full, split = (shapes(folder / "model.safetensors") for folder in trained.values())
    assert full == split
    folder = trained["tp=2,pp=2"]
    student = ("student.width=16", "student.layers=1", "student.heads=2")
    out = tmp_path / "small"
    done = run_cli("compress", folder, "--student", "charlm", "--out", out, *options((*QUICK, *student)))
    assert done.returncode == 0, done.stderr
    report = report_of(out)
    assert report["lineage"]["parent"]["model_sha256"] == sha256(folder / "model.safetensors")
    int8 = out / report["final"]["file"]
    assert report["lineage"]["tflite_sha256"] == sha256(int8)
    assert int8.stat().st_size == report["final"]["bytes"] < report["source"]["bytes"]
    student, quantized = report["steps"]
    assert (student["kind"], student["model"], quantized["kind"]) == ("distil", "charlm", "quantize")
    assert quantized["accuracy"] >= student["accuracy"] - 0.1


@pytest.mark.extended
def test_digits_are_compressed_as_they_are(guided: Path, tmp_path: Path) -> None:
    assert report_of(guided / "runs" / "digits")["final"]["test_accuracy"] > 0.8
    report = report_of(guided / "runs" / "digits-small")
    assert [step["kind"] for step in report["steps"]] == ["quantize"]
    assert report["final"]["accuracy"] > 0.75
    assert report["final"]["bytes"] < 0.6 * report["source"]["bytes"]

    shutil.copytree(guided / "runs" / "digits", tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").write_bytes(b"another")
    done = run_here("compress", tmp_path / "d", "--out", tmp_path / "again")
    assert_refused(done, "was replaced since")


@pytest.mark.extended
def test_a_killed_command_is_taken_up_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = options(("train.epochs=20", "checkpoint.every=50", "checkpoint.background=false"))
    with started("pretrain", "--out", out, *small) as command:
        assert command.reaches(lambda: (out / "checkpoints" / "step-00000050").exists())
        command.send(signal.SIGKILL)
        command.ended()
        assert command.all_gone()
    assert not (out / "report.json").exists()

    done = run_cli("pretrain", "--resume", out)

    assert done.returncode == 0, done.stderr
    report = report_of(out)
    assert report["attempts"] == 2
    assert len(losses(out)) == report["steps"]
    record = json.loads((out / "record.json").read_text())
    assert record["state"] == "finished"


def test_untrainable_models_are_refused_before_anything_starts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run_here("pretrain", "--plan", "tp=2,pp=2,ep=2", "--out", out)
    assert_refused(done, "tp needs a model", "2 stages need as many layers", "ep needs a model with experts")
    assert not out.exists()
    done = run_here("pretrain", "--plan", "dp=2,zerro=1", "--set", "train.lrr=1", "--out", out)
    assert_refused(done, "2 problems", "did you mean 'zero'", "did you mean 'lr'")
    done = run_here(
        "pretrain", "--plan", "dp=2,grad_compression=onebit", "--set", "train.clip_norm=1", "--out", out
    )
    assert_refused(done, "grad_compression=onebit", "clip_norm is 1.0, expected 0")
    assert_refused(run_here("pretrain", tmp_path / "no.toml"), "no such experiment file")
    assert_refused(run_here("pretrain", "--resume", tmp_path), "there is no pretraining here")
    assert_refused(run_here("compress", tmp_path), "there is no model.safetensors here")


@pytest.mark.extended
def test_plans_are_ranked_with_reasons(tmp_path: Path) -> None:
    unmeasured = options(("planner.measure=0",))  # the guide's plan measures
    done = run_cli("pretrain", "plan", "--processes", "2", "--json", *unmeasured, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    seconds = [row["seconds"] for row in found["ranking"]]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert all(row["memory_bytes"] > 0 for row in found["ranking"])
    assert any("tp needs a model" in row["reason"] for row in found["refused"])
    assert found["explanation"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extended
def test_the_guides_other_commands_run_as_they_are_written(guided: Path) -> None:
    """But for those that need the text, and minutes."""
    here = [line for line in COMMANDS[2:] if "plays" not in line]
    assert len(here) == 7
    (module,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (guided / "mynet.py").write_text(module)
    for line in here:
        run_as_written(line, guided)
    left = {path.name for path in (guided / "runs").iterdir()}
    assert left >= {"digits", "digits-small", "mynet", "profiled", "urgent"}


def test_the_guides_configuration_is_valid_and_its_table_of_plans_is_complete() -> None:
    (configuration,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
    config = pretrain_config.resolve(tomllib.loads(configuration), "docs/pretraining.md")
    assert config.parallel_plan == ParallelPlan(dp=2)
    rows = "".join(line for line in GUIDE.splitlines() if line.startswith("| `"))
    for field in dataclasses.fields(ParallelPlan):
        assert f"`{field.name}`" in rows, f"docs/pretraining.md lacks the plan's key {field.name}"


@pytest.mark.extended
def test_a_parameter_server_trains_the_same_model(tmp_path: Path) -> None:
    plain = options(("train.epochs=2",))
    for name, sets in {"alone": plain, "served": [*plain, "--set", "server={workers=2}"]}.items():
        done = run_cli("pretrain", "--json", "--out", tmp_path / name, *sets)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["out"] == str(tmp_path / name) and answer["final"]["test_accuracy"] > 0.5
    assert losses(tmp_path / "served") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
