"""The syntax of models, versions, aliases and files of a version.

A version is `name:number` or `name@alias`; a name alone means its newest version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from coordinator.errors import UserError
from edge_client.wire.rollouts import is_release

FILES_LIMIT = 1000
"""Most files of one version."""

PARAMS = "model.safetensors"
HF_INDEX = "model.safetensors.index.json"
"""In a Hugging Face folder whose weights are in several files: which file has a tensor."""

_RESERVED_NAME = "rollouts"
"""In a repository of releases the folder of the rollouts."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_PATH = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}/){0,3}[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Reference:
    """A requested version: by number, by alias, or with neither the newest one."""

    model: str
    number: int | None = None
    alias: str | None = None


@dataclass(frozen=True)
class RegisterAs:
    """Where to register a new version: as the next number of `model`, with `alias` moved to it if there is one."""

    model: str
    alias: str | None = None

    def __str__(self) -> str:
        return self.model + (f"@{self.alias}" if self.alias else "")


def parse_reference(text: str) -> Reference:
    """Parses `name:number`, `name@alias` or `name`.

    Raises:
        UserError: `bad_reference`.
    """
    model, mark, which = re.fullmatch(r"([^:@]*)([:@]?)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if _NAME.fullmatch(model):
        if not mark:
            return Reference(model)
        if mark == ":" and re.fullmatch(r"[1-9][0-9]{0,8}", which):
            return Reference(model, number=int(which))
        if mark == "@" and _NAME.fullmatch(which):
            return Reference(model, alias=which)
    raise UserError(
        f"{text[:100]!r} names no version; expected name:number or name@alias, such as digits:3 or digits@champion",
        "bad_reference",
    )


def is_version(text: str) -> bool:
    """Whether this is a version with a number or an alias, and not the path of a file, which has a slash."""
    model, mark, which = text.partition(":" if ":" in text else "@")
    return bool(mark and _NAME.fullmatch(model) and _NAME.fullmatch(which))


def parse_register_as(text: str) -> RegisterAs:
    """Parses `name` or `name@alias` of a version that does not exist yet.

    Raises:
        UserError: `bad_name`.
    """
    model, mark, alias = text.partition("@")
    return RegisterAs(check_model_name(model), check_alias(alias) if mark else None)


def check_model_name(text: str) -> str:
    """Returns a valid name of a model unchanged. Releases and files on devices use it too. Raises: UserError: `bad_name`."""
    expected = "1 to 63 small letters, digits and dashes, no dash first, and not `rollouts`"
    is_valid = is_release(text, 1) and text != _RESERVED_NAME
    return _checked(text, is_valid, f"name for a model; expected {expected}", "bad_name")


def check_alias(text: str) -> str:
    """Returns a valid alias unchanged. Raises: UserError: `bad_name`."""
    expected = "1 to 63 small letters, digits and dashes, no dash first"
    return _checked(text, bool(_NAME.fullmatch(text)), f"alias; expected {expected}", "bad_name")


def check_file_path(text: str) -> str:
    """Returns a valid path of a file in a version unchanged: at most three folders deep, not outside, not hidden.

    Raises:
        UserError: `bad_path`.
    """
    expected = "letters, digits, `.`, `_`, `-`, at most three folders and no name that begins with a dot"
    is_valid = bool(_PATH.fullmatch(text))
    return _checked(text, is_valid, f"path for a file of a version; expected {expected}", "bad_path")


def is_sha256(text: str) -> bool:
    """Whether this is a SHA-256 in lower-case hex."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def check_sha256(text: str) -> str:
    """Returns a SHA-256 in hex unchanged. Raises: UserError: `bad_digest`."""
    expected = "64 hexadecimal digits in small letters"
    return _checked(text, is_sha256(text), f"SHA-256; expected {expected}", "bad_digest")


def _checked(text: str, is_valid: bool, what: str, code: str) -> str:
    if not is_valid:
        raise UserError(f"{text[:100]!r} is no {what}", code)
    return text
