"""Codes by their names, with checked options: `get("topk", share=0.01)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies import options as code_options
from strategies.codes.code import Code
from strategies.codes.drive import Drive
from strategies.codes.eden import Eden
from strategies.codes.powersgd import PowerSGD
from strategies.codes.qsgd import QSGD
from strategies.codes.sign import Sign
from strategies.codes.topk import TopK
from strategies.options import Option
from strategies.suggestions import suggest

CODES: dict[str, type[Any]] = {
    "topk": TopK,
    "qsgd": QSGD,
    "sign": Sign,
    "drive": Drive,
    "eden": Eden,
    "powersgd": PowerSGD,
}

OPTIONS: dict[str, dict[str, Option]] = {name: code_options.of(code) for name, code in CODES.items()}


class CodeError(ValueError):
    """A code's name or option is wrong. `option` is the key, or None when the name itself is unknown."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


def get(name: str, **options: Any) -> Code:
    """The named code.

    Raises:
        CodeError: unknown name or option, or a value out of range.
    """
    if name not in OPTIONS:
        raise CodeError(f"code {name!r:.60} is unknown{suggest(name, OPTIONS)}; known: {', '.join(OPTIONS)}")
    known = OPTIONS[name]
    for key, value in options.items():
        if key not in known:
            raise CodeError(
                f"{name} has no option {key!r:.60}; its options: {', '.join(known) or 'none'}", key
            )
        if not known[key].accepts(value):
            raise CodeError(
                f"{key} = {value!r:.60} is not allowed for {name}: expected {known[key].describe_range()}",
                key,
            )
    code: Code = CODES[name](**{key: known[key].convert(value) for key, value in options.items()})
    return code


def to_options(code: Code) -> dict[str, Any]:
    """The code as JSON, for a task message."""
    return {"name": code.name, **{key: getattr(code, key) for key in OPTIONS[code.name]}}


def from_options(document: Mapping[str, Any]) -> Code:
    """The code named in a task message.

    Raises:
        CodeError: it is unknown; the device's software may be older than the coordinator's.
    """
    options = dict(document)
    return get(str(options.pop("name", "")), **options)
