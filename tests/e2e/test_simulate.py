"""`fedloop simulate` from start to end: the defaults, what a run leaves behind, Ctrl-C, and every kind of bad input."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import signal
import struct
import tomllib
from pathlib import Path

import pytest

from edge_client.wire import arrays
from tests.support.cli import assert_refused, options, report_of, run_cli, run_here, started
from tests.support.long import extended

pytestmark = pytest.mark.slow

SMALL = (
    "model.name=logreg",
    "federation.clients=4",
    "federation.rounds=40",
    "federation.runtimes={torch=1}",
    "local.epochs=1",
    "simulation.workers=1",
)


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `fedloop simulate` without an experiment, run where its default folder may be made."""
    folder = tmp_path_factory.mktemp("default")
    done = run_cli("simulate", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    out: Path = folder / answer.pop("out")
    assert out.parent == folder / "runs" and answer == report_of(out)
    return out


def test_without_arguments_a_federation_on_digits_reaches_ninety_percent(default_run: Path) -> None:
    report = report_of(default_run)
    assert report["final"]["test_accuracy"] >= 0.90
    assert report["runtimes"] == {"litert": 10, "torch": 10}


def test_a_run_leaves_all_its_outputs_and_nothing_else(default_run: Path) -> None:
    report = report_of(default_run)
    names = {path.name for path in default_run.iterdir() if not path.name.startswith(".")}
    assert names == {
        "experiment.toml",
        "rounds.csv",
        "events.jsonl",
        "report.json",
        "curves.png",
        "model.safetensors",
        "schema.json",
        "checkpoint",
    }
    resolved = tomllib.loads((default_run / "experiment.toml").read_text())
    assert resolved == report["experiment"]
    assert (resolved["federation"]["clients_per_round"], resolved["local"]["epochs"]) == (10, 5)

    rows = list(csv.DictReader((default_run / "rounds.csv").open(newline="")))
    assert [int(row["round"]) for row in rows] == list(range(1, 31))
    assert [float(row["test_accuracy"]) for row in rows] == [r["test_accuracy"] for r in report["rounds"]]
    needed = {
        "selected",
        "accepted",
        "rejected",
        "train_loss",
        "test_loss",
        "bytes_up",
        "bytes_down",
        "seconds",
    }
    assert needed <= rows[0].keys()

    events = [json.loads(line) for line in (default_run / "events.jsonl").read_text().splitlines()]
    assert [e["round"] for e in events if e["event"] == "round_committed"] == list(range(1, 31))
    assert sum(e["event"] == "update_accepted" for e in events) == sum(
        r["accepted"] for r in report["rounds"]
    )

    encoded = (default_run / "model.safetensors").read_bytes()
    assert hashlib.sha256(encoded).hexdigest() == report["final"]["model_sha256"]
    assert len(arrays.decode(encoded)) > 0
    header = (default_run / "curves.png").read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert header.startswith(b"\x89PNG\r\n\x1a\n") and width > 600 and height > 300


@pytest.mark.extended
def test_the_same_experiment_gives_the_same_bits_with_another_number_of_workers_and_fewer_scores(
    default_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "again"
    sets = ("simulation.workers=1", "model.register=digits@candidate", "evaluation.every=7")
    done = run_cli("simulate", "--out", out, *options(sets))
    assert done.returncode == 0, done.stderr
    assert "model.register is ignored" in done.stderr
    again, first = report_of(out), report_of(default_run)
    assert again["final"] == first["final"]
    scores = [key for key in again["rounds"][0] if key.startswith(("test_", "client_"))]
    scored = [row["round"] for row in again["rounds"] if row["test_accuracy"] is not None]
    assert scored == [7, 14, 21, 28, 30] and len(scores) == 6
    for row, expected in zip(again["rounds"], first["rounds"], strict=True):
        if row["round"] not in scored:
            expected |= dict.fromkeys(scores)
        assert {**row, "seconds": 0} == {**expected, "seconds": 0}


def test_a_finished_run_is_left_as_it_is(default_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in default_run.rglob("*")}
    # As when it was killed after its report was written, and before its working data was removed.
    (default_run / "work").mkdir()
    (default_run / "work" / "x.npy").touch()
    resumed = run_here("simulate", "--resume", default_run)
    assert resumed.returncode == 0 and "already finished" in resumed.stderr
    assert_refused(run_here("simulate", "--out", default_run), "not empty", f"--resume {default_run}")
    assert {path: path.stat().st_mtime_ns for path in default_run.rglob("*")} == before


@pytest.mark.parametrize("moment", [*extended("run_started"), "round_committed"])
def test_ctrl_c_says_how_to_go_on_and_that_command_does(tmp_path: Path, moment: str) -> None:
    out, events = tmp_path / "run", tmp_path / "run" / "events.jsonl"
    many = (*SMALL, "federation.rounds=300")
    with started("simulate", "--out", out, *options(many)) as run:
        assert run.reaches(lambda: events.exists() and moment in events.read_text()), run.errors()
        run.send_group(signal.SIGINT)  # as a terminal does: all processes of the run get it
        code, errors = run.ended(), run.errors()
        assert run.all_gone(), run.alive()
    assert code == 1
    assert "Traceback" not in errors
    assert "interrupted" in errors
    command = errors.rpartition("go on with: fedloop ")[2].split()
    assert command == ["simulate", "--resume", str(out)]
    if moment == "round_committed":
        done = run_cli(*command)
        assert done.returncode == 0, done.stderr
        assert len(report_of(out)["rounds"]) == 300


def test_two_processes_cannot_run_in_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    endless = (*SMALL, "federation.rounds=100000")
    with started("simulate", "--out", out, *options(endless)) as run:
        assert run.reaches(lambda: (out / "events.jsonl").exists()), run.errors()
        assert_refused(run_here("simulate", "--resume", out), "another process is running this experiment")


BAD = {
    "unknown key, with the nearest": (["--set", "local.learning_rte=0.1"], ["local.learning_rte", "lr"]),
    "unknown table": (["--set", "federaton.rounds=3"], ["federaton", "federation"]),
    "wrong type": (["--set", "federation.rounds=ten"], ["federation.rounds", "'ten'", "integer"]),
    "out of range": (["--set", "local.lr=-1"], ["local.lr", "-1", "greater than 0"]),
    "no equals sign": (["--set", "local.lr"], ["--set", "key=value"]),
    "more than there are": (
        ["--set", "federation.clients=5", "--set", "federation.clients_per_round=9"],
        ["clients_per_round = 9", "federation.clients = 5"],
    ),
    "unknown data set": (["--set", "data.dataset=digts"], ["digts", "digits"]),
    "unknown model": (["--set", "model.name=cnnn"], ["cnnn", "cnn"]),
    "unknown option of a model": (["--set", "model.hiden=3"], ["model.hiden", "hidden"]),
    "unknown strategy": (["--set", "strategy.name=fedadan"], ["fedadan", "fedadam"]),
    "option of another strategy": (["--set", "strategy.mu=1"], ["strategy.mu", "fedavg"]),
    "unknown runtime": (["--set", "federation.runtimes={jax=1}"], ["jax", "litert"]),
    "unknown partition": (["--set", "data.partition=dirichlet(x)"], ["data.partition", "dirichlet"]),
    "model that does not fit the data": (["--set", "model.name=charlm"], ["charlm"]),
    "unknown fault": (["--set", "simulation.faults={evil=1}"], ["evil"]),
    "no such experiment file": (["missing.toml"], ["missing.toml", "no such"]),
    "no such starting params": (
        ["--set", "model.init=absent.safetensors"],
        ["model.init", "absent.safetensors", "No such file"],
    ),
    "endless starting params": (["--set", "model.init=/dev/zero"], ["model.init", "it is a device"]),
    "endless experiment": (["/dev/zero"], ["/dev/zero", "4,194,304 bytes"]),
    "no run to resume": (["--resume", "nothing-here"], ["nothing-here", "no run"]),
    "resume with settings": (["--resume", "x", "--set", "local.lr=1"], ["--resume x", "no run here"]),
    "folder that cannot be": (["--out", "/dev/null/x"], ["/dev/null/x"]),
    "missing data files": (["--set", "data.dataset=mnist", "--data-dir", "."], ["mnist", "ubyte"]),
    "missing table": (
        ["--set", "data.dataset=csv", "--set", "data.path=no.csv", "--set", "model.name=logreg"],
        ["no.csv"],
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_ends_in_one_message_and_exit_code_two(tmp_path: Path, kind: str) -> None:
    arguments, command = BAD[kind]
    done = run_here("simulate", *arguments, cwd=tmp_path)
    assert_refused(done, "error:", *command)
    assert list(tmp_path.iterdir()) == []


def test_every_bad_value_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[local]\nlr = 'fast'\n[federation]\nrounds = 0\nclient = 3\n")
    done = run_here("simulate", "mine.toml", cwd=tmp_path)
    assert_refused(done, "mine.toml", "3 problems", "local.lr", "federation.rounds", "federation.client ")


def test_a_file_that_is_no_toml_says_where(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[local]\nlr = = 3\n")
    assert_refused(run_here("simulate", "mine.toml", cwd=tmp_path), "mine.toml", "line 2")


def test_an_unknown_option_of_the_command_is_refused(tmp_path: Path) -> None:
    assert_refused(run_here("simulate", "--round", "3", cwd=tmp_path), "--round")


def test_a_changed_experiment_is_not_resumed(default_run: Path, tmp_path: Path) -> None:
    """As when it was killed before its report was written."""
    out = shutil.copytree(default_run, tmp_path / "run")
    (out / "report.json").unlink()
    path = out / "experiment.toml"
    before = path.read_text()
    path.write_text(before.replace("lr = 0.05", "lr = 0.1"))
    assert path.read_text() != before
    assert_refused(run_here("simulate", "--resume", out), str(path), "changed")
