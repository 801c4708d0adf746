"""Tables of a configuration file, and what is said of those that are wrong: all of it at once, in our own words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from coordinator.errors import UserError


def described(item: Any, root: type[BaseModel]) -> str:
    """One pydantic error in our words: the key, the value, what was expected. `root`: of the whole file."""
    where = [str(part) for part in item["loc"] if part != "[key]"]
    key = ".".join(where)
    if item["type"] == "extra_forbidden":
        known = _known_keys(where[:-1], root)
        return f"{key} is not a known key{nearest(where[-1], known)}; known here: {', '.join(known)}"
    if item["type"] in ("model_type", "dict_type"):
        return f"{key} = {item['input']!r}: expected a table, [{key}] with keys of its own"
    message = item["msg"]
    if item["type"] == "literal_error" and item["loc"][-1] == "[key]":
        return (
            f"{key} is not allowed{nearest(where[-1], _quoted(message))}; {message[0].lower()}{message[1:]}"
        )
    return f"{key} = {item['input']!r}: {message[0].lower()}{message[1:]}"


def _quoted(message: str) -> list[str]:
    return [part for index, part in enumerate(message.split("'")) if index % 2]


def _known_keys(tables: list[str], root: type[BaseModel]) -> list[str]:
    section = root
    for table in tables:
        annotation = section.model_fields[table].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        section = annotation
    return list(section.model_fields)


def nearest(word: str, known: Iterable[str]) -> str:
    """The words `did you mean …?` where something is near, after a comma."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def wrong(source: str, problems: list[str]) -> UserError:
    """All problems of one file as one error."""
    if len(problems) == 1:
        return UserError(f"{source}: {problems[0]}")
    return UserError(
        f"{source}: {len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems)
    )
