"""The `fedloop` command: a user's mistake ends with one clear message and exit code 2, never a traceback."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from coordinator.commands import cli
from coordinator.errors import RunInterrupted
from coordinator.runs import simulation as simulation
from edge_client.commands import cli as edge

FEDLOOP = Path(sys.executable).with_name("fedloop")
COMMANDS = ("simulate", "sweep", "init", "demo", "doctor")
TINY = [
    "data.dataset=synthetic(shape=[4], classes=2, samples=6)", "model.name=logreg", "federation.clients=2",
    "federation.rounds=1", "federation.runtimes={torch=1}", "local.epochs=1", "simulation.workers=1",
]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Fedloop = Callable[..., Ended]


@pytest.fixture
def fedloop(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fedloop:
    """Runs the command in this process, in a separate folder, with wide output to a pipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("FEDLOOP_DATA_DIR", raising=False)

    def call(*args: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fedloop", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else 0, out, err)

    return call


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    sets = [part for each in TINY for part in ("--set", each)]
    done = subprocess.run(
        [FEDLOOP, "simulate", *sets, "--out", out, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"out": str(out), **json.loads((out / "report.json").read_text())}
    return out


def refused(ended: Ended, *arguments: str) -> None:
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert [word for word in arguments if word not in ended.err] == []


# What a user gets wrong


def test_a_missing_experiment_file(fedloop: Fedloop) -> None:
    ended = fedloop("simulate", "none.toml")
    refused(ended, "none.toml")
    assert ended.err == "error: none.toml: no such experiment file\n"


def test_a_malformed_setting(fedloop: Fedloop) -> None:
    refused(fedloop("simulate", "--set", "local.lr"), "--set 'local.lr' is not of the form key=value")


def test_an_unknown_key(fedloop: Fedloop, tmp_path: Path) -> None:
    refused(
        fedloop("simulate", "--set", "local.epoch=1"),
        "local.epoch is not a known key, did you mean 'epochs'?",
    )
    assert list(tmp_path.iterdir()) == []


def test_several_mistakes_are_one_message(fedloop: Fedloop, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[local]\nlr = 0\nepoch = 1\n")
    ended = fedloop("simulate", "my.toml")
    refused(ended, "my.toml: 2 problems", "  - local.lr = 0: ", "  - local.epoch is not a known key")
    assert ended.err.count("error:") == 1


def test_quoted_input_is_shown_verbatim(fedloop: Fedloop) -> None:
    """Brackets are markup to the library that prints."""
    refused(fedloop("simulate", "--set", "[red]x"), "--set '[red]x' is not of the form")


def test_a_folder_that_is_not_empty(fedloop: Fedloop, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    for command in ("simulate", "demo"):
        refused(fedloop(command, "--out", "out"), "--out out: the folder is not empty; name another one")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_file_where_the_folder_should_be(fedloop: Fedloop, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    refused(fedloop("simulate", "--out", "out"), "--out out")
    refused(fedloop("simulate", "--out", "out/deeper"), "--out out/deeper")
    assert (tmp_path / "out").read_text() == "precious"


def test_resuming_without_a_run(fedloop: Fedloop, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("none", "empty"):
        refused(fedloop("simulate", "--resume", folder), f"--resume {folder}: there is no run here")
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.slow
def test_resuming_with_settings(fedloop: Fedloop, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("")
    for more in (["--out", "x"], ["my.toml"]):
        refused(
            fedloop("simulate", "--resume", finished, *more), "--resume takes the experiment from its folder"
        )
    refused(
        fedloop("simulate", "--resume", finished, "--set", "local.lr=1"), "local.lr was 0.05, requested is 1"
    )


def test_an_unknown_option(fedloop: Fedloop) -> None:
    refused(fedloop("simulate", "--rounds", "3"), "No such option", "--rounds")
    refused(fedloop("simulate", "--set"), "--set", "requires an argument")
    refused(fedloop("simulat"), "simulat", "simulate")
    refused(fedloop("simulate", "a.toml", "b.toml"), "b.toml")


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (cli.app, ["simulat"]),
        *((cli.app, [group, "lst"]) for group in ("device", "model", "rollout")),
        (cli.app, ["release", "sig"]),
        (edge.app, ["rn"]),
        (edge.app, ["data", "previw"]),
        (edge.app, ["config", "chek"]),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_a_misspelled_command_gets_one_suggestion(app: typer.Typer, words: list[str]) -> None:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"}).output
    assert result.lower().count("did you mean") == 1, result


@pytest.mark.parametrize(
    ("sets", "note"),
    [
        (["data.site=hospital"], "Each site is a client."),
        ([], "The sites are not the clients: data.partition = 'dirichlet(0.3)' deals the rows of all sites out to 2 clients"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_data_with_sites_names_the_clients(
    fedloop: Fedloop, tmp_path: Path, sets: list[str], note: str
) -> None:
    column = "hospital" if sets else "site"
    lines = [f"{index % 7},{'north' if index % 2 else 'south'},{index % 2}" for index in range(40)]
    (tmp_path / "t.csv").write_text("\n".join([f"age,{column},label", *lines]) + "\n")
    data = ["data.dataset=csv", "data.path=t.csv", *sets, *([] if sets else ["federation.clients=2"])]
    ended = fedloop(
        "simulate", *(part for each in (*data, *TINY[1:2], *TINY[3:]) for part in ("--set", each))
    )
    assert ended.code == 0, ended.err
    assert note in ended.out + ended.err
    report = json.loads(next(tmp_path.glob("runs/*/report.json")).read_text())
    assert report["clients"] == 2
    assert report["experiment"]["data"]["partition"] == ("natural" if sets else "dirichlet(0.3)")


def test_without_a_command_the_commands_are_listed(fedloop: Fedloop) -> None:
    ended = fedloop()
    assert ended.code == 2
    assert all(command in ended.out + ended.err for command in COMMANDS)


@pytest.mark.parametrize(
    "args", [["simulate", "none.toml"], ["simulate", "--rounds", "3"], ["nothing"]], ids=" ".join
)
@pytest.mark.slow
def test_the_installed_command_does_the_same(args: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [FEDLOOP, *args], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    refused(Ended(done.returncode, done.stdout, done.stderr), args[-2] if "--rounds" in args else args[-1])


# Everything else


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_parses(fedloop: Fedloop, command: str) -> None:
    ended = fedloop(command, "--help")
    assert ended.code == 0
    # on a narrow terminal the example takes several lines
    example = " ".join(ended.out.split("Example: ", 1)[1].strip().split("\n\n")[0].split())
    program, name, *args = shlex.split(example)
    assert (program, name) == ("fedloop", command)
    group = typer.main.get_command(cli.app)
    subcommand = group.commands[command]  # type: ignore[attr-defined]
    subcommand.make_context(command, args)


@pytest.mark.parametrize(("app", "name"), [(cli.app, "fedloop"), (edge.app, "fedloop-edge")])
def test_both_commands_have_the_same_manners(app: typer.Typer, name: str) -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout) == (0, f"{name} {version('fedloop')}\n")
    for words in ([], ["status"] if app is edge.app else ["device", "list"]):
        short, long = (CliRunner().invoke(app, [*words, each]) for each in ("-h", "--help"))
        assert short.exit_code == 0
        assert short.stdout == long.stdout != ""
    assert "--install-completion" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).stdout


def test_the_shell_completes_commands() -> None:
    requested = {"_FEDLOOP_COMPLETE": "complete_bash", "COMP_WORDS": "fedloop com", "COMP_CWORD": "1"}
    done = subprocess.run(
        [FEDLOOP], env={**os.environ, **requested}, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["compress", "compress-search"]


def test_help_lists_every_command_with_a_line(fedloop: Fedloop) -> None:
    ended = fedloop("--help")
    assert ended.code == 0
    for command in COMMANDS:
        (line,) = [line for line in ended.out.splitlines() if f" {command} " in line]
        assert len(line.split()) > 5


@pytest.mark.slow
def test_a_finished_run_says_so_and_is_not_run_again(fedloop: Fedloop, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    ended = fedloop("simulate", "--resume", finished)
    assert ended.code == 0
    assert f"{finished}: this run is already finished" in ended.err
    assert "test accuracy" in ended.out
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


@pytest.mark.slow
def test_standard_output_holds_only_json(fedloop: Fedloop, finished: Path) -> None:
    ended = fedloop("simulate", "--resume", finished, "--json")
    assert ended.code == 0
    document = json.loads(ended.out)
    assert document.pop("out") == str(finished)
    assert document == json.loads((finished / "report.json").read_text())


def test_an_interrupted_run_ends_with_a_message_and_exit_code_1(
    fedloop: Fedloop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise RunInterrupted("the disk is full; go on with: fedloop simulate --resume x")

    monkeypatch.setattr(simulation, "simulate", interrupted)
    ended = fedloop("simulate")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: the disk is full; go on with: fedloop simulate --resume x\n"


def test_doctor_answers_in_json(fedloop: Fedloop) -> None:
    ended = fedloop("doctor", "--json")
    assert ended.code == 0
    assert {finding["subject"] for finding in json.loads(ended.out)} >= {"Python", "machine"}


def test_doctor_exits_with_1_when_something_is_wrong(fedloop: Fedloop, tmp_path: Path) -> None:
    ended = fedloop("doctor", "--data-dir", tmp_path / "none")
    assert ended.code == 1
    assert "error" in ended.out
