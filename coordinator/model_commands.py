"""`fedloop model`: the registry from the command line.

A version is written `name:number` or `name@alias`; a name alone means its newest version.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from coordinator.errors import UserError
from coordinator.operator_client import Coordinator, OperatorClient, connect
from edge_client.wire.strict import printable

app = typer.Typer(
    help="Models: versions of what was trained, compressed and released, and what came from what.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Which = Annotated[
    str, typer.Argument(metavar="VERSION", help="name:number, name@alias, or a name: its newest version.")
]
Name = Annotated[str, typer.Option("--name", help="Name of the model in the registry.")]
Parents = Annotated[
    list[str] | None,
    typer.Option(
        "--parent",
        metavar="VERSION",
        help="A version it was made from, where no document in it says so; may be repeated.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on standard output, nothing else there.")
]

_PAGE = 1000
_WIDE = 2000


@app.command(epilog="Example: fedloop model add runs/digits --name digits")
def add(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="What pretrain, simulate, run, compress or export left."),
    ],
    name: Name,
    parent: Parents = None,
    renumber: Annotated[
        bool,
        typer.Option(
            "--renumber",
            help="Of a release: write the name and the next number into its manifest. Then export it from here.",
        ),
    ] = False,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Register a folder as the next version of a model. Its files must be those that its own documents tell of."""
    from coordinator.registry import folders
    from coordinator.registry.kinds import examine

    kind, contents = folders.gather(folder)
    if renumber and kind != "inference":
        raise UserError(f"--renumber: {folder} is no release folder; there is no number in it to write")
    with _named(folder):
        examine(kind, contents)
    _added(kind, contents, name, parent or [], renumber, coordinator, as_json)


@app.command("import", epilog="Example: fedloop model import distilbert/ --name teacher")
def import_(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A .safetensors, .tflite or .onnx file, or a Hugging Face folder of safetensors.",
        ),
    ],
    name: Name,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Of an ONNX file: the model of the catalog whose params its weights are."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Of that model; may be repeated."),
    ] = None,
    parent: Parents = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Register a model from elsewhere, as it is. Files of pickles (.bin, .pt) are refused unopened.

    An ONNX file is checked first. With --model its weights are kept as params too, so that training can go on.
    """
    from coordinator.registry import folders, onnx_models
    from coordinator.registry.kinds import examine

    is_onnx = path.suffix == ".onnx"
    if not is_onnx and (model is not None or option):
        raise UserError(f"--model and --option are of an ONNX file, which {path} is not")
    with tempfile.TemporaryDirectory(prefix="fedloop-") as scratch:
        if is_onnx:
            kind, contents = onnx_models.imported(path, model, option or [], Path(scratch))
        else:
            kind, contents = folders.imported(path)
            if path.is_dir() and (pickles := folders.pickles(path)):
                typer.echo(f"left out, files of Python pickles: {', '.join(pickles)}", err=True)
        with _named(path):
            examine(kind, contents)
        _added(kind, contents, name, parent or [], False, coordinator, as_json)


@app.command("add-run", epilog="Example: fedloop model add-run 5f0c9a52-… --name digits")
def add_run(
    run: Annotated[str, typer.Argument(metavar="RUN-ID", help="Of a finished run of `fedloop run`.")],
    name: Name,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Register what a finished run on devices came to as the next version of a model."""
    version = connect(coordinator).post(f"/models/{quote(name, safe='')}/versions", {"run": run})
    _show_added(version, as_json)


@app.command("list", epilog="Example: fedloop model list digits")
def list_(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Versions of this model; without it, all models.")
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """List models, or the versions of one."""
    client = connect(coordinator)
    if name is None:
        found = list(_pages(client, "/models", "models", "after"))
        table = _table("model", "versions", "aliases", "since")
        for model in found:
            aliases = ", ".join(f"{alias} = {number}" for alias, number in model["aliases"].items())
            table.add_row(model["name"], str(model["latest"]), aliases, model["created_at"][:16])
    else:
        found = list(_pages(client, f"/models/{quote(name, safe='')}/versions", "versions", "before"))
        table = _table("version", "stage", "kind", "aliases", "figures", "since")
        for version in found:
            table.add_row(*_row(version))
    if as_json:
        _print_json(found)
    elif not found:
        typer.echo("no models; register one: fedloop model add DIR --name NAME")
    else:
        _console().print(table)


@app.command(epilog="Example: fedloop model show digits@champion")
def show(version: Which, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show a version: where it comes from, its figures, its files."""
    found = _version(connect(coordinator), version)
    if as_json:
        _print_json(found)
        return
    aliases = "".join(f" @{alias}" for alias in found["aliases"])
    typer.echo(f"{found['version']}{aliases}  {found['stage']}, {found['kind']}, {found['created_at'][:16]}")
    for key, value in found["about"].items():
        if value not in (None, {}, []):
            typer.echo(f"  {printable(key)}: {printable(json.dumps(value), 200)}")
    for each in found["inputs"]:
        typer.echo(f"  made from {each['relation']} {each['ref']}")
    for stage, figures in found["metrics"].items():
        told = ", ".join(f"{key} {value:.6g}" for key, value in figures.items())
        typer.echo(f"  {printable(stage)}: {printable(told)}")
    for file in found["files"]:
        typer.echo(f"  {file['sha256'][:12]}  {file['size_bytes']:>12,}  {file['path']}")


@app.command(epilog="Example: fedloop model alias digits:3 champion")
def alias(
    version: Which,
    name: Annotated[str, typer.Argument(metavar="ALIAS", help="champion, candidate, or a name of your own.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take the alias away from the model.")] = False,
    expect: Annotated[
        int | None,
        typer.Option("--expect", min=0, help="Only where it means this number now; 0: no version."),
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Let an alias mean a version, from one moment to the next; what it meant before stays in its history."""
    client = connect(coordinator)
    found = _version(client, version)
    path = f"/models/{found['model']}/aliases/{quote(name, safe='')}"
    if remove:
        moved = client.delete(path)
    else:
        moved = client.put(path, {"version": found["number"], "expected": expect})
    if as_json:
        _print_json(moved)
        return
    before = f", before {found['model']}:{moved['before']}" if moved["before"] else ""
    now = f"means {found['version']}" if moved["number"] else "means nothing any more"
    typer.echo(f"{found['model']}@{name} {now}{before}")


@app.command(epilog="Example: fedloop model aliases digits")
def aliases(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")],
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Show what the aliases of a model have meant, the latest change first."""
    moves = connect(coordinator).get(f"/models/{quote(name, safe='')}/moves", limit=_PAGE)
    if as_json:
        _print_json(moves)
        return
    for move in moves:
        before, number = (f"{name}:{move[key]}" if move[key] else "nothing" for key in ("before", "number"))
        typer.echo(f"{move['moved_at'][:19]}  {move['alias']}: {before} -> {number}")


@app.command(epilog="Example: fedloop model lineage digits:4 --dot | dot -Tsvg > lineage.svg")
def lineage(
    version: Which,
    as_dot: Annotated[bool, typer.Option("--dot", help="Print the graph for Graphviz.")] = False,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Show what a version came from and what came of it: data, trainings, compressions, releases, runs."""
    from coordinator.registry import drawing

    graph = connect(coordinator).get(f"/versions/{quote(version, safe='')}/lineage")
    if as_json:
        _print_json(graph)
    elif as_dot:
        typer.echo(drawing.dot(graph), nl=False)
    else:
        _console().print(drawing.tree(graph))


@app.command(epilog="Example: fedloop model export digits:3 --out runs/digits-3")
def export(
    version: Which,
    out: Annotated[Path, typer.Option("--out", help="Folder for the files; new or empty.")],
    form: Annotated[
        str,
        typer.Option("--format", help="files: as they are; onnx: model.onnx made of its float params."),
    ] = "files",
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Fetch the files of a version, checked by their hashes; or an ONNX file, which was seen to answer as PyTorch does."""
    from coordinator.registry import onnx_models, transfer

    if form not in ("files", "onnx"):
        raise UserError(f"--format {form}: is unknown; expected files or onnx")
    client = connect(coordinator)
    found = _version(client, version)
    if form == "onnx":
        needed = sum(file["size_bytes"] for file in onnx_models.exported_files(found))
        with _bar("fetching", needed) as advance:
            about = onnx_models.export(client, found, out, advance)
        if as_json:
            _print_json({"out": str(out), **about})
        else:
            difference = about["verified"]["largest_difference"]
            opset = about["opset"]["ai.onnx"]
            typer.echo(
                f"{found['version']} is in {out}/model.onnx, opset {opset}, {about['bytes']:,} bytes; "
                f"logits differ from PyTorch's by {difference:.2g} at most"
            )
        return
    with _bar("fetching", sum(file["size_bytes"] for file in found["files"])) as advance:
        transfer.export(client, found, out, advance)
    if as_json:
        _print_json({"out": str(out), **found})
    else:
        typer.echo(f"{found['version']} is in {out}/")


@app.command(epilog="Example: fedloop model diff digits@champion digits@candidate")
def diff(before: Which, after: Which, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show in what two versions differ: model, figures, files."""
    from coordinator.registry import differences

    client = connect(coordinator)
    first, second = _version(client, before), _version(client, after)
    found = differences.between(first, second)
    if as_json:
        _print_json({"before": first["version"], "after": second["version"], "differences": found})
        return
    table = _table("", first["version"], second["version"])
    for row in found:
        told = ("-" if row[key] is None else printable(str(row[key]), 100) for key in ("before", "after"))
        table.add_row(printable(row["what"], 100), *told)
    if found:
        _console().print(table)
    else:
        typer.echo(f"{first['version']} and {second['version']} have the same model, figures and files")


def _added(
    kind: Any,
    contents: Any,
    name: str,
    parents: list[str],
    renumber: bool,
    coordinator: str | None,
    as_json: bool,
) -> None:
    from coordinator.registry import references, transfer

    references.model_name(name)
    client = connect(coordinator)
    with _bar("sending", sum(content.size_bytes for content in contents.values())) as advance:
        version = transfer.add(client, name, kind, contents, parents, renumber=renumber, sent=advance)
    _show_added(version, as_json)


def _show_added(version: Mapping[str, Any], as_json: bool) -> None:
    from coordinator.registry import drawing

    if as_json:
        _print_json(version)
        return
    figures = drawing.figures(version["stage"], version["metrics"])
    typer.echo(f"{version['version']}  {version['stage']}{f', {figures}' if figures else ''}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with the files in it is told with the folder's name before it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}", error.code) from None


@contextmanager
def _bar(what: str, total_bytes: int) -> Iterator[Any]:
    """Calls count bytes on a bar, where somebody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda count: progress.advance(task, count)


def _version(client: OperatorClient, which: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/versions/{quote(which, safe='')}")
    return found


def _pages(client: OperatorClient, path: str, key: str, follow: str) -> Iterator[dict[str, Any]]:
    following = None
    while True:
        page = client.get(path, limit=_PAGE, **{follow: following})
        yield from page[key]
        following = page["next"]
        if following is None:
            return


def _row(version: Mapping[str, Any]) -> tuple[str, ...]:
    from coordinator.registry import drawing

    return (
        version["version"],
        version["stage"],
        version["kind"],
        ", ".join(version["aliases"]),
        printable(drawing.figures(version["stage"], version["metrics"]), 100),
        version["created_at"][:16],
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _console() -> Console:
    """Standard output; into a pipe nothing is cut."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDE)


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))
