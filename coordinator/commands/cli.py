"""The `fedloop` command.

Each command parses, calls one function and prints. A user's mistake ends with one clear message on standard
error and exit code 2; an interrupted run says how to continue and exits with 1.

Commands import what they need when they run: `main` first checks who owns our generic package names, because
these imports fail if another package shadows one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from coordinator import import_guard
from coordinator.accounts.admin_token import TOKEN_FILE
from coordinator.commands import (
    compress,
    device,
    export,
    fleet,
    init,
    jobs,
    model,
    predict,
    pretrain,
    release,
    rollout,
    runs,
    statistics,
    sweep,
)
from coordinator.commands.administration import audit
from coordinator.commands.information import doctor as checks
from coordinator.commands.information import documentation, plan, strategies
from coordinator.commands.options import (
    HELP_NAMES,
    DataDir,
    ExperimentFile,
    FlowerApp,
    Json,
    Mlflow,
    RunConfig,
    RunFolder,
    Sets,
    TensorBoard,
    serve_signature,
    show_version,
)
from coordinator.commands.output import RichProgress, plain_console, print_json, print_output, print_summary
from coordinator.commands.people import access_tokens, projects, users
from coordinator.commands.people.login import add_login
from coordinator.commands.privacy import audit_privacy
from coordinator.commands.serving import commands as serving_commands
from coordinator.commands.serving import measuring as serving_measuring
from coordinator.commands.serving import start as serving_start
from coordinator.commands.summaries import demo_summary, fleet_demo_summary, loop_demo_summary, show_report
from coordinator.commands.trial_summary import serving_demo_summary
from coordinator.errors import NothingLearnt, RunInterrupted, UserError
from coordinator.output_folders import default_folder
from coordinator.settings import read_settings
from edge_client.wire.strict import printable_lines

if TYPE_CHECKING:
    from coordinator.demos.local_fleet import LocalFleet

_ERROR_CHARACTERS = 4_000
"""Limit of an error message, which may quote a device or a file."""

app = typer.Typer(
    help="Federated learning from the datacenter to the device and back.",
    no_args_is_help=True,
    suggest_commands=False,  # click does
    context_settings=HELP_NAMES,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=show_version, help="Show the version and exit."),
    ] = False,
    project: Annotated[
        str | None,
        typer.Option(
            "--project",
            envvar="FEDLOOP_PROJECT",
            show_envvar=True,
            help="Project of a coordinator that the command works in. Default: the user's only one, or `default`.",
            metavar="NAME",
        ),
    ] = None,
) -> None: ...


@app.command(
    epilog="Example: fedloop simulate my.toml --set local.lr=0.1 --set 'model.hidden=[64]' --out runs/mine"
)
def simulate(
    experiment: ExperimentFile = None,
    sets: Sets = None,
    out: RunFolder = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Resume the run in this folder from its last committed round; --set may change federation.rounds and "
            "simulation.workers.",
            metavar="DIR",
        ),
    ] = None,
    flower_app: FlowerApp = None,
    run_config: RunConfig = None,
    data_dir: DataDir = None,
    mlflow: Mlflow = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Simulate a federation on this machine and report on it.

    EXPERIMENT.toml describes it (docs/experiment.md lists every key); without one the defaults run, on digits.
    """
    if flower_app is not None:
        given = data_dir if str(data_dir) != os.environ.get("FEDLOOP_DATA_DIR") else None
        foreign = {"EXPERIMENT": experiment, "--resume": resume, "--data-dir": given}
        _refuse(foreign | {"--mlflow": mlflow, "--tensorboard": tensorboard})
        _run_flower_app(flower_app, run_config or [], sets or [], out, as_json=as_json)
        return
    if run_config:
        raise UserError("--run-config is for a Flower app: name its folder with --flower-app")
    from coordinator.experiments import experiment as experiments
    from coordinator.reports.trackers import Trackers
    from coordinator.runs import simulation

    trackers = Trackers(mlflow, tensorboard)
    with RichProgress() as progress:
        environment = simulation.Environment(data_dir=data_dir, progress=progress)
        if resume is not None:
            if experiment is not None or out is not None:
                raise UserError("--resume takes the experiment from its folder: omit EXPERIMENT and --out")
            trackers.check()
            report, folder = simulation.resume(resume, environment, sets or []), resume
        else:
            loaded = experiments.load(experiment, sets or [])
            folder = out or default_folder(loaded.name)
            trackers.check()
            report = simulation.simulate(loaded, folder, environment)
        trackers.copy_run(folder, report, environment.clock())
    show_report(report, folder, as_json=as_json)


def _refuse(foreign: Mapping[str, object]) -> None:
    """Refuses options that a Flower app has no use for. `foreign`: their values by name."""
    given = [name for name, value in foreign.items() if value is not None]
    if given:
        raise UserError(f"--flower-app runs the app as it is, so omit {' and '.join(given)}")


def _run_flower_app(
    folder: Path, run_config: list[str], sets: list[str], out: Path | None, *, as_json: bool
) -> None:
    from coordinator.flower_apps import app_file, run

    given = run.settings(sets)
    flower_app = app_file.read(folder, run_config)
    chosen = out or default_folder(flower_app.name)
    report = run.run(flower_app, chosen, given, output_to_stderr=as_json)
    print_summary({"out": str(chosen), **report}, run.summarize(report, chosen), as_json=as_json)


@app.command("flower-app", epilog="Example: fedloop flower-app my.toml --out my-app && flwr run my-app")
def flower_app(
    experiment: ExperimentFile = None,
    sets: Sets = None,
    out: Annotated[
        Path,
        typer.Option("--out", help="New or empty folder for the app.", metavar="DIR", show_default=True),
    ] = Path("flower-app"),
    run_folder: Annotated[
        Path | None,
        typer.Option(
            "--run-folder",
            help="Folder of the run, on the machine of the ServerApp. Default: in runs/.",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Write an experiment as a Flower app: `flwr run` then executes it on Flower's nodes (docs/scaling.md)."""
    from coordinator.experiments import experiment as experiments
    from coordinator.on_flower import folder

    loaded = experiments.load(experiment, sets or [])
    run = (run_folder or default_folder(loaded.name)).absolute()
    names = folder.write(loaded, out, run, Path.cwd())
    typer.echo(f"wrote {', '.join(names)} in {out}/; its run will be in {run}; run it: flwr run {out}")


@app.command(epilog="Example: fedloop demo --out runs/my-demo")
def demo(
    out: RunFolder = None,
    serve_it: Annotated[
        bool,
        typer.Option(
            "--serve", help="Afterwards, register its models with a coordinator, and open its console to you."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the whole loop on digits: pretrain, distil, quantize, federate, and show the result of each stage."""
    from coordinator.demos import demo as demonstration
    from coordinator.runs import simulation

    folder = out or default_folder("demo")
    with RichProgress() as progress:
        result = demonstration.demo(folder, simulation.Environment(progress=progress))
    print_summary(result, demo_summary(result), as_json=as_json)
    if serve_it:
        with RichProgress() as progress:
            demonstration.serve_results(
                folder, progress, lambda line: typer.echo(f"  $ {line}", err=True), _announce_console
            )


@app.command("demo-fleet", epilog="Example: fedloop demo-fleet --out runs/my-fleet")
def demo_fleet(
    out: RunFolder = None,
    serve_it: Annotated[
        bool,
        typer.Option(
            "--serve", help="Instead, keep the fleet training until Ctrl-C, and open its console to you."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a real federation on this machine, with a coordinator and four device daemons, and its simulation."""
    from coordinator.demos import demo_fleet as demonstration
    from coordinator.runs import simulation

    folder = out or default_folder("demo-fleet")
    if serve_it:
        with RichProgress() as progress:
            demonstration.serve_fleet(folder, simulation.Environment(progress=progress), _announce_console)
        return
    with RichProgress() as progress:
        result = demonstration.demo_fleet(folder, simulation.Environment(progress=progress))
    print_summary(result, fleet_demo_summary(result), as_json=as_json)


def _announce_console(fleet: LocalFleet) -> None:
    typer.echo(f"console: {fleet.operator_url}")
    typer.echo(f"admin token: in {fleet.home / TOKEN_FILE}")
    typer.echo("Ctrl-C stops the coordinator and its devices")


@app.command("demo-loop", epilog="Example: fedloop demo-loop --out runs/my-loop")
def demo_loop(out: RunFolder = None, as_json: Json = False) -> None:
    """Run the whole cycle on this machine: pretrain, compress, release, roll out to daemons, train there, release again."""
    from coordinator.demos import demo_loop as demonstration

    folder = out or default_folder("demo-loop")
    with RichProgress() as progress:
        result = demonstration.demo_loop(folder, progress, lambda line: typer.echo(f"  $ {line}", err=True))
    print_summary(result, loop_demo_summary(result), as_json=as_json)


@app.command("demo-serving", epilog="Example: fedloop demo-serving --out runs/my-serving")
def demo_serving(out: RunFolder = None, as_json: Json = False) -> None:
    """Serve a model under load on this machine, while devices train a better one that takes its place."""
    from coordinator.demos import demo_serving as demonstration

    folder = out or default_folder("demo-serving")
    with RichProgress() as progress:
        result = demonstration.demo_serving(
            folder, progress, lambda line: typer.echo(f"  $ {line}", err=True)
        )
    print_summary(result, serving_demo_summary(result), as_json=as_json)


@app.command(epilog="Example: fedloop doctor --json")
def doctor(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Check this installation: who owns our package names, which runtimes work, where data files are."""
    findings = checks.examine(data_dir)
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        print_output(checks.tabulate(findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def serve(**values: Any) -> None:
    """Serve devices and operators until stopped. Prints its addresses on standard output, in one line of JSON."""
    settings = read_settings(values)
    from coordinator.server import logs
    from coordinator.server import serve as serving

    logs.configure(settings.log_format)
    serving.serve(settings, lambda event: _announce(event, Path(event["home"])))


def _announce(event: Mapping[str, Any], home: Path) -> None:
    """Prints the addresses, and on a terminal the link that creates the first account; elsewhere it could end in a log."""
    from coordinator.identity.setup_links import LINK_FILE

    typer.echo(json.dumps(event))
    link = home / LINK_FILE
    if sys.stdout.isatty() and link.exists():
        typer.echo(
            f"no users yet; to create the first account, open within a day: {link.read_text().strip()}"
        )


serve.__signature__ = serve_signature()  # type: ignore[attr-defined]
app.command(epilog="Example: fedloop init my-experiment")(init.init)
app.command(epilog="Example: fedloop docs real-fleet")(documentation.docs)
app.command(
    epilog="Example: fedloop sweep my.toml --over strategy.name=fedavg,fedadam --over local.lr=0.02,0.05 --seeds 3"
)(sweep.sweep)
app.command(epilog="Example: fedloop plan my.toml --set federation.rounds=200")(plan.plan)
app.command(epilog="Example: fedloop serve --device 0.0.0.0:8443 --name fed.example.org")(serve)
app.command("audit-privacy", epilog="Example: fedloop audit-privacy my.toml --group-size 16")(
    audit_privacy.audit_privacy
)
app.command(epilog="Example: fedloop predict runs/patients new-patients.csv")(predict.predict)
app.command(epilog="Example: fedloop run my.toml --set federation.rounds=5 --out runs/fleet")(fleet.run)
app.command(epilog="Example: fedloop strategies multi_krum")(strategies.strategies)
app.command(epilog="Example: fedloop statistics my.toml --out runs/statistics")(statistics.statistics)
app.command(epilog="Example: fedloop compress runs/shakespeare --student charlm --set student.width=48")(
    compress.compress
)
app.command(
    "compress-search", epilog="Example: fedloop compress-search runs/digits --memory 64KB --accuracy 0.95"
)(compress.compress_search)
app.command(epilog="Example: fedloop export runs/compressed --name digits --out runs/release")(export.export)
app.add_typer(audit.app, name="audit")
app.add_typer(device.app, name="device")
app.add_typer(jobs.app, name="jobs")
app.add_typer(model.app, name="model")
app.add_typer(pretrain.app, name="pretrain")
app.add_typer(rollout.app, name="rollout")
app.add_typer(projects.app, name="project")
app.add_typer(release.app, name="release")
app.add_typer(runs.app, name="runs")
serving_commands.app.command(epilog="Example: fedloop serving start serving.toml --memory 4GB")(
    serving_start.start
)
serving_measuring.add_commands(serving_commands.app)
app.add_typer(serving_commands.app, name="serving")
app.add_typer(users.app, name="user")
app.add_typer(access_tokens.app, name="access-token")
add_login(app)


def main() -> None:
    """Entry point of the `fedloop` command."""
    contested = import_guard.problems()
    # `doctor` reports contested names itself, in full.
    if contested and sys.argv[1:2] != ["doctor"]:
        _fail("\n".join(contested), 2)
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except RunInterrupted as error:
        _fail(str(error), error.exit_status)
    except NothingLearnt as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        os._exit(1)


def _fail(message: str, code: int) -> None:
    text = Text.assemble(("error:", "bold red"), " ", printable_lines(message, _ERROR_CHARACTERS))
    plain_console(stderr=True).print(text, soft_wrap=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
