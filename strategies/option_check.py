"""Checks options that were given by name, of an algorithm or of a code, and adds the defaults of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.options import Option
from strategies.suggestions import suggest


class OptionError(ValueError):
    """The name of what has options, or one of them, is wrong. `option` is its key, or None when the name itself is unknown."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


def resolve(
    kind: str, known: Mapping[str, Mapping[str, Option]], name: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """All options of `name`: the given ones, checked, and defaults for the rest. `known`: options by name; `kind`: of the names.

    Raises:
        OptionError: unknown name or option, suggesting the nearest known one, or a value out of range.
    """
    if name not in known:
        raise OptionError(f"{kind} {name!r:.60} is unknown{suggest(name, known)}; known: {', '.join(known)}")
    options = known[name]
    for key, value in given.items():
        if key not in options:
            others = ", ".join(options) or "none"
            raise OptionError(
                f"{name} has no option {key!r:.60}{suggest(key, options)}; known: {others}", key
            )
        if not options[key].accepts(value):
            expected = options[key].describe_range()
            raise OptionError(f"{key} = {value!r:.200} is not allowed for {name}: expected {expected}", key)
    return {
        key: option.convert(given[key]) if key in given else option.default for key, option in options.items()
    }
