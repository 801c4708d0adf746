"""`fedloop serving profile|tune|bench`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from coordinator import option_parsers
from coordinator.commands.options import Json
from coordinator.commands.output import (
    format_bytes,
    make_table,
    plain_console,
    print_json,
    print_output,
    print_summary,
)
from coordinator.commands.serving.calls import AllowCode, Home, call, home_of, read_place
from coordinator.errors import UserError
from coordinator.operator.client import Coordinator, connect
from edge_client.files import read_regular
from edge_client.wire.strict import printable

if TYPE_CHECKING:
    from coordinator.serving.deployments import DeploymentSection
    from coordinator.serving.measuring.tables import ProfileTable
    from coordinator.serving.versions import StoredVersion

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A version of the registry, such as digits@champion, or the folder of a run, a pretraining, a compression or a "
        "release.",
        show_default=False,
    ),
]
SloMs = Annotated[
    float, typer.Option("--slo-ms", help="Time limit of a batch, in milliseconds.", min=0.001, max=86_400_000)
]
MaxBatch = Annotated[
    int,
    typer.Option("--max-batch", help="Rows that are computed together, at most.", min=1, max=65_536),
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda, for models of PyTorch.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, float16 or bfloat16, for models of PyTorch.")]


def add_commands(app: typer.Typer) -> None:
    """Adds the commands that measure."""
    app.command(epilog="Example: fedloop serving profile digits@champion --threads 1,2 --slo-ms 50")(profile)
    app.command(epilog="Example: fedloop serving tune digits@champion --slo-ms 50")(tune)
    app.command(epilog="Example: fedloop serving bench digits --rows 16 --binary --rate 500")(bench)


def profile(
    model: Model,
    threads: Annotated[
        str, typer.Option("--threads", help="Threads of a worker; several between commas.", metavar="N,…")
    ] = "1",
    max_batch: MaxBatch = 64,
    slo_ms: SloMs = 1000.0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    home: Home = None,
    allow_code: AllowCode = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Measure each backend of a model by batch size and threads; `backend = "auto"` then takes the fastest.

    A running server takes it when it opens the version next: at a deploy, at a new version, at its start.
    """
    from coordinator.serving.measuring import profiling, tables

    counts = _threads(threads)
    folder = home_of(home)
    section = _section(model=model, slo_ms=slo_ms, max_batch=max_batch, device=device, dtype=dtype)
    stored = _find(folder, model, allow_code, coordinator)
    found = asyncio.run(profiling.profile(stored, section, counts, folder / "workers.log", _note))
    try:
        paths = [tables.write_table(folder, table) for table in found]
    except OSError as error:
        raise UserError(f"--home {folder}: the profile cannot be written: {error.strerror}") from None
    if as_json:
        print_json({"version": stored.number, "profiles": [each.model_dump() for each in found]})
        return
    for table, path in zip(found, paths, strict=True):
        typer.echo(f"threads = {table.threads}")
        print_output(_profile_table(table))
        for backend, each in table.backends.items():
            if each.problem:
                typer.echo(f"{backend} cannot be used: {printable(each.problem, 500)}")
        choice = (
            f'backend = "auto" is {table.best} from now on'
            if table.best
            else f'no backend computes a batch within --slo-ms {slo_ms:g}; backend = "auto" stays the first one'
        )
        typer.echo(f"{choice} ({path})\n")
    typer.echo("A running server takes it when it opens the version next: fedloop serving deploy")


def tune(
    model: Model,
    slo_ms: SloMs = 1000.0,
    max_batch: MaxBatch = 64,
    backend: Annotated[
        str,
        typer.Option(
            "--backend", help="auto, litert, torch, channels_last, compiled, onnx, packed or keras."
        ),
    ] = "auto",
    seconds: Annotated[
        float, typer.Option("--seconds", help="Of each combination.", min=0.1, max=3600)
    ] = 1.0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    home: Home = None,
    allow_code: AllowCode = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Find how many workers with how many threads answer most rows a second on this machine."""
    from coordinator.serving.measuring import tuning

    folder = home_of(home)
    section = _section(
        model=model, slo_ms=slo_ms, max_batch=max_batch, backend=backend, device=device, dtype=dtype
    )
    stored = _find(folder, model, allow_code, coordinator)
    trials = asyncio.run(tuning.tune(folder, stored, section, seconds, _note))
    chosen = tuning.best(trials, slo_ms)
    line = chosen and f"workers = {{ min = 1, max = {chosen.workers}, threads = {chosen.threads} }}"
    if as_json:
        print_json({"version": stored.number, "trials": [asdict(each) for each in trials], "workers": line})
        return
    columns = ("workers", "threads", "backend", "batch", "rows/s", "p95 ms", "memory")
    shown = make_table(*columns, right=("workers", "threads", "batch", "rows/s", "p95 ms", "memory"))
    for each in trials:
        shown.add_row(
            str(each.workers),
            str(each.threads),
            each.backend,
            str(each.batch),
            f"{each.rows_a_second:,.0f}",
            f"{each.latency_ms:.2f}",
            format_bytes(each.memory_bytes),
        )
    print_output(shown)
    typer.echo(line or f"no combination answers within --slo-ms {slo_ms:g}; raise it, or lower --max-batch")


def bench(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A deployment of the running server.", show_default=False)
    ],
    rows: Annotated[int, typer.Option("--rows", help="Rows of a request.", min=1, max=1_000_000)] = 1,
    connections: Annotated[
        int, typer.Option("--connections", help="Connections that are kept open.", min=1, max=10_000)
    ] = 32,
    seconds: Annotated[
        float, typer.Option("--seconds", help="How long it lasts.", min=0.1, max=86_400)
    ] = 10.0,
    binary: Annotated[bool, typer.Option("--binary", help="Binary tensors instead of JSON.")] = False,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            help="Requests a second on average, at random times, whatever is answered (open loop). Default: each connection sends "
            "its next request once it has the answer (closed loop).",
            min=0.001,
            max=1e6,
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="File with the token that requests must have, if the server has one."
        ),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Measure a running server of this machine under load: rate, latency, failures and CPU time."""
    import uvloop

    from coordinator.serving.measuring import benchmark

    listed = call(home, "GET", "deployments")["deployments"]
    status = next((each for each in listed if each["name"] == name), None)
    if status is None or not status["ready"]:
        known = ", ".join(each["name"] for each in listed if each["ready"]) or "nothing"
        raise UserError(f"{printable(name, 100)!r} is not ready or not deployed; ready: {known}")
    place = read_place(home)
    plan = benchmark.Plan(name, rows, connections, seconds, binary, rate, _token(token_file))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(benchmark.run(place["url"], place["pid"], plan, status))
    print_summary(found, "\n".join(_lines(found)), as_json=as_json)


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return read_regular(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {path}: cannot be read: {error}") from None


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    rate = f"{found['rate']:g} requests a second due" if found["rate"] else "closed loop"
    yield (
        f"{found['deployment']}: {found['connections']} connections, {rate}, {found['rows']} "
        f"row{'s' * (found['rows'] != 1)} a request, {found['seconds']:.1f} s"
    )
    yield f"{found['requests_a_second']:,.1f} requests/s, {found['rows_a_second']:,.1f} rows/s"
    if found["answered"]:
        yield f"latency: p50 {found['p50_ms']:.2f} ms, p95 {found['p95_ms']:.2f} ms, p99 {found['p99_ms']:.2f} ms"
    failed = ", ".join(f"{code} {count:,}" for code, count in found["failures"].items())
    yield f"failed: {failed or 'none'} of {found['requests']:,}"
    share = 1000 * found["server_cpu_seconds"] / max(found["requests"], 1)
    yield (
        f"CPU: the server's processes {found['server_cpu_seconds']:.2f} s, {share:.3f} ms a request; this client "
        f"{found['client_cpu_seconds']:.2f} s on the same machine"
    )


def _section(**values: Any) -> DeploymentSection:
    """Raises: UserError: a value is none that a deployment may have."""
    from coordinator.serving.deployments import parse

    return parse({"deployment": {"model": values}}, "the command")["model"]


def _find(folder: Path, model: str, allow_code: list[str] | None, coordinator: str | None) -> StoredVersion:
    from coordinator.datacenter.predictions import open_model
    from coordinator.serving.versions import Versions

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--home {folder}: cannot be used: {error.strerror}") from None
    return Versions(folder, lambda: connect(coordinator), open_model, tuple(allow_code or ())).find(model)


def _threads(text: str) -> list[int]:
    parse = option_parsers.integer(1, 256)
    try:
        return sorted({parse(each) for each in text.split(",")})
    except ValueError as error:
        raise UserError(f"--threads {text!r}: {error}, or several between commas, such as 1,2") from None


def _note(line: str) -> None:
    """A step that is done now, for a person who waits at a terminal."""
    console = plain_console(stderr=True)
    if console.is_terminal:
        console.print(Text(f"{line} …", style="dim"))


def _profile_table(table: ProfileTable) -> Table:
    """One line for each number of rows, one pair of columns for each backend."""
    columns = {name: each for name, each in table.backends.items() if each.seconds}
    names = [text for name in columns for text in (f"{name}: ms", "rows/s")]
    shown = make_table("rows", *names, right=("rows", *names))
    for size in sorted({int(size) for each in columns.values() for size in each.seconds}):
        cells = [_cells(each.seconds, size) for each in columns.values()]
        shown.add_row(str(size), *(text for pair in cells for text in pair))
    memory = [text for each in columns.values() for text in (format_bytes(each.memory_bytes), "")]
    shown.add_row("memory", *memory)
    return shown


def _cells(seconds: Mapping[str, float], size: int) -> tuple[str, str]:
    taken: Any = seconds.get(str(size))
    return ("", "") if taken is None else (f"{1000 * taken:.3f}", f"{size / taken:,.0f}")
