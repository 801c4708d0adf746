"""`fedloop compress` with a pipeline: the guide's own commands, killed between steps, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from models.compress.pipeline import STEPS
from tests.support.cli import assert_refused, options, report_of, run_cli, run_here, started

pytestmark = pytest.mark.slow

GUIDE = (Path(__file__).parents[2] / "docs" / "compression.md").read_text("utf-8")
COMMANDS = [
    shlex.split(line)[1:]
    for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    for line in block.splitlines()
]
PIPELINE, *_ = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the guide's first command was given, and its pipeline written."""
    folder = tmp_path_factory.mktemp("compress")
    (folder / "small.toml").write_text(PIPELINE)
    done = run_cli(*COMMANDS[0], cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_guides_pipeline_makes_a_small_model_though_it_is_killed(here: Path) -> None:
    first = COMMANDS[1]
    out = here / "runs" / "small"
    with started(*first, cwd=here) as command:
        assert command.reaches(lambda: (out / "step-01-distil" / "step.json").exists())
        command.send(signal.SIGKILL)
        command.ended()
        assert command.all_gone()
    assert not (out / "report.json").exists()
    student = (out / "step-01-distil" / "model.safetensors").stat().st_ino

    done = run_cli(*first, cwd=here)

    assert done.returncode == 0, done.stderr
    assert "distil, kept from before" in done.stderr and "quantize …" in done.stderr
    assert (out / "step-01-distil" / "model.safetensors").stat().st_ino == student
    report = report_of(out)
    rows = {row["kind"]: row for row in (report["source"], *report["steps"])}
    assert list(rows) == ["source", "distil", "structured", "fold", "quantize"]
    assert rows["structured"]["macs"] < 0.5 * rows["distil"]["macs"]
    assert rows["quantize"]["precision"] == "static-int8"
    assert report["final"]["bytes"] == (out / "model.tflite").stat().st_size < rows["source"]["bytes"] / 10
    assert report["final"]["accuracy"] >= rows["source"]["accuracy"] - 0.04
    assert all(row["latency_us"] > 0 for row in rows.values())
    lines = report["lineage"]["steps"]
    for before, line in itertools.pairwise(lines):
        assert line["parent_sha256"] == before["params_sha256"]
    assert lines[0]["params_sha256"] == report["lineage"]["parent"]["model_sha256"]
    assert (out / "pareto.png").stat().st_size > 10_000


@pytest.mark.extended
def test_the_guides_change_of_one_step_keeps_the_others_and_the_result_is_compressed_again(
    here: Path,
) -> None:
    _, first, again = COMMANDS
    out = here / "runs" / "small"
    done = run_cli(*first, cwd=here)
    assert done.returncode == 0, done.stderr
    report = report_of(out)

    done = run_cli(*again, "--json", cwd=here)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kept from before") == 3
    changed = json.loads(done.stdout)
    assert changed["final"]["precision"] == "dynamic-int8"
    assert changed["steps"][2]["facts"] == report["steps"][2]["facts"]
    assert json.loads((out / "model.json").read_text())["precision"] == "dynamic-int8"

    half = ("--set", "quantize.precision=float16", "--out", here / "half")  # what has been pruned and folded
    done = run_cli("compress", out, *half)

    assert done.returncode == 0, done.stderr
    assert report_of(here / "half")["source"]["parameters"] == changed["steps"][-1]["parameters"]


def test_bad_pipelines_are_refused_with_step_and_key(here: Path) -> None:
    out, source = here / "refused", here / "runs" / "teacher"

    def refused(text: str, *arguments: str, sets: tuple[str, ...] = ()) -> None:
        (here / "bad.toml").write_text(text)
        done = run_here("compress", source, "--pipeline", "bad.toml", "--out", out, *options(sets), cwd=here)
        assert_refused(done, "bad.toml", *arguments)
        assert not out.exists()

    refused("", "has no step", "[[step]]")
    refused("[[step]\n", "not valid TOML")
    refused("rovs = 3\n[[step]]\nkind = 'fold'\n", "rovs is not a known key, did you mean 'rows'?")
    refused("[[step]]\nkind = 'fold'\n[[step]]\nkind = 'prune'\nsparsty = 0.5\n", "step 2 (prune) has the unknown key 'sparsty', did you mean 'sparsity'?")  # fmt: skip
    refused("[[step]]\nkind = 'distil'\n", "prune is set, but the pipeline has no step of that kind", sets=("prune.sparsity=0.5",))  # fmt: skip
    refused("[[step]]\nkind = 'distil'\nteachers = 'nowhere'\n", "nowhere has no model.safetensors")
    refused("[[step]]\nkind = 'distil'\nstudent = 'cnnn'\n", "step 1 (distil)", "did you mean 'cnn'?")


def test_a_folder_of_something_else_is_left_alone(here: Path) -> None:
    occupied = here / "occupied"
    occupied.mkdir()
    (occupied / "mine.txt").write_text("mine")
    done = run_here("compress", here / "runs" / "teacher", "--out", occupied, cwd=here)
    assert_refused(done, "the folder is not empty")
    shutil.rmtree(occupied)
    missing = run_here("compress", here / "runs" / "teacher", "--pipeline", "no.toml", cwd=here)
    assert_refused(missing, "no.toml: no such")


def test_the_guide_names_every_kind_of_step() -> None:
    rows = "".join(line for line in GUIDE.splitlines() if line.startswith("| `"))
    assert [kind for kind in STEPS if f"`{kind}`" not in rows] == []
