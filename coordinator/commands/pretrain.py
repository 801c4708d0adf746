"""`fedloop pretrain`: train a model in the datacenter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from click import Command, Context
from typer.core import TyperGroup

from coordinator.commands.data import tokenization
from coordinator.commands.options import DataDir, Json, Mlflow, RunFolder, Sets, TensorBoard
from coordinator.commands.output import RichProgress, print_summary
from coordinator.commands.summaries import plan_summary, pretraining_summary, tuning_summary
from coordinator.errors import UserError
from coordinator.output_folders import default_folder

if TYPE_CHECKING:
    from coordinator.datacenter.pretrain_hosts import Hosts
    from coordinator.datacenter.pretrain_queue import Queue

RUN = "run"


class DefaultCommandGroup(TyperGroup):
    """A group whose default command is `run`: the arguments are its own, unless they begin with another command."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [RUN, *args])

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == RUN else name), command, rest


app = typer.Typer(
    cls=DefaultCommandGroup,
    no_args_is_help=False,
    suggest_commands=False,
    help="Train a model in the datacenter.",
)

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
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        help="Resume the pretraining in this folder from its last checkpoint. --plan replaces its plan; --set "
        "changes how long it trains, its rates and its checkpoints, such as train.steps=800.",
        metavar="DIR",
    ),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Also show where the time of a few steps goes: a page, and a trace of every process.",
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(
        "--slots",
        min=1,
        envvar="FEDLOOP_PRETRAIN_SLOTS",
        show_envvar=True,
        help="Processes that may train on this machine at once; a job waits for free slots. Default: no limit.",
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(
        "--priority",
        help="With --slots: higher goes first; jobs with a lower one save their work, make room, and resume later. Default: 0.",
    ),
]
QueueDir = Annotated[
    Path | None,
    typer.Option(
        "--queue",
        envvar="FEDLOOP_PRETRAIN_QUEUE",
        show_envvar=True,
        help="Folder through which the jobs that share the slots coordinate. Default: among the user's state.",
        metavar="DIR",
    ),
]


HostsFile = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        help="Train on the hosts in this file, one a line: name [slots=N] [address=IP]; or `slurm`, on the nodes of this "
        "Slurm job. All must see the folder of the training; see docs/many-hosts.md.",
        metavar="FILE",
    ),
]
RemoteShell = Annotated[
    str | None,
    typer.Option(
        "--remote-shell",
        envvar="FEDLOOP_REMOTE_SHELL",
        show_envvar=True,
        help="With --hosts: command that runs another on {host}. Default: ssh -o BatchMode=yes … {host}, in Slurm srun.",
    ),
]
RemotePython = Annotated[
    str | None,
    typer.Option(
        "--remote-python", help="With --hosts: Python interpreter on the hosts. Default: this command's."
    ),
]


@app.command(
    RUN,
    hidden=True,
    epilog="Example: fedloop pretrain my.toml --plan dp=2,tp=2 --set train.lr=1e-3 --out runs/mine. "
    "Longer and with another plan: fedloop pretrain --resume runs/mine --plan dp=2 --set train.steps=800. "
    "On a machine with 4 slots, before waiting jobs: fedloop pretrain my.toml --plan dp=4 --slots 4 --priority 5. "
    "See also: fedloop pretrain plan --help and fedloop pretrain tokenize --help",
)
def run(
    config: ConfigFile = None,
    plan: PlanText = "",
    sets: Sets = None,
    out: RunFolder = None,
    resume: Resume = None,
    profile: Profile = False,
    slots: Slots = None,
    priority: Priority = None,
    queue: QueueDir = None,
    hosts: HostsFile = None,
    remote_shell: RemoteShell = None,
    remote_python: RemotePython = None,
    data_dir: DataDir = None,
    mlflow: Mlflow = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Train a model in processes on this machine, or on several, with any mix of parallelism, and report on it.

    CONFIG.toml describes it (docs/pretraining.md lists every key); without one the defaults run, on digits.
    """
    from coordinator.datacenter import pretrain_config, pretraining
    from coordinator.datacenter.jobs import Environment
    from coordinator.datacenter.stop_signals import stop_on_signal
    from coordinator.reports.trackers import Trackers

    trackers = Trackers(mlflow, tensorboard)
    with RichProgress() as progress:
        environment = Environment(
            data_dir,
            progress,
            queue=_queue(slots, priority, queue),
            hosts=_hosts(hosts, remote_shell, remote_python, slots),
            supervisor=stop_on_signal,
        )
        trackers.check()
        if resume is not None:
            if config is not None or out is not None or profile:
                raise UserError(
                    "--resume takes model and data from its folder: omit CONFIG, --out and --profile"
                )
            if pretraining.is_finished(resume) and not (sets or plan):
                progress.print(f"{resume}: this pretraining is already finished")
            report, folder = pretraining.resume(resume, environment, sets or [], plan), resume
        else:
            loaded = pretrain_config.load(config, sets or [], plan, profile=profile)
            folder = out or default_folder(loaded.name)
            report = pretraining.pretrain(loaded, folder, environment)
        trackers.copy_pretraining(folder, report, environment.clock())
    print_summary({"out": str(folder), **report}, pretraining_summary(report, folder), as_json=as_json)


def _hosts(
    source: str | None, remote_shell: str | None, remote_python: str | None, slots: int | None
) -> Hosts | None:
    from coordinator.datacenter import pretrain_hosts

    if source is None:
        if remote_python is not None:
            raise UserError("--remote-python needs --hosts: without it, everything runs on this machine")
        return None
    if slots is not None:
        raise UserError(
            "--slots is for trainings on this machine; with --hosts the file says how many slots a host has"
        )
    return pretrain_hosts.load(source, remote_shell, remote_python)


def _queue(slots: int | None, priority: int | None, folder: Path | None) -> Queue | None:
    from coordinator.datacenter.pretrain_queue import Queue, default_folder

    if slots is None:
        if priority is not None:
            raise UserError(
                "--priority needs --slots, or FEDLOOP_PRETRAIN_SLOTS: without a limit no job waits"
            )
        return None
    return Queue(folder.absolute() if folder else default_folder(), slots, priority or 0)


@app.command(
    "plan",
    epilog="Example: fedloop pretrain plan my.toml --processes 8 --hosts 2 --set planner.memory_mib=2048",
)
def plan(
    config: ConfigFile = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Number of processes in all.")] = 2,
    hosts: Annotated[
        int, typer.Option("--hosts", min=1, help="Number of hosts that they are spread over.")
    ] = 1,
    sets: Sets = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Profile a few steps and rank the possible plans, with the time and memory of each.

    --set planner.KEY=VALUE sets the planner itself: memory_mib, slow_between, scaling, base_batch_size, profile, measure, cache.
    """
    from coordinator.datacenter import pretrain_config, pretraining
    from coordinator.datacenter.jobs import Environment

    if processes % hosts:
        raise UserError(
            f"--processes {processes} --hosts {hosts}: every host must have the same number of processes"
        )
    resolved, planner = pretrain_config.load_with(config, sets or [], "planner")
    planner = {**planner, "processes": processes, "per_host": processes // hosts}
    with RichProgress() as progress:
        ranking = pretraining.plan(resolved, planner, Environment(data_dir, progress))
    print_summary(ranking, plan_summary(ranking), as_json=as_json)


@app.command(
    "tune", epilog="Example: fedloop pretrain tune my.toml --set tune.candidates=27 --set tune.steps=10"
)
def tune(
    config: ConfigFile = None, sets: Sets = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Search learning rate, warm-up and batch size with many short trainings and a few longer ones.

    --set tune.KEY=VALUE sets the search: candidates, steps, eta, lr_least, lr_most, warmup_most, batch_least, batch_most.
    """
    from coordinator.datacenter import pretrain_config, pretraining
    from coordinator.datacenter.jobs import Environment

    resolved, tuner = pretrain_config.load_with(config, sets or [], "tune")
    with RichProgress() as progress:
        results = pretraining.tune(resolved, tuner, Environment(data_dir, progress))
    print_summary(results, tuning_summary(results), as_json=as_json)


Out = Annotated[Path, typer.Option("--out", help="Folder to create; new or empty.")]


@app.command("import", epilog="Example: fedloop pretrain import Qwen2.5-0.5B/ --out runs/qwen")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder in Hugging Face's layout.")],
    out: Out,
    as_json: Json = False,
) -> None:
    """Make a model of GPT-2, Llama, Qwen2 or BERT one of ours, to compress, serve or predict with.

    DIR has config.json and safetensors. To train it further, no import is needed: --set model.init=DIR.
    """
    from coordinator.datacenter import hugging_face

    result = hugging_face.import_folder(folder, out)
    lines = [
        f"{result['model']['name']} of {result['parameters']:,} parameters is in {out}/",
        result["text"],
    ]
    print_summary({"out": str(out), **result}, "\n".join(lines), as_json=as_json)


@app.command("export", epilog="Example: fedloop pretrain export runs/plays --out plays-gpt2")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a finished pretraining.")],
    out: Out,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            help="Folder of the tokenizer's files. Default: that of the model that the training started from, or the byte "
            "pairs that it learnt.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a trained gpt or bert as a Hugging Face folder, which transformers loads with from_pretrained."""
    from coordinator.datacenter import hugging_face

    result = hugging_face.export_folder(folder, out, tokenizer)
    config = result["config"]
    lines = [
        f"{config['architectures'][0]} of {result['parameters']:,} parameters is in {out}/",
        f"tokenizer: {result['tokenizer'] or 'none, the tokens of this model have no file that transformers reads'}",
    ]
    print_summary({"out": str(out), **result}, "\n".join(lines), as_json=as_json)


app.command(
    "tokenize",
    epilog="Example: fedloop pretrain tokenize texts/ more.jsonl --encoding 'bpe(8192)' --out tokens && "
    "fedloop pretrain --set data.dataset=tokens --set data.path=tokens",
)(tokenization.tokenize)
