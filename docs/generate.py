"""Reference pages made from the code: every command with its options, every key of an experiment and of a pretraining."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.cli import get_docs_for_click


def generate(folder: Path) -> None:
    """Writes the generated pages into `folder`, each only where its text has changed."""
    from coordinator.commands import cli
    from coordinator.datacenter.pretrain_config import Pretraining
    from coordinator.experiments.schema import Experiment
    from edge_client.commands import cli as edge_cli

    pages = {
        "fedloop": commands("fedloop", cli.app),
        "fedloop-edge": commands("fedloop-edge", edge_cli.app),
        "experiment-keys": keys("Keys of an experiment", "experiment.md", Experiment),
        "pretraining-keys": keys("Keys of a pretraining", "pretraining.md", Pretraining),
    }
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def commands(name: str, app: typer.Typer) -> str:
    """A page of all commands of `app`: what each does, its arguments, options and defaults."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name=name)
    text = get_docs_for_click(obj=command, ctx=context, name=name, title=f"`{name}`")
    return re.sub(r"\[/?(?:bold|dim|cyan|red|green|yellow|italic)\]", "", text)


def keys(title: str, guide: str, model: type[BaseModel]) -> str:
    """A page with a table of keys for each section of `model`, nested ones too."""
    lines = [
        f"# {title}",
        "",
        f"[The guide](../{guide}) explains them; this page is generated from their checks.",
        "",
    ]
    for name, section in _sections("", model):
        fields = [each for each in section.model_fields.items() if _nested(each[1]) is None]
        explained = any(field.description for _, field in fields)
        lines += [f"## `[{name}]`" if name else "## Top level", ""]
        lines += [
            "| key | values | default |" + " meaning |" * explained,
            "|---|---|---|" + "---|" * explained,
        ]
        lines += [
            f"| `{field.alias or key}` | {_values(field)} | {_default(field)} |"
            + f" {field.description or ''} |" * explained
            for key, field in fields
        ]
        lines.append("")
    return "\n".join(lines)


def _sections(name: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield name, model
    for key, field in model.model_fields.items():
        nested = _nested(field)
        if nested is not None:
            yield from _sections(f"{name}.{key}" if name else key, nested)


def _nested(field: FieldInfo) -> type[BaseModel] | None:
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _values(field: FieldInfo) -> str:
    return ", ".join([_kind(field.annotation), *_bounds(field.metadata)])


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_kind(each) for each in arguments if each is not NoneType)
    if origin is Annotated:
        return ", ".join([_kind(annotation.__origin__), *_bounds(annotation.__metadata__)])
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"table of {_kind(arguments[1])}"
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    names = {str: "text", int: "integer", float: "number", bool: "`true` or `false`", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


_SIGNS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))


def _bounds(metadata: Iterable[Any]) -> list[str]:
    found = []
    for limit in metadata:
        if isinstance(limit, FieldInfo):
            found += _bounds(limit.metadata)
        found += [
            f"{sign} {_number(getattr(limit, name))}"
            for name, sign in _SIGNS
            if getattr(limit, name, None) is not None
        ]
    return found


def _number(value: float) -> str:
    powers = {2**53: "2⁵³", 2**63: "2⁶³"}
    return powers.get(value, f"{value:,}" if isinstance(value, int) else f"{value:g}")  # type: ignore[call-overload]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value in (None, PydanticUndefined, ""):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
