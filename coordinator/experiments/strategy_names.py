"""The names of strategies: which are ours, which are installed, and which are a user's own code. Loads no code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from coordinator.json_values import is_finite
from models import user_code
from strategies import presets

GROUP = "fedloop.strategies"
"""The entry points of packages that offer a strategy by a short name."""


def is_own(name: str) -> bool:
    """Whether a strategy of this name is not ours: a reference to user code, or an entry point."""
    return name not in presets.OPTIONS and (user_code.is_reference(name) or name in _installed())


def find_problems(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the `[strategy]` table. A strategy that is not ours is checked in a worker, which loads it."""
    if is_own(name):
        for key, value in options.items():
            if not is_finite(value):
                yield f"strategy.{key} = {value!r}: expected finite numbers"
        return
    try:
        presets.resolve_options(name, options)
    except presets.OptionError as error:
        own = (
            ""
            if error.option
            else "; your own is given as package.module:Class, or by the name that its package installs"
        )
        yield f"strategy.{error.option or 'name'}: {error}{own}"


def _installed() -> set[str]:
    return {entry.name for entry in entry_points(group=GROUP)}
