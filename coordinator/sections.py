"""Tables of a configuration file, and what is said of those that are wrong: all of it at once, in our own words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from coordinator.errors import UserError
from coordinator.json_values import is_finite
from models import catalog, user_code


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


def model_problems(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the `[model]` table: no such model, options it does not have or cannot have.

    A user's own model, and one of the entry-point group, is looked at in a worker, which may import its framework.
    """
    entry = catalog.MODELS.get(name)
    if entry is None:
        for key, value in options.items():
            if not is_finite(value):
                yield f"model.{key} = {value!r}: expected finite numbers"
        is_own = user_code.is_reference(name) or name.endswith(user_code.KERAS_FILE)
        if not is_own and name not in _installed_models():
            yield (
                f"model.name = {name!r} is unknown{nearest(name, catalog.MODELS)}; known: "
                f"{', '.join(catalog.MODELS)}; your own is given as package.module:build, or as a .keras file"
            )
        return
    try:
        entry.options.model_validate(options)
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                known = list(entry.options.model_fields)
                yield f"model.{key} is not an option of {name}{nearest(key, known)}; its options: {', '.join(known) or 'none'}"
            else:
                yield f"model.{key} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _installed_models() -> set[str]:
    from importlib.metadata import entry_points

    return {entry.name for entry in entry_points(group="fedloop.models")}


def wrong(source: str, problems: list[str]) -> UserError:
    """All problems of one file as one error."""
    if len(problems) == 1:
        return UserError(f"{source}: {problems[0]}")
    return UserError(
        f"{source}: {len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems)
    )
