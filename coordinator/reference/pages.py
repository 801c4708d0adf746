"""Reference pages generated from the code, for the site and for `fedloop docs`.

The keys of files come from the classes that check them, so that no page can differ from the checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.cli import get_docs_for_click

from coordinator.reference import device_keys
from strategies.options import Option

FOLDER = "reference"
"""Of the pages, beside the guides."""


def pages(programs: Mapping[str, click.Command]) -> Mapping[str, Callable[[], str]]:
    """The pages by name; each is made when it is called for. `programs`: those that get a page, by name."""
    from coordinator.datacenter.pretrain_config import Pretraining
    from coordinator.experiments.schema import Experiment

    return {
        **{name: partial(commands, name, command) for name, command in programs.items()},
        "experiment-keys": partial(keys, "Keys of an experiment", "experiment.md", Experiment),
        "model-options": _model_options,
        "strategy-options": _strategy_options,
        "pretraining-keys": partial(keys, "Keys of a pretraining", "pretraining.md", Pretraining),
        "device-keys": device_keys.page,
    }


def write(folder: Path, programs: Mapping[str, click.Command]) -> None:
    """Writes the pages into `folder`, each only where its text has changed."""
    folder.mkdir(exist_ok=True)
    for name, make in pages(programs).items():
        path, text = folder / f"{name}.md", make()
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def commands(name: str, command: click.Command) -> str:
    """A page of all commands of `command`: what each does, its arguments, options and defaults."""
    context = typer.Context(command, info_name=name)
    text = get_docs_for_click(obj=command, ctx=context, name=name, title=f"`{name}`")
    return re.sub(r"\[/?(?:bold|dim|cyan|red|green|yellow|italic)\]", "", text)


def _model_options() -> str:
    from models.catalog import MODELS

    lines = [
        "# Options of models",
        "",
        "Keys of `[model]` beside `name`, `init`, `adapt` and `register`, by the model's name. [Your own model](../own-model.md)",
        "takes whichever options its function has.",
        "",
    ]
    for entry in MODELS.values():
        lines += [f"## `{entry.name}`", ""]
        lines += [f"Inputs: {entry.inputs}. Trained by {', '.join(entry.runtimes)}.", ""]
        if entry.options.model_fields:
            lines += ["| key | values | default |", "|---|---|---|"]
            lines += [
                f"| `{key}` | {_values(field)} | {_default(field)} |"
                for key, field in entry.options.model_fields.items()
            ]
            lines.append("")
    return "\n".join(lines)


def _strategy_options() -> str:
    from strategies.codes import known
    from strategies.presets import ALGORITHMS, OPTIONS

    lines = [
        "# Options of strategies",
        "",
        "Keys of `[strategy]` beside `name`, by the strategy's name. [A strategy of your own](../own-strategy.md) has the",
        "options of its base and of its class.",
        "",
    ]
    for name, options in OPTIONS.items():
        lines += [f"## `{name}`", "", _story(ALGORITHMS[name]), ""]
        lines += [*_option_table(options), ""]
    lines += [
        "## Codes for updates",
        "",
        "Keys of `[uplink]`, by its `code` ([guide](../update-compression.md)).",
        "",
    ]
    for name, options in known.OPTIONS.items():
        lines += [f"### `{name}`", "", _story(known.CODES[name]), ""]
        lines += _option_table(options) if options else ["It has no options."]
        lines.append("")
    return "\n".join(lines)


def _option_table(options: Mapping[str, Option]) -> list[str]:
    return [
        "| key | values | default | meaning |",
        "|---|---|---|---|",
        *(
            f"| `{key}` | {option.describe_range()} | `{option.plain_default}` | {option.meaning} |"
            for key, option in options.items()
        ),
    ]


def _story(algorithm: type) -> str:
    """The docstring of the module that an algorithm is defined in: its name and its paper."""
    from sys import modules

    return " ".join((modules[algorithm.__module__].__doc__ or "").split())


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    return powers.get(int(value), f"{value:,}" if isinstance(value, int) else f"{value:g}")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value in (None, PydanticUndefined, ""):
        return ""
    return f"`{_plain(value)}`"
