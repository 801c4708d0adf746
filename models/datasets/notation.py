"""The notation `name(value, key=value)` in which experiment files give a data set or a partition its options.

Only literals are read (`ast.literal_eval`), nothing is ever evaluated.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from edge_client.data.connector import DataProblem as DataError


@dataclass(frozen=True)
class Call:
    """`name`, `name(1, 2)` or `name(key=1)` with the values as Python literals."""

    name: str
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


def parse(text: str) -> Call:
    """The name and the values of `text`.

    Raises:
        DataError: not of that form.
    """
    stripped = text.strip()
    if "(" not in stripped:
        return Call(stripped)
    try:
        tree = ast.parse(stripped, mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
            raise ValueError
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords if keyword.arg}
        if len(named) != len(tree.keywords):
            raise ValueError
        return Call(tree.func.id, tuple(ast.literal_eval(value) for value in tree.args), named)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise DataError(
            f"{text!r} is not of the form name(value) or name(key=value) with plain numbers and lists"
        ) from None
