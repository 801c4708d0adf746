"""`fedloop serving profile|tune|bench`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from coordinator import option_parsers
from coordinator.commands.options import Json
from coordinator.commands.output import format_bytes, make_table, plain_console, print_json, print_output
from coordinator.commands.serving.calls import Home, home_of
from coordinator.errors import UserError
from coordinator.operator.client import Coordinator, connect
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
AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code",
        help="A model of your own code that may be built here, package.module:build; may be repeated.",
        metavar="REF",
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Adds the commands that measure."""
    app.command(epilog="Example: fedloop serving profile digits@champion --threads 1,2 --slo-ms 50")(profile)


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
    stored = _find(folder, model, allow_code, coordinator)
    section = _section(model=model, slo_ms=slo_ms, max_batch=max_batch, device=device, dtype=dtype)
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


def _find(folder: Path, model: str, allow_code: list[str] | None, coordinator: str | None) -> StoredVersion:
    from coordinator.serving.versions import Versions

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--home {folder}: cannot be used: {error.strerror}") from None
    return Versions(folder, lambda: connect(coordinator), tuple(allow_code or ())).find(model)


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
