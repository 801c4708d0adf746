"""`fedloop strategies`: every algorithm with its meaning, its paper and its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from coordinator.commands.options import Json
from coordinator.commands.output import make_table, print_json, print_output
from coordinator.errors import UserError
from strategies.suggestions import suggest

if TYPE_CHECKING:
    from strategies.catalogue import Description


def strategies(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show one strategy with its options.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the strategies: what each does, its paper, and the options of one of them."""
    from strategies import catalogue, presets

    if name is None:
        described = catalogue.describe_all()
        if as_json:
            print_json([each.to_json() for each in described])
            return
        table = make_table("strategy", "what it does", "source", "rounds", "malicious")
        for each in described:
            table.add_row(
                each.name, each.meaning, each.cited, " or ".join(each.modes), each.malicious or "none"
            )
        print_output(table)
        return
    if name not in presets.ALGORITHMS:
        known = ", ".join(presets.ALGORITHMS)
        raise UserError(f"strategy {name!r} is unknown{suggest(name, presets.ALGORITHMS)}; known: {known}")
    one = catalogue.describe(name)
    if as_json:
        print_json(one.to_json())
    else:
        print_output(_show(one))


def _show(one: Description) -> Group:
    title, address = one.paper
    facts = [
        one.meaning,
        f"{one.cited}, {one.place}: {title}. {address}",
        f"rounds: {' or '.join(one.modes)}; runtimes: {', '.join(one.runtimes)}",
    ]
    if one.malicious:
        facts.append(f"bears {one.malicious} malicious updates of a round")
    table = make_table("option", "default", "expected", "meaning")
    for key, option in one.options.items():
        table.add_row(f"strategy.{key}", option.plain_default, option.describe_range(), option.meaning)
    return Group(*(Text(fact) for fact in facts), Text(), table)
