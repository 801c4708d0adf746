"""Validation of configuration files: all problems are reported at once, in our own messages instead of pydantic's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

from pydantic import BaseModel, ValidationError

from coordinator.errors import UserError
from coordinator.json_values import is_finite
from models import catalog, user_code

Root = TypeVar("Root", bound=BaseModel)


def validate(
    root: type[Root],
    document: Mapping[str, Any],
    find_contradictions: Callable[[Root], Iterable[str]],
    affected_keys: Mapping[str, tuple[str, ...]],
) -> tuple[Root | None, list[str]]:
    """The document as `root`, None if a key is invalid, and all problems: of single keys, and contradictions.

    If keys are invalid, contradictions between the other keys are still reported. Those that mention an invalid key, or
    one of its `affected_keys`, are left out, because they would be about a default.
    """
    try:
        valid = root.model_validate(document)
    except ValidationError as error:
        items = error.errors()
    else:
        return valid, list(find_contradictions(valid))
    problems = [format_error(item, root) for item in items]
    wrong_keys = {".".join(map(str, item["loc"][:2])) for item in items}
    try:
        rest = root.model_validate(_without(document, wrong_keys))
    except ValidationError:
        return None, problems
    excluded = {key for wrong_key in wrong_keys for key in (wrong_key, _intended_key(wrong_key, root))}
    excluded |= {other for key in excluded for other in affected_keys.get(key, ())}
    about = re.compile("|".join(rf"\b{re.escape(key)}\b" for key in excluded))
    return None, [*problems, *(problem for problem in find_contradictions(rest) if not about.search(problem))]


def read_table(kind: type[Root], table: object, problems: list[str], prefix: str = "") -> Root | None:
    """The table as `kind`. If it is invalid None; `problems` gets its problems, whose keys begin with `prefix`."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        problems += [prefix + format_error(item, kind) for item in error.errors()]
        return None


def _without(document: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The document without these keys, each the name of a table or `table.key`."""
    left = {table: dict(each) if isinstance(each, Mapping) else each for table, each in document.items()}
    for key in keys:
        table, _, inner = key.partition(".")
        if inner and isinstance(left.get(table), dict):
            left[table].pop(inner, None)
        else:
            left.pop(table, None)
    return left


def _intended_key(key: str, root: type[BaseModel]) -> str:
    *tables, last = key.split(".", 1)  # the rest may hold dots too
    field = root.model_fields.get(tables[0]) if tables else None
    if tables and (field is None or not _is_table(field.annotation)):
        return key
    close = difflib.get_close_matches(last, _known_keys(tables, root), n=1, cutoff=0.5)
    return ".".join([*tables, *close]) if close else key


def format_error(item: Any, root: type[BaseModel]) -> str:
    """Message of one pydantic error: the key, the value, what was expected. `root`: model of the whole file."""
    where = [str(part) for part in item["loc"] if part != "[key]"]
    key = ".".join(where)
    if item["type"] == "extra_forbidden":
        known = _known_keys(where[:-1], root)
        return f"{key} is not a known key{suggest(where[-1], known)}; known here: {', '.join(known)}"
    if item["type"] in ("model_type", "dict_type"):
        return f"{key} = {item['input']!r}: expected a table, [{key}] with keys of its own"
    message = item["msg"]
    if item["type"] == "literal_error" and item["loc"][-1] == "[key]":
        quoted = message.split("'")[1::2]
        return f"{key} is not allowed{suggest(where[-1], quoted)}; {message[0].lower()}{message[1:]}"
    return f"{key} = {item['input']!r}: {message[0].lower()}{message[1:]}"


def _known_keys(tables: list[str], root: type[BaseModel]) -> list[str]:
    section = root
    for table in tables:
        annotation = section.model_fields[table].annotation
        assert _is_table(annotation)
        section = annotation
    return list(section.model_fields)


def _is_table(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def suggest(word: str, known: Iterable[str]) -> str:
    """`, did you mean …?` if a known word is similar, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def find_model_problems(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the `[model]` table: an unknown model, unknown or invalid options.

    A user's own model, and one from the entry-point group, is checked in a worker, which may import its framework.
    """
    entry = catalog.MODELS.get(name)
    if entry is None:
        for key, value in options.items():
            if not is_finite(value):
                yield f"model.{key} = {value!r}: expected finite numbers"
        is_own = user_code.is_reference(name) or name.endswith(user_code.KERAS_FILE)
        if not is_own and name not in _installed_models():
            yield (
                f"model.name = {name!r} is unknown{suggest(name, catalog.MODELS)}; known: "
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
                yield f"model.{key} is not an option of {name}{suggest(key, known)}; its options: {', '.join(known) or 'none'}"
            else:
                yield f"model.{key} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _installed_models() -> set[str]:
    from importlib.metadata import entry_points

    return {entry.name for entry in entry_points(group="fedloop.models")}


def to_user_error(source: str, problems: list[str]) -> UserError:
    """All problems of one file as one error."""
    if len(problems) == 1:
        return UserError(f"{source}: {problems[0]}")
    return UserError(
        f"{source}: {len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems)
    )
