"""`fedloop serve` and `fedloop run`: the real fleet from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from coordinator.command_options import Sets
from coordinator.errors import UserError
from coordinator.operator_client import Coordinator

ExperimentFile = Annotated[
    Path | None,
    typer.Argument(
        help="Experiment file (TOML); without one, the defaults: digits.", metavar="[EXPERIMENT.toml]"
    ),
]


def serve(
    home: Annotated[
        Path | None,
        typer.Option(
            envvar="FEDLOOP_HOME",
            show_envvar=True,
            help="Folder of all state. Default: fedloop among the user's data.",
        ),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            envvar="FEDLOOP_DATABASE_URL",
            show_envvar=True,
            help="SQLAlchemy URL, such as postgresql+psycopg://… Default: SQLite in the home.",
        ),
    ] = None,
    operator: Annotated[
        str | None,
        typer.Option(
            envvar="FEDLOOP_OPERATOR",
            show_envvar=True,
            metavar="HOST:PORT",
            help="Where the operator API listens. Default: 127.0.0.1:8080",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            envvar="FEDLOOP_DEVICE",
            show_envvar=True,
            metavar="HOST:PORT",
            help="Where the device API listens. Default: 127.0.0.1:8443",
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Host name or address in the server's certificate; may be repeated."),
    ] = None,
    device_url: Annotated[
        str | None,
        typer.Option(
            envvar="FEDLOOP_DEVICE_URL", show_envvar=True, help="What devices are told to connect to."
        ),
    ] = None,
    ca_cert: Annotated[
        Path | None, typer.Option(help="Certificate of a CA of your own, PEM. Default: one is made.")
    ] = None,
    ca_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address of a proxy whose forwarded client certificates are believed."),
    ] = None,
    approve: Annotated[bool, typer.Option("--approve", help="A person approves every enrolment.")] = False,
    certificate_days: Annotated[
        str | None, typer.Option(metavar="DAYS", help="Lifetime of a device's certificate. Default: 30")
    ] = None,
    lease_seconds: Annotated[
        str | None,
        typer.Option(
            envvar="FEDLOOP_LEASE_SECONDS",
            show_envvar=True,
            metavar="SECONDS",
            help="Silence of a device after which its task is given up. Default: 120",
        ),
    ] = None,
    checkins_per_second: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="What the check-ins of all devices are spread to. Default: 100"),
    ] = None,
    held: Annotated[
        str | None,
        typer.Option(metavar="COUNT", help="Most devices that wait for a task in a long poll. Default: 1000"),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="FEDLOOP_DATA_DIR", show_envvar=True, help="Folder that holds the data files."),
    ] = None,
    allow_path: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Further folder with files that experiments may name (data.path, model.init); may be repeated.",
        ),
    ] = None,
    allow_code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Code of your own, such as mine:build, that experiments may name and workers then run, in a sandbox; "
            "may be repeated. Default: none.",
        ),
    ] = None,
    no_sandbox: Annotated[
        bool,
        typer.Option(
            "--no-sandbox",
            help="Start workers unconfined: where the kernel has no Landlock, --allow-code needs it. The code can then "
            "read this coordinator's keys.",
        ),
    ] = False,
    log_format: Annotated[
        str, typer.Option(envvar="FEDLOOP_LOG_FORMAT", show_envvar=True, help="auto, text or json.")
    ] = "auto",
    insecure_operator: Annotated[
        bool,
        typer.Option(
            "--insecure-operator", help="Let the operator API, plain HTTP, listen beyond this machine."
        ),
    ] = False,
) -> None:
    """Serve devices and operators until stopped. Says where on standard output, in one line of JSON."""
    from coordinator.serve_options import read_settings
    from coordinator.settings import default_home

    settings = read_settings(
        home=(home.expanduser().absolute() if home else default_home()),
        database_url=database_url,
        operator=operator,
        device=device,
        name=name,
        device_url=device_url,
        ca_cert=ca_cert,
        ca_key=ca_key,
        trusted_proxy=trusted_proxy,
        approve=approve,
        certificate_days=certificate_days,
        lease_seconds=lease_seconds,
        checkins_per_second=checkins_per_second,
        held=held,
        data_dir=data_dir,
        allow_path=allow_path,
        allow_code=allow_code,
        no_sandbox=no_sandbox,
        log_format=log_format,
        insecure_operator=insecure_operator,
    )
    from coordinator import logs
    from coordinator import serve as serving

    logs.configure(log_format)
    serving.serve(settings, lambda event: typer.echo(json.dumps(event)))


def run(
    experiment: ExperimentFile = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the results; new or empty. Default: runs/<name>-<time>."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the run, print its id, and do not wait.")
    ] = False,
    follow: Annotated[
        str | None, typer.Option("--follow", help="Watch a run that was started before.", metavar="ID")
    ] = None,
    cancel: Annotated[str | None, typer.Option("--cancel", help="End a run now.", metavar="ID")] = None,
    coordinator: Coordinator = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as JSON on standard output, nothing else there."),
    ] = False,
) -> None:
    """Train on the fleet of devices of a running coordinator and report on it."""
    from coordinator import following
    from coordinator.operator_client import connect

    if cancel is not None:
        _alone("--cancel", experiment, sets, out, detach, follow)
        shown = connect(coordinator).post(f"/runs/{cancel}/cancel")
        typer.echo(json.dumps(shown) if as_json else f"run {cancel} is cancelled")
        return
    if follow is not None:
        _alone("--follow", experiment, sets, None, detach, None)
    if out is not None:
        _require_empty(out)
    document = _document(experiment, sets or []) if follow is None else {}
    client = connect(coordinator)
    shown = client.get(f"/runs/{follow}") if follow else following.submit(client, document, [])
    if detach:
        typer.echo(json.dumps(shown) if as_json else shown["id"])
        return
    _follow(client, shown, out, as_json)


def _follow(client: Any, shown: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from coordinator import following
    from coordinator.display import RichProgress, closing_lines

    folder = out or _default_out(shown["name"])
    console = Console(stderr=True)
    console.print(f"run {shown['id']}", highlight=False)
    with RichProgress(console) as progress:
        report = following.follow(client, shown["id"], folder, progress)
    if as_json:
        typer.echo(json.dumps({"out": str(folder), **report}, indent=2))
    else:
        Console(soft_wrap=True).print(closing_lines(report, folder), highlight=False)


def _document(experiment: Path | None, sets: list[str]) -> dict[str, Any]:
    """The experiment as it was written, checked here so that errors name the file; paths made absolute."""
    from coordinator import experiment as experiments

    document = experiments.changed(experiments.read(experiment) if experiment else {}, sets)
    resolved = experiments.resolve(document, str(experiment) if experiment else "experiment", "devices")
    for table, key in (("data", "path"), ("model", "init")):
        value = getattr(getattr(resolved, table), key)
        if value is not None:
            document[table][key] = value
    return document


def _alone(option: str, *others: object) -> None:
    if any(other for other in others):
        raise UserError(f"{option} takes everything from the run: leave the other options away")


def _require_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: the folder is not empty; name another one")


def _default_out(name: str) -> Path:
    from datetime import datetime

    return Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
