"""The `fedloop` command.

Each command parses, calls one function and prints. A user's mistake ends in one clear message on standard
error and exit code 2; a run stopped from outside says how to go on and exits with 1.

What a command needs is imported when it runs: `main` looks first who owns our generic names, because where
somebody shadows one, those imports fail.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from coordinator import (
    compress_commands,
    device_commands,
    export_commands,
    fleet_commands,
    model_commands,
    ownership,
    pretrain_commands,
    release_commands,
    rollout_commands,
)
from coordinator import doctor as checks
from coordinator.command_options import DataDir, Json, Sets
from coordinator.errors import RunInterrupted, UserError
from coordinator.fleet_commands import ExperimentFile

app = typer.Typer(
    help="Federated learning from the datacenter to the device and back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for the results; new or empty. Default: runs/<name>-<time>."),
]


@app.command(
    epilog="Example: fedloop simulate my.toml --set local.lr=0.1 --set 'model.hidden=[64]' --out runs/mine"
)
def simulate(
    experiment: ExperimentFile = None,
    sets: Sets = None,
    out: Out = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Go on with the run in this folder, from its last committed round.",
            metavar="DIR",
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run a whole federation on this machine and report on it.

    EXPERIMENT.toml describes it (docs/experiment.md lists every key); without one the defaults run, on digits.
    """
    from coordinator import experiment as experiments
    from coordinator.display import RichProgress
    from coordinator.simulation import run

    console = Console(stderr=True)
    with RichProgress(console) as progress:
        surroundings = run.Surroundings(data_dir=data_dir, progress=progress)
        if resume is not None:
            if experiment is not None or sets or out is not None:
                raise UserError(
                    "--resume takes everything from its folder: leave EXPERIMENT, --set and --out away"
                )
            if run.is_finished(resume):
                console.print(f"{resume}: this run is already finished")
            report, folder = run.resume(resume, surroundings), resume
        else:
            asked = experiments.load(experiment, sets or [])
            folder = out or _default_out(asked.name)
            report = run.simulate(asked, folder, surroundings)
    _show(report, folder, as_json)


@app.command(epilog="Example: fedloop demo --out runs/my-demo")
def demo(out: Out = None, as_json: Json = False) -> None:
    """Run the whole loop on digits: pretrain, distil, quantize, federate, and show what each stage came to."""
    from coordinator import demo as demonstration
    from coordinator.display import RichProgress, closing_table
    from coordinator.simulation import run

    folder = out or _default_out("demo")
    with RichProgress(Console(stderr=True)) as progress:
        result = demonstration.demo(folder, run.Surroundings(progress=progress))
    if as_json:
        typer.echo((folder / "demo.json").read_text("utf-8"))
    else:
        Console(soft_wrap=True).print(closing_table(result), highlight=False)


@app.command("demo-fleet", epilog="Example: fedloop demo-fleet --out runs/my-fleet")
def demo_fleet(out: Out = None, as_json: Json = False) -> None:
    """Run a real federation on this machine: a coordinator and four device daemons, beside its simulation."""
    from coordinator import demo_fleet as demonstration
    from coordinator.display import RichProgress, fleet_lines
    from coordinator.simulation import run

    folder = out or _default_out("demo-fleet")
    with RichProgress(Console(stderr=True)) as progress:
        result = demonstration.demo_fleet(folder, run.Surroundings(progress=progress))
    if as_json:
        typer.echo((folder / "demo-fleet.json").read_text("utf-8"))
    else:
        Console(soft_wrap=True).print(fleet_lines(result), highlight=False)


@app.command("demo-loop", epilog="Example: fedloop demo-loop --out runs/my-loop")
def demo_loop(out: Out = None, as_json: Json = False) -> None:
    """Run the whole circle on this machine: pretrain, compress, release, roll out to daemons, train there, release again."""
    from coordinator import demo_loop as demonstration
    from coordinator.display import RichProgress, loop_lines

    folder = out or _default_out("demo-loop")
    with RichProgress(Console(stderr=True)) as progress:
        result = demonstration.demo_loop(folder, progress, lambda line: typer.echo(f"  $ {line}", err=True))
    if as_json:
        typer.echo((folder / "demo-loop.json").read_text("utf-8"))
    else:
        Console(soft_wrap=True).print(loop_lines(result), highlight=False)


@app.command(epilog="Example: fedloop doctor --json")
def doctor(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Check this installation: who owns our names, which runtimes work, where data is looked for."""
    findings = checks.examine(data_dir)
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        checks.show(findings, Console())
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


app.command(epilog="Example: fedloop serve --device 0.0.0.0:8443 --name fed.example.org")(
    fleet_commands.serve
)
app.command(epilog="Example: fedloop run my.toml --set federation.rounds=5 --out runs/fleet")(
    fleet_commands.run
)
app.command(epilog="Example: fedloop compress runs/shakespeare --student charlm --set student.width=48")(
    compress_commands.compress
)
app.command(
    "compress-search", epilog="Example: fedloop compress-search runs/digits --memory 64KB --accuracy 0.95"
)(compress_commands.compress_search)
app.command(epilog="Example: fedloop export runs/compressed --name digits --out runs/release")(
    export_commands.export
)
app.add_typer(device_commands.app, name="device")
app.add_typer(model_commands.app, name="model")
app.add_typer(pretrain_commands.app, name="pretrain")
app.add_typer(rollout_commands.app, name="rollout")
app.add_typer(release_commands.app, name="release")


def main() -> None:
    """Entry point of the `fedloop` command."""
    contested = ownership.problems()
    # `doctor` tells about contested names itself, in full.
    if contested and sys.argv[1:2] != ["doctor"]:
        _fail("\n".join(contested), 2)
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except RunInterrupted as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        os._exit(1)


def _default_out(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def _show(report: dict[str, Any], folder: Path, as_json: bool) -> None:
    from coordinator.display import closing_lines

    if as_json:
        typer.echo(json.dumps({"out": str(folder), **report}, indent=2))
    else:
        Console(soft_wrap=True).print(closing_lines(report, folder), highlight=False)


def _fail(message: str, code: int) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
