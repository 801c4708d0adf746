"""`fedloop model`: the model registry from the command line.

A version is written `name:number` or `name@alias`; a name alone means its newest version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from coordinator.commands.options import Shown, command_group, remote_command
from coordinator.commands.output import make_table
from coordinator.errors import UserError
from coordinator.operator.client import OperatorClient, run_id
from edge_client.wire.strict import printable

app = command_group("Models: versions that were trained, compressed and released, and their lineage.")

VersionReference = Annotated[
    str, typer.Argument(metavar="VERSION", help="name:number, name@alias, or a name: its newest version.")
]
Name = Annotated[str, typer.Option("--name", help="Name of the model in the registry.")]
Parents = Annotated[
    list[str] | None,
    typer.Option(
        "--parent",
        metavar="VERSION",
        help="A version that it was made from, if its own documents do not name it; may be repeated.",
    ),
]

_PAGE = 1000


@remote_command(app, example="fedloop model add runs/digits --name digits")
def add(
    client: OperatorClient,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder that pretrain, simulate, run, compress or export wrote."),
    ],
    name: Name,
    parent: Parents = None,
    renumber: Annotated[
        bool,
        typer.Option(
            "--renumber",
            help="For a release: write the name and the next number into its manifest. Then export it from here.",
        ),
    ] = False,
) -> Shown:
    """Register a folder as the next version of a model. Its files must match its own documents."""
    from coordinator.operator import version_files
    from coordinator.registry.kinds import examine

    kind, contents = version_files.gather(folder)
    if renumber and kind != "inference":
        raise UserError(f"--renumber: {folder} is not a release folder, so it has no version number")
    with _errors_prefixed(folder):
        examine(kind, contents)
    return _register(client, kind, contents, name, parent or [], renumber)


@remote_command(app, "import", example="fedloop model import distilbert/ --name teacher")
def import_(
    client: OperatorClient,
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
        typer.Option("--model", help="For an ONNX file: the model of the catalog whose params it holds."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Option of that model; may be repeated."),
    ] = None,
    parent: Parents = None,
) -> Shown:
    """Register a model from elsewhere, unchanged. Pickle files (.bin, .pt) are refused unopened.

    An ONNX file is checked first. With --model its weights are kept as params too, so that training can continue.
    """
    from coordinator.operator import onnx_models, version_files
    from coordinator.registry.kinds import examine
    from coordinator.storage.private_folders import private_folder

    is_onnx = path.suffix == ".onnx"
    if not is_onnx and (model is not None or option):
        raise UserError(f"--model and --option apply to ONNX files only, and {path} is none")
    with private_folder() as scratch:
        if is_onnx:
            kind, contents = onnx_models.gather(path, model, option or [], scratch)
        else:
            kind, contents = version_files.gather_foreign(path)
            if path.is_dir() and (pickles := version_files.pickles(path)):
                typer.echo(f"left out, files of Python pickles: {', '.join(pickles)}", err=True)
        with _errors_prefixed(path):
            examine(kind, contents)
        return _register(client, kind, contents, name, parent or [], False)


@remote_command(app, "add-run", example="fedloop model add-run 5f0c9a52-… --name digits")
def add_run(
    client: OperatorClient,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A finished run of `fedloop run`: its id, the beginning of it, or its name."
        ),
    ],
    name: Name,
) -> Shown:
    """Register the result of a finished run on devices as the next version of a model."""
    version = client.post(f"/models/{quote(name, safe='')}/versions", {"run": run_id(client, run)})
    return _registered(version)


@remote_command(app, "list", example="fedloop model list digits")
def list_(
    client: OperatorClient,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Versions of this model; without it, all models.")
    ] = None,
) -> Shown:
    """List models, or the versions of one."""
    from coordinator.operator import version_drawing

    if name is None:
        items = list(client.pages("/models", "models"))
        table = make_table("model", "versions", "aliases", "since")
        for model in items:
            aliases = ", ".join(f"{alias} = {number}" for alias, number in model["aliases"].items())
            table.add_row(model["name"], str(model["latest"]), aliases, model["created_at"][:16])
    else:
        items = list(client.pages(f"/models/{quote(name, safe='')}/versions", "versions", "before"))
        table = make_table("version", "stage", "kind", "aliases", "figures", "since")
        for version in items:
            figures = printable(version_drawing.figures(version["stage"], version["metrics"]))
            known_as, since = ", ".join(version["aliases"]), version["created_at"][:16]
            table.add_row(version["version"], version["stage"], version["kind"], known_as, figures, since)
    return items, table if items else ["no models; register one: fedloop model add DIR --name NAME"]


@remote_command(app, example="fedloop model show digits@champion")
def show(client: OperatorClient, version: VersionReference) -> Shown:
    """Show a version: its origin, metrics and files."""
    shown = _version(client, version)
    return shown, _lines(shown)


def _lines(version: Mapping[str, Any]) -> Iterator[str]:
    aliases = "".join(f" @{alias}" for alias in version["aliases"])
    since = version["created_at"][:16]
    yield f"{version['version']}{aliases}  {version['stage']}, {version['kind']}, {since}"
    for key, value in version["about"].items():
        if value not in (None, {}, []):
            yield f"  {printable(key)}: {printable(json.dumps(value), 200)}"
    for each in version["inputs"]:
        yield f"  made from {each['relation']} {each['ref']}"
    for stage, figures in version["metrics"].items():
        values = ", ".join(f"{key} {value:.6g}" for key, value in figures.items())
        yield f"  {printable(stage)}: {printable(values)}"
    for file in version["files"]:
        yield f"  {file['sha256']}  {file['size_bytes']:>12,}  {file['path']}"


@remote_command(app, example="fedloop model alias digits:3 champion")
def alias(
    client: OperatorClient,
    version: VersionReference,
    name: Annotated[str, typer.Argument(metavar="ALIAS", help="champion, candidate, or a name of your own.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
    expect: Annotated[
        int | None,
        typer.Option("--expect", min=0, help="Only if it points to this number now; 0: to no version."),
    ] = None,
) -> Shown:
    """Point an alias at a version, atomically; its history keeps the earlier versions."""
    target = _version(client, version)
    path = f"/models/{target['model']}/aliases/{quote(name, safe='')}"
    if remove:
        moved = client.delete(path)
    else:
        moved = client.put(path, {"version": target["number"], "expected": expect})
    before = f", before {target['model']}:{moved['before']}" if moved["before"] else ""
    now = f"means {target['version']}" if moved["number"] else "is removed"
    return moved, [f"{target['model']}@{name} {now}{before}"]


@remote_command(app, example="fedloop model aliases digits")
def aliases(
    client: OperatorClient,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")],
) -> Shown:
    """Show the history of a model's aliases, the latest change first."""
    moves = client.get(f"/models/{quote(name, safe='')}/moves", limit=_PAGE)
    lines = []
    for move in moves:
        before, number = (f"{name}:{move[key]}" if move[key] else "nothing" for key in ("before", "number"))
        lines.append(f"{move['moved_at'][:19]}  {move['alias']}: {before} -> {number}")
    return moves, lines


@remote_command(app, example="fedloop model lineage digits:4 --dot | dot -Tsvg > lineage.svg")
def lineage(
    client: OperatorClient,
    version: VersionReference,
    as_dot: Annotated[bool, typer.Option("--dot", help="Print the graph for Graphviz.")] = False,
) -> Shown:
    """Show the lineage of a version in both directions: data, trainings, compressions, releases, runs."""
    from coordinator.operator import version_drawing

    graph = client.get(f"/versions/{quote(version, safe='')}/lineage")
    return graph, version_drawing.dot(graph).splitlines() if as_dot else version_drawing.tree(graph)


@remote_command(app, example="fedloop model export digits:3 --out runs/digits-3")
def export(
    client: OperatorClient,
    version: VersionReference,
    out: Annotated[Path, typer.Option("--out", help="Folder for the files; new or empty.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="files: unchanged; onnx: model.onnx made from its float params; hugging-face: a folder that transformers loads, "
            "of a gpt or bert.",
        ),
    ] = "files",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", help="With hugging-face: folder of the tokenizer's files, to be copied too."
        ),
    ] = None,
) -> Shown:
    """Fetch the files of a version, checked by their hashes; or its model in another format.

    An ONNX file is verified against PyTorch.
    """
    if form not in ("files", "onnx", "hugging-face"):
        raise UserError(f"--format {form}: expected files, onnx or hugging-face")
    if tokenizer is not None and form != "hugging-face":
        raise UserError(f"--tokenizer {tokenizer}: is for --format hugging-face, and the format is {form}")
    exported = _version(client, version)
    if form == "hugging-face":
        return _export_hugging_face(client, exported, out, tokenizer)
    return (_export_onnx if form == "onnx" else _export_files)(client, exported, out)


def _export_files(client: OperatorClient, version: dict[str, Any], out: Path) -> Shown:
    from coordinator.operator import version_export

    with _progress_bar("fetching", sum(file["size_bytes"] for file in version["files"])) as advance:
        version_export.export(client, version, out, advance)
    return {"out": str(out), **version}, [f"{version['version']} is in {out}/"]


def _export_onnx(client: OperatorClient, version: dict[str, Any], out: Path) -> Shown:
    from coordinator.operator import onnx_models

    sources = onnx_models.source_files(version)
    with _progress_bar("fetching", sum(file["size_bytes"] for file in sources)) as advance:
        about = onnx_models.export(client, version, out, advance)
    return {"out": str(out), **about}, [
        f"{version['version']} is in {out}/model.onnx, opset {about['opset']['ai.onnx']}, {about['bytes']:,} bytes; "
        f"logits differ from PyTorch's by {about['verified']['largest_difference']:.2g} at most"
    ]


def _export_hugging_face(
    client: OperatorClient, version: dict[str, Any], out: Path, tokenizer: Path | None
) -> Shown:
    from coordinator.operator import hugging_face_folders

    sources = hugging_face_folders.source_files(version)
    with _progress_bar("fetching", sum(file["size_bytes"] for file in sources)) as advance:
        written = hugging_face_folders.export(client, version, out, tokenizer, advance)
    return {"out": str(out), **written}, [
        f"{version['version']} is in {out}/ as {written['config']['architectures'][0]} of {written['parameters']:,} parameters"
    ]


@remote_command(app, example="fedloop model diff digits@champion digits@candidate")
def diff(client: OperatorClient, before: VersionReference, after: VersionReference) -> Shown:
    """Show the differences between two versions: model, metrics, files."""
    from coordinator.operator import version_drawing

    first, second = _version(client, before), _version(client, after)
    differences = version_drawing.compare(first, second)
    table = make_table("", first["version"], second["version"])
    for row in differences:
        values = ("-" if row[key] is None else printable(str(row[key])) for key in ("before", "after"))
        table.add_row(printable(row["what"]), *values)
    none = [f"{first['version']} and {second['version']} have the same model, metrics and files"]
    document = {"before": first["version"], "after": second["version"], "differences": differences}
    return document, table if differences else none


def _register(
    client: OperatorClient, kind: Any, contents: Any, name: str, parents: list[str], renumber: bool
) -> Shown:
    from coordinator import model_references
    from coordinator.operator import version_files

    model_references.check_model_name(name)
    with _progress_bar("sending", sum(content.size_bytes for content in contents.values())) as advance:
        version = version_files.add(
            client, name, kind, contents, parents, renumber=renumber, on_bytes=advance
        )
    return _registered(version)


def _registered(version: Mapping[str, Any]) -> Shown:
    from coordinator.operator import version_drawing

    figures = version_drawing.figures(version["stage"], version["metrics"])
    return version, [f"{version['version']}  {version['stage']}{f', {figures}' if figures else ''}"]


@contextmanager
def _errors_prefixed(path: Path) -> Iterator[None]:
    """Puts the path before the message of a `UserError`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}", error.code) from None


@contextmanager
def _progress_bar(description: str, total_bytes: int) -> Iterator[Any]:
    """A progress bar on a terminal; yields the function that adds bytes to it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda count: progress.advance(task, count)


def _version(client: OperatorClient, which: str) -> dict[str, Any]:
    version: dict[str, Any] = client.get(f"/versions/{quote(which, safe='')}")
    return version
