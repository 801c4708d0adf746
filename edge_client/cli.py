"""The `fedloop-edge` command.

Exit codes: 0; 2 for a mistake in what was given; 77 where the coordinator takes this device no more; else 1.
Modules are imported where they are used: the daemon's memory counts, and so does the start of a small command.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from edge_client.config import FILE_VARIABLE, PREFIX, EdgeConfig, Loaded, load, usual_file
from edge_client.errors import Stopped, UserMistake
from edge_client.state import State, daemon_pid, lock
from edge_client.transport import CertificateExpired, ServerRefused, Unreachable

# Plain help: with rich installed typer escapes brackets for it although it does not print by it.
typer.core.HAS_RICH = False

app = typer.Typer(
    name="fedloop-edge",
    help="Takes part in federated learning with this device's own data. Begin with: fedloop-edge enroll URL TOKEN",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="The configuration.", no_args_is_help=True, rich_markup_mode=None)
data_app = typer.Typer(help="The device's data sets.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")

_FULL_BYTES = 1_000_000

AsJson = Annotated[bool, typer.Option("--json", help="For a script to read.")]
Sure = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def main() -> None:
    """Runs the command; a person's mistake is one message and exit code 2, never a traceback."""
    try:
        app()
    except UserMistake as mistake:
        _fail(str(mistake), 2)
    except ServerRefused as refused:
        _fail(f"the coordinator refuses: {refused}", 2 if 400 <= refused.status < 500 else 1)
    except Stopped as stopped:
        from edge_client.service import REFUSED_EXIT

        _fail(str(stopped), REFUSED_EXIT)
    except Unreachable as error:
        _fail(str(error), 1)
    except sqlite3.Error as error:
        _fail(f"the state folder's database: {error}; is its disk full? fedloop-edge doctor looks", 1)
    except OSError as error:
        _fail(str(error), 1)


@app.callback()
def _options(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML).")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the device keeps its state.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="One key of the configuration, such as limits.seconds=600."),
    ] = None,
) -> None:
    flags = [*(sets or []), *([f"state_dir={state_dir}"] if state_dir is not None else [])]
    context.obj = (config, flags)


@app.command()
def enroll(
    context: typer.Context,
    url: str,
    token: str,
    name: Annotated[str | None, typer.Option(help="For people; default: the configured name.")] = None,
    serial: Annotated[
        str | None, typer.Option(help="Of this machine, where the token admits listed machines only.")
    ] = None,
) -> None:
    """Makes this device known to a coordinator. May be repeated after an interruption.

    URL is the coordinator's device address. TOKEN is as `fedloop device token` printed it there; - reads it from
    standard input.

    Example: fedloop-edge enroll https://fed.example:8443 fl1.…
    """
    from edge_client import identity

    config = _config(context)
    with _alone(config.state_dir):
        known = identity.load(config.state_dir)
        if known is not None:
            raise UserMistake(
                f"this device is enrolled already, as {known.device} at {known.url}; `fedloop-edge leave` ends that"
            )

        def wait(seconds: float) -> None:
            typer.echo("waits for a person to approve this device: fedloop device approve", err=True)
            time.sleep(seconds)

        given = sys.stdin.readline() if token == "-" else token
        who = identity.enrol(
            config.state_dir,
            url,
            given,
            name=name or config.name,
            serial_number=serial,
            proxy=config.proxy,
            wait=wait,
        )
    typer.echo(f"enrolled as {who.device} at {who.url}; start it: fedloop-edge run")


@app.command()
def run(context: typer.Context) -> None:
    """Runs the daemon until it is ended. Example: fedloop-edge --config edge.toml run"""
    from edge_client import daemon

    config = _config(context)
    with _alone(config.state_dir):
        daemon.run(config)


@app.command()
def status(context: typer.Context, as_json: AsJson = False) -> None:
    """What the daemon is doing. Example: fedloop-edge status --json"""
    from edge_client import status as reader

    document = reader.read(_config(context).state_dir)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    for line in _status_lines(document):
        typer.echo(line)


@app.command()
def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Looks for what keeps this device from working, and says how to mend it.

    Exit code 1 where something is not well. Example: fedloop-edge doctor
    """
    from edge_client.doctor import examine

    checks = []
    for check in examine(_config(context)):
        checks.append(check)
        if not as_json:
            typer.echo(f"{'ok  ' if check.well else 'FAIL'} {check.name}: {check.found}")
            if check.mend:
                typer.echo(f"     {check.mend}")
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    if not all(check.well for check in checks):
        raise typer.Exit(1)


@app.command()
def pause(context: typer.Context) -> None:
    """Takes on no work until `resume`; what runs now is stopped and given back. Example: fedloop-edge pause"""
    _set_paused(context, True)
    typer.echo("paused; `fedloop-edge resume` goes on")


@app.command()
def resume(context: typer.Context) -> None:
    """Takes on work again. Example: fedloop-edge resume"""
    _set_paused(context, False)
    typer.echo("resumed")


@app.command()
def leave(context: typer.Context, sure: Sure = False) -> None:
    """Ends this device's membership: tells the coordinator, then removes key, certificate and files of runs.

    The ledger is kept. Example: fedloop-edge leave --yes
    """
    from edge_client import identity

    config = _config(context)
    with _alone(config.state_dir):
        try:
            who = identity.load(config.state_dir)
        except UserMistake as damaged:
            typer.echo(f"{damaged}", err=True)
            _confirm(sure, "Remove what is left of this device's identity?")
            where = "the coordinator, which was not told"
        else:
            if who is None:
                raise UserMistake("this device is not enrolled")
            _confirm(sure, f"Leave {who.url} and remove this device's key?")
            _tell_leaving(config, who)
            where = who.url
        _wipe_work(config)
        identity.wipe(config.state_dir)
    typer.echo(f"left {where}; the ledger is kept: fedloop-edge ledger")


@app.command()
def ledger(
    context: typer.Context,
    as_json: AsJson = False,
    show: Annotated[int | None, typer.Option(help="Entry whose payload to look at.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="What else the coordinator learns, key by key.")
    ] = False,
    wipe: Annotated[bool, typer.Option("--wipe", help="Forget all of it.")] = False,
    sure: Sure = False,
) -> None:
    """Everything that ever left this device. Example: fedloop-edge ledger --show 3"""
    from edge_client import disclosure
    from edge_client.ledger import Ledger

    config = _config(context)
    with _state(config) as state:
        book = Ledger(state)
        if wipe:
            _confirm(sure, "Forget everything this device has recorded about what left it?")
            book.wipe()
            typer.echo("the ledger is empty")
        elif explain:
            typer.echo(json.dumps(disclosure.explained(config, state), indent=2))
        elif show is not None:
            disclosure.show(book, book.entry(show), as_json, typer.echo)
        else:
            disclosure.table(book.entries(), as_json, typer.echo)


@app.command("opt-out")
def opt_out(
    context: typer.Context,
    run_name: Annotated[str, typer.Argument(metavar="RUN")],
    undo: Annotated[bool, typer.Option("--undo", help="Take part again.")] = False,
) -> None:
    """Takes no part in a run from now on; results of it that wait are thrown away.

    RUN is the name or the id of a run. Example: fedloop-edge opt-out digits
    """
    config = _config(context)
    with _state(config) as state:
        state.set_opted_out(run_name, not undo)
    _wake(config)
    typer.echo(f"takes part in {run_name} again" if undo else f"takes no part in {run_name}")


@app.command()
def wipe(context: typer.Context, sure: Sure = False) -> None:
    """Removes all files of runs, results that wait and the client rules' states; identity and ledger stay.

    Example: fedloop-edge wipe --yes
    """
    config = _config(context)
    with _alone(config.state_dir):
        _confirm(sure, "Remove all files of runs, also results that were not delivered yet?")
        _wipe_work(config)
    typer.echo("removed")


@app.command("install-service")
def install_service(
    context: typer.Context,
    user: Annotated[bool, typer.Option("--user", help="For this user.")] = False,
    system: Annotated[bool, typer.Option("--system", help="For the machine; needs root.")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Print the unit, install nothing.")] = False,
) -> None:
    """Installs the daemon as a systemd service. Example: fedloop-edge install-service --user"""
    from edge_client import service

    if user == system:
        raise UserMistake("give exactly one of --user and --system")
    scope: service.Scope = "user" if user else "system"
    file, sets = context.obj
    text = service.unit(scope, _config(context), file or usual_file(os.environ), sets)
    for variable in sorted(each for each in os.environ if each.startswith(PREFIX) and each != FILE_VARIABLE):
        typer.echo(f"note: {variable} is set here and not for the service; put it into its file", err=True)
    if only_print:
        typer.echo(text, nl=False)
        return
    path = service.install(scope, text)
    flag = "--user " if user else ""
    typer.echo(f"{path} installed; start it: systemctl {flag}enable --now fedloop-edge")
    if system:
        typer.echo(
            "it runs as a user of its own: the data sets must be readable for it, by their mode or by "
            "SupplementaryGroups= in `systemctl edit fedloop-edge`"
        )


Model = Annotated[
    str | None, typer.Option("--model", help="Its name in the registry, where this device has several.")
]
Release = Annotated[
    Path | None, typer.Option("--release", help="A release folder, rather than what is installed.")
]


@app.command()
def predict(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Rows: .npy, .npz (array x) or .csv.", metavar="FILE")],
    model: Model = None,
    release: Release = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option("--leave-out", help="Column of a .csv that is no input, such as the label."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What the installed model says of the rows in FILE: class and probability, a line each.

    Example: fedloop-edge predict readings.csv --leave-out label
    """
    from edge_client.infer import selftest
    from edge_client.infer.predict import active_release, predictions
    from edge_client.infer.rows import read_rows
    from edge_client.infer.runtime import load as load_release

    with _fit_release():
        loaded = load_release(release or active_release(_config(context).state_dir, model))
        selftest.require(loaded)
        found = predictions(loaded, read_rows(file, loaded.manifest, tuple(leave_out or ())))
    if as_json:
        described = {"model": loaded.manifest.model, "version": loaded.manifest.version}
        typer.echo(json.dumps({**described, "predictions": [asdict(each) for each in found]}))
        return
    for each in found:
        pairs = [(each.label, each.probability)]
        if isinstance(each.label, list) and isinstance(each.probability, list):
            pairs = list(zip(each.label, each.probability, strict=True))
        typer.echo("  ".join(f"{label} {probability:.4f}" for label, probability in pairs))


@app.command("serve-model")
def serve_model(
    context: typer.Context,
    path: Annotated[Path, typer.Option("--socket", help="Unix socket to listen on.")],
    model: Model = None,
    release: Release = None,
    max_batch: Annotated[int, typer.Option(min=1, max=1024, help="Most rows that are run together.")] = 16,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, max=1000, help="How long a request waits for others.")
    ] = 2.0,
) -> None:
    """Answers programs of this device with the installed model, a JSON object a line, until it is ended.

    A request is {"id": 1, "x": [row, …]}. A newly installed release is picked up without a restart.
    Example: fedloop-edge serve-model --socket /run/user/1000/fedloop.sock
    """
    import asyncio

    from edge_client.infer.predict import active_release
    from edge_client.infer.service import Batching, Service

    state_dir = _config(context).state_dir

    def find() -> Path:
        return release or active_release(state_dir, model)

    async def serve() -> None:
        batching = Batching(max_batch, max_wait_ms / 1000)
        service = Service(find, batching, lambda line: typer.echo(line, err=True))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.end)
        await service.serve(path)

    with _fit_release():
        asyncio.run(serve())


@config_app.command("check")
def config_check(context: typer.Context, as_json: AsJson = False) -> None:
    """Prints what holds and where each value came from. Example: fedloop-edge --config edge.toml config check"""
    origins = _loaded(context).origins
    if as_json:
        document = {key: {"value": value, "origin": origin} for key, (value, origin) in origins.items()}
        typer.echo(json.dumps(document, indent=2, default=str))
        return
    width = max(len(key) for key in origins)
    for key, (value, origin) in origins.items():
        typer.echo(f"{key:<{width}}  {json.dumps(value, default=str)}  ({origin})")


@data_app.command("preview")
def data_preview(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: AsJson = False,
) -> None:
    """Schema and row count of a configured data set, as a training would read it. Nothing leaves the device.

    NAME is what experiments call it; without one all are read.
    Example: fedloop-edge data preview digits
    """
    from edge_client import datasets

    config = _config(context)
    tables = config.data
    if not tables:
        raise UserMistake(
            "no data set is configured; add a table [data.NAME] to the configuration (--config FILE): "
            '[data.digits] with kind = "csv", path = "digits.csv" and label = "digit", for example'
        )
    if name is not None and name not in tables:
        raise UserMistake(
            f"no data set {name!r} is configured; there are: {', '.join(sorted(tables)) or 'none'}"
        )
    memory = config.limits.memory_bytes
    found = {each: datasets.preview(table, memory) for each, table in tables.items() if name in (None, each)}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    for each, view in found.items() if not as_json else ():
        typer.echo(f"{each}:")
        for key, value in view.items():
            typer.echo(f"  {key}: {value if isinstance(value, str) else json.dumps(value)}")
    if any("problem" in view for view in found.values()):
        raise typer.Exit(2)


def _loaded(context: typer.Context) -> Loaded:
    file, flags = context.obj
    return load(file, os.environ, flags)


def _config(context: typer.Context) -> EdgeConfig:
    return _loaded(context).config


@contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Holds the state folder, so that no daemon works in it meanwhile."""
    file = lock(state_dir)
    if file is None:
        raise UserMistake(
            f"a daemon (process {daemon_pid(state_dir)}) works in {state_dir}; end it first, or give another --state-dir"
        )
    try:
        yield
    finally:
        file.close()


@contextmanager
def _fit_release() -> Iterator[None]:
    """A release that cannot be used here, and rows that do not fit it, are a person's to mend."""
    from edge_client.connectors.connector import DataProblem
    from edge_client.infer.runtime import WrongRows
    from edge_client.train.golden import SelfTestFailed
    from edge_client.wire.manifest import ManifestError

    try:
        yield
    except (ManifestError, SelfTestFailed, DataProblem, WrongRows) as error:
        raise UserMistake(str(error)) from None


@contextmanager
def _state(config: EdgeConfig) -> Iterator[State]:
    state = State(config.state_dir)
    try:
        yield state
    finally:
        state.close()


def _set_paused(context: typer.Context, paused: bool) -> None:
    config = _config(context)
    with _state(config) as state:
        state.set_paused(paused)
    _wake(config)


def _wake(config: EdgeConfig) -> None:
    """Has a running daemon look at once."""
    pid = daemon_pid(config.state_dir)
    if pid is not None:
        # It may be ending, or be another user's; it looks by itself within a minute.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)


def _tell_leaving(config: EdgeConfig, who: Any) -> None:
    """It leaves all the same where nobody hears it."""
    from edge_client import transport

    link = transport.Link(who.url, transport.pinned(who.ca_pem, who.credentials), proxy=config.proxy)
    try:
        link.post("/leave", {})
    except (Unreachable, ServerRefused, CertificateExpired) as error:
        typer.echo(f"the coordinator was not told: {error}", err=True)
    finally:
        link.close()


def _wipe_work(config: EdgeConfig) -> None:
    from edge_client import daemon

    daemon.wipe(config)


def _status_lines(document: dict[str, Any]) -> Iterator[str]:
    if not document["enrolled"]:
        yield "not enrolled: fedloop-edge enroll URL TOKEN"
        return
    yield f"device {document['device']} ({document['name']}) of {document['coordinator']}"
    running = (
        f"running as process {document['pid']}" if document["running"] else "not running: fedloop-edge run"
    )
    yield running + (", paused: fedloop-edge resume" if document["paused"] else "")
    if "state" in document:
        yield f"{document['state']}: {document['words']}"
    if document["disk_free_bytes"] < _FULL_BYTES:
        yield "the disk of the state folder is full: make room, then it goes on by itself"
    if document["opted_out"]:
        yield f"takes no part in: {', '.join(document['opted_out'])}"
    if document["results_waiting"]:
        yield f"results that wait to be delivered: {document['results_waiting']}"
    for model in document["models"]:
        yield _model_line(model)
    for note in document.get("notes", ()):
        yield f"- {note}"


def _model_line(model: dict[str, Any]) -> str:
    version, last = model["version"], model["last"]
    runs = "no version runs" if version is None else f"version {version} in slot {model['active']}"
    if model["on_trial"]:
        runs += ", on trial"
    others = [f"{held} in slot {name}" for name, held in model["slots"].items() if name != model["active"]]
    kept = f", {others[0]}" if others else ""
    told = ""
    if last is not None:
        why = f" ({last['code']}: {last['words']})" if last["code"] else ""
        told = f"; version {last['version']}: {last['standing']}{why}"
    return f"model {model['model']}: {runs}{kept}{told}"


def _confirm(sure: bool, question: str) -> None:
    if sure:
        return
    if not sys.stdin.isatty():
        raise UserMistake("this asks for confirmation and there is nobody to ask; give --yes")
    typer.confirm(question, abort=True)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(code)
