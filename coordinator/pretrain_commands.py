"""`fedloop pretrain`: training in the datacenter from the command line."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from click import Command, Context
from rich.console import Console
from typer.core import TyperGroup

from coordinator.command_options import DataDir, Json, Sets
from coordinator.errors import UserError

if TYPE_CHECKING:
    from coordinator.pretrain_queue import Queue

RUN = "run"


class RunsByDefault(TyperGroup):
    """A group whose command `run` needs not be named: what follows is its arguments, unless it is another command."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [RUN, *args])

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == RUN else name), command, rest


app = typer.Typer(cls=RunsByDefault, no_args_is_help=False, help="Train a model in the datacenter.")

ConfigFile = Annotated[
    Path | None,
    typer.Argument(help="Configuration (TOML); without one, the defaults: digits.", metavar="[CONFIG.toml]"),
]
PlanText = Annotated[
    str,
    typer.Option(
        "--plan", help="How to spread it over processes, such as dp=2,tp=2,pp=2; see docs/pretraining.md."
    ),
]


@app.command(
    RUN,
    hidden=True,
    epilog="Example: fedloop pretrain my.toml --plan dp=2,tp=2 --set train.lr=1e-3 --out runs/mine. "
    "On a machine of 4 slots, before those that wait: fedloop pretrain my.toml --plan dp=4 --slots 4 --priority 5. "
    "See also: fedloop pretrain plan --help",
)
def run(
    config: ConfigFile = None,
    plan: PlanText = "",
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the results; new or empty. Default: runs/<name>-<time>."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Go on with the pretraining in this folder, from its last checkpoint.",
            metavar="DIR",
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Also say where the time of a few steps goes: a page, and a trace of every process.",
        ),
    ] = False,
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            min=1,
            envvar="FEDLOOP_PRETRAIN_SLOTS",
            show_envvar=True,
            help="Processes that train on this machine at once; whoever finds none free waits. Default: no limit, no waiting.",
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            help="With --slots: the higher has its turn first; lower ones save their work, make room, and go on later. Default: 0.",
        ),
    ] = None,
    queue: Annotated[
        Path | None,
        typer.Option(
            "--queue",
            envvar="FEDLOOP_PRETRAIN_QUEUE",
            show_envvar=True,
            help="Folder in which those that share the slots find each other. Default: among the user's state.",
            metavar="DIR",
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Train a model on this machine's processes by any mix of parallelism, and report on it.

    CONFIG.toml describes it (docs/pretraining.md lists every key); without one the defaults run, on digits.
    """
    from coordinator import pretrain_config, pretraining
    from coordinator.display import RichProgress, pretrained_lines

    console = Console(stderr=True)
    with RichProgress(console) as progress:
        surroundings = pretraining.Surroundings(data_dir, progress, queue=_queue(slots, priority, queue))
        if resume is not None:
            if config is not None or plan or sets or out is not None or profile:
                raise UserError(
                    "--resume takes everything from its folder: leave CONFIG, --plan, --set, --out and --profile away"
                )
            if pretraining.is_finished(resume):
                console.print(f"{resume}: this pretraining is already finished")
            report, folder = pretraining.resume(resume, surroundings), resume
        else:
            asked = pretrain_config.load(config, sets or [], plan, profile=profile)
            folder = out or Path("runs") / f"{asked.name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
            report = pretraining.pretrain(asked, folder, surroundings)
    if as_json:
        typer.echo(json.dumps({"out": str(folder), **report}, indent=2))
    else:
        Console(soft_wrap=True).print(pretrained_lines(report, folder), highlight=False)


def _queue(slots: int | None, priority: int | None, folder: Path | None) -> Queue | None:
    from coordinator.pretrain_queue import Queue, default_folder

    if slots is None:
        if priority is not None:
            raise UserError(
                "--priority needs --slots, or FEDLOOP_PRETRAIN_SLOTS: without a limit nobody waits"
            )
        return None
    return Queue(folder.absolute() if folder else default_folder(), slots, priority or 0)


@app.command(
    "plan",
    epilog="Example: fedloop pretrain plan my.toml --processes 8 --hosts 2 --set planner.memory_mib=2048",
)
def plan(
    config: ConfigFile = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="How many there will be in all.")] = 2,
    hosts: Annotated[int, typer.Option("--hosts", min=1, help="Hosts they are spread over.")] = 1,
    sets: Sets = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Profile a few steps and rank the plans that the model can be trained by, with time and memory of each.

    --set planner.KEY=VALUE sets the planner itself: memory_mib, slow_between, scaling, base_batch_size, profile, measure.
    """
    from coordinator import pretrain_config, pretraining
    from coordinator.display import RichProgress, plan_table
    from coordinator.experiment import changed, read

    if processes % hosts:
        raise UserError(f"--processes {processes} --hosts {hosts}: every host has as many processes")
    document = changed(read(config) if config else {}, sets or [])
    planner = document.pop("planner", {})
    asked = pretrain_config.resolve(document, str(config) if config else "pretraining")
    planner = {**planner, "processes": processes, "per_host": processes // hosts}
    with RichProgress(Console(stderr=True)) as progress:
        found = pretraining.plan(asked, planner, pretraining.Surroundings(data_dir, progress))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console(soft_wrap=True).print(plan_table(found), highlight=False)


@app.command(
    "tune", epilog="Example: fedloop pretrain tune my.toml --set tune.candidates=27 --set tune.steps=10"
)
def tune(
    config: ConfigFile = None, sets: Sets = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Look for a learning rate, a warm-up and a batch size by many short trainings and a few longer ones.

    --set tune.KEY=VALUE sets the search: candidates, steps, eta, lr_least, lr_most, warmup_most, batch_least, batch_most.
    """
    from coordinator import pretrain_config, pretraining
    from coordinator.display import RichProgress, tuning_table
    from coordinator.experiment import changed, read

    document = changed(read(config) if config else {}, sets or [])
    tuner = document.pop("tune", {})
    asked = pretrain_config.resolve(document, str(config) if config else "pretraining")
    with RichProgress(Console(stderr=True)) as progress:
        found = pretraining.tune(asked, tuner, pretraining.Surroundings(data_dir, progress))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console(soft_wrap=True).print(tuning_table(found), highlight=False)
