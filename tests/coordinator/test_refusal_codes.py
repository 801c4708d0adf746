"""Codes of refusals are a contract: the table in docs/wire.md names those of the device API, all of them and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from coordinator.device_api import tasks
from coordinator.rounds import intake

ROOT = Path(__file__).parents[2]
OF_OPERATORS = {
    (401, "no_token"),
    (401, "bad_token"),
    (404, "unknown_run"),
    (409, "not_pending"),
    (409, "not_prepared"),
    (409, "run_ended"),
    (421, "wrong_host"),
}
BY_STARLETTE = {(405, "method_not_allowed")}


def test_the_table_of_the_wire_names_every_code_and_no_other() -> None:
    answered = set(literal()) | by_state() | by_intake() | BY_STARLETTE
    assert answered >= OF_OPERATORS
    assert documented() == answered - OF_OPERATORS


def documented() -> set[tuple[int, str]]:
    page = (ROOT / "docs/wire.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d{3}) \| (.+) \|$", page, re.MULTILINE)
    return {
        (int(status), code)
        for status, cell in rows
        for code in re.findall(r"`([a-z_]+)`", re.sub(r"\(with [^)]*\)", "", cell))
    }


def literal() -> Iterator[tuple[int, str]]:
    """Codes that stand in the source beside their status."""
    for path in (ROOT / "coordinator").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Refusal", "problem"):
                status, code = call.args[:2]
                if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                    yield status.value, code.value  # type: ignore[misc]
    yield 421, "wrong_host"  # made by the middleware, outside of the applications


def by_state() -> set[tuple[int, str]]:
    return {(409, code) for code, _ in (*tasks._UNWANTED.values(), tasks._CLOSED)}


def by_intake() -> set[tuple[int, str]]:
    """A result that is refused; the second one of a device is refused by its task's state."""
    return {(422, reason) for reason in get_args(intake.Reason)} - {(422, "oversized"), (422, "duplicate")}
