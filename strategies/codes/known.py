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
from strategies.option_check import resolve
from strategies.options import Option

CODES: dict[str, type[Any]] = {
    "topk": TopK,
    "qsgd": QSGD,
    "sign": Sign,
    "drive": Drive,
    "eden": Eden,
    "powersgd": PowerSGD,
}

OPTIONS: dict[str, dict[str, Option]] = {name: code_options.of(code) for name, code in CODES.items()}


def get(name: str, **options: Any) -> Code:
    """The named code.

    Raises:
        OptionError: unknown name or option, or a value out of range.
    """
    values = resolve("code", OPTIONS, name, options)
    code: Code = CODES[name](**values)
    return code


def to_options(code: Code) -> dict[str, Any]:
    """The code as JSON, for a task message."""
    return {"name": code.name, **{key: getattr(code, key) for key in OPTIONS[code.name]}}


def from_options(document: Mapping[str, Any]) -> Code:
    """The code named in a task message.

    Raises:
        OptionError: it is unknown; the device's software may be older than the coordinator's.
    """
    options = dict(document)
    return get(str(options.pop("name", "")), **options)
