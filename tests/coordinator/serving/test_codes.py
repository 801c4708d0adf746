"""Codes of refusals are a contract: docs/serving-protocols.md lists those of inference serving, all of them and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from coordinator.errors import Refusal
from coordinator.serving.grpc_api.status import status_of
from models.serving.generation.request import Reason

ROOT = Path(__file__).parents[3]
OF_TEXTS = {(400, reason) for reason in get_args(Reason)} - {(400, "duplicate_id")}  # ids are the server's
OTHERWISE_MADE = {(401, "no_token"), (401, "bad_token"), (400, "refused")}


def test_the_page_lists_every_code_and_no_other() -> None:
    listed = {(http, code) for http, _, codes in rows() for code in codes}
    assert listed == set(literal()) | OF_TEXTS | OTHERWISE_MADE


def test_the_page_has_the_statuses_of_grpc() -> None:
    for http, grpc, codes in rows():
        if grpc:
            assert {status_of(Refusal(http, code, "")).name for code in codes} == {grpc}


def rows() -> Iterator[tuple[int, str, list[str]]]:
    """HTTP status, gRPC status and codes of each row."""
    page = (ROOT / "docs" / "serving-protocols.md").read_text("utf-8")
    for http, grpc, cell in re.findall(r"^\| (\d{3}) \| (?:`(\w+)`)? ?\| (.+) \|$", page, re.MULTILINE):
        yield int(http), grpc, re.findall(r"`([a-z_]+)`", cell)


def literal() -> Iterator[tuple[int, str]]:
    """Codes that stand in the source."""
    for path in (ROOT / "coordinator" / "serving").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            match getattr(call.func, "id", ""), call.args[:2]:
                case "Refusal", [ast.Constant(value=int(status)), ast.Constant(value=str(code))]:
                    yield status, code
                case "invalid", [ast.Constant(value=str(code)), *_]:
                    yield 400, code
