"""`fedloop strategies`: every algorithm, and every code for updates, with its meaning, its paper and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from coordinator.commands.options import Json
from coordinator.commands.output import make_table, print_json, print_output
from coordinator.errors import UserError
from strategies.suggestions import suggest

if TYPE_CHECKING:
    from strategies.catalogue import CodeDescription, Description
    from strategies.options import Option


def strategies(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show one strategy or code with its options.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the strategies, and the codes for updates: what each does, its paper, and the options of one of them."""
    from strategies import catalogue, presets
    from strategies.codes import known

    if name is None:
        algorithms, codes = catalogue.describe_all(), catalogue.describe_codes()
        if as_json:
            print_json([*(each.to_json() for each in algorithms), *(each.to_json() for each in codes)])
        else:
            print_output(_list(algorithms, codes))
        return
    names = [*presets.ALGORITHMS, *known.CODES]
    if name not in names:
        raise UserError(f"strategy {name!r} is unknown{suggest(name, names)}; known: {', '.join(names)}")
    one = catalogue.describe_code(name) if name in known.CODES else catalogue.describe(name)
    if as_json:
        print_json(one.to_json())
    else:
        print_output(_show(one))


def _list(algorithms: Sequence[Description], codes: Sequence[CodeDescription]) -> Group:
    table = make_table("strategy", "what it does", "source", "rounds", "malicious")
    for each in algorithms:
        table.add_row(each.name, each.meaning, each.cited, " or ".join(each.modes), each.malicious or "none")
    written = make_table("code", "what is sent", "source", "rounds", "keeps the rest")
    for code in codes:
        modes, keeps = " or ".join(code.modes), "yes" if code.error_feedback else "no"
        written.add_row(code.name, code.meaning, code.cited, modes, keeps)
    return Group(table, Text(), written)


def _show(one: Description | CodeDescription) -> Group:
    from strategies.catalogue import CodeDescription

    title, address = one.paper
    facts = [
        one.meaning,
        f"{one.cited}, {one.place}: {title}. {address}",
        f"rounds: {' or '.join(one.modes)}; runtimes: {', '.join(one.runtimes)}",
    ]
    if isinstance(one, CodeDescription):
        table_name = "uplink"
    else:
        table_name = "strategy"
        facts += _facts(one)
    return Group(*(Text(fact) for fact in facts), Text(), _option_table(table_name, one.options))


def _facts(one: Description) -> list[str]:
    """Where a strategy works, what it needs, and what it bears."""
    facts = []
    if one.limits:
        facts.append(f"for {one.limits} only")
    if one.needs_server_data:
        facts.append("needs rows of the server's own: data.public_samples, or the table [server_data]")
    if one.malicious:
        number = one.malicious if one.malicious.startswith("f of") else f"{one.malicious} of"
        facts.append(f"bears {number} malicious updates of a round")
    return facts


def _option_table(section: str, options: Mapping[str, Option]) -> Group | Text:
    if not options:
        return Text("no options")
    table = make_table("option", "default", "expected", "meaning")
    for key, option in options.items():
        table.add_row(f"{section}.{key}", option.plain_default, option.describe_range(), option.meaning)
    return Group(table)
