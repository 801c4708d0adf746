"""Checks of configuration files: all problems are reported at once, in our own messages instead of pydantic's.

Every problem is a sentence that begins with the key that it is about, so that a form can show it there (`key_of`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coordinator.errors import UserError
from strategies.suggestions import closest, suggest

Root = TypeVar("Root", bound=BaseModel)


class Section(BaseModel):
    """A table of a document that people write; unknown keys are errors, values are never coerced from strings."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
    )

    def to_toml(self) -> str:
        """The table, or the whole document, in TOML; keys without a value are left out."""
        import tomlkit

        return tomlkit.dumps(self.model_dump(mode="json", exclude_none=True))


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
    if halves := find_halves(document):
        return None, halves
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


def find_halves(document: Mapping[str, Any]) -> list[str]:
    """Problems of texts with half of a character: JSON can hold one, but neither a database nor an answer in UTF-8 can."""
    found = []
    waiting: list[tuple[str, Any]] = [(str(key), each) for key, each in document.items()]
    while waiting:  # not recursive: a document may be as deep as the parser allows
        key, value = waiting.pop()
        name = key.encode("utf-8", "backslashreplace").decode()
        if name != key or (isinstance(value, str) and any("\ud800" <= each <= "\udfff" for each in value)):
            found.append(f"{name} has half of a character, a surrogate without its other one; expected text")
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{inner}", each) for inner, each in value.items()]
        elif isinstance(value, list):
            waiting += [(name, each) for each in value]
    return found


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
    return ".".join([*tables, closest(last, _known_keys(tables, root)) or last])


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
    return [field.alias or name for name, field in section.model_fields.items()]


def _is_table(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def key_of(problem: str) -> str:
    """The dotted key that a problem begins with."""
    found = re.match(r"[\w-]+(?:\.[\w-]+)*", problem)
    return found.group() if found else ""


def to_user_error(source: str, problems: list[str]) -> UserError:
    """All problems of one file as one error."""
    if len(problems) == 1:
        return UserError(f"{source}: {problems[0]}")
    return UserError(
        f"{source}: {len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems)
    )
