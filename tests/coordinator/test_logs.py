"""Text from a device cannot move the terminal's cursor, reverse a line or fill the log."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from typing import Any

import pytest
import structlog
from _pytest.logging import LogCaptureHandler
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.server import logs
from tests.support.long import LONG

HOSTILE = "\x1b[2Jgone \x9b31m\u0085 \u202egpj.exe \u2066\u2069\u200e\u200f\u061c \u2028\u2029 \ud800 \x00\r\nline two"
BAD = re.compile(
    "[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ud800-\\udfff\\ufeff]"
)


@pytest.fixture(params=["text", "json"])
def written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The log of a process, in one of the two styles."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    for name in ("uvicorn", "uvicorn.error"):  # servers of other tests leave their settings
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]  # of which levels are enabled
    logs.configure(request.param)
    return stream


def uncaptured() -> None:
    """Keeps log output out of the test report: half a character there stops the process that sends reports."""
    for logger in map(logging.getLogger, ("", "uvicorn", "uvicorn.error")):
        for handler in [each for each in logger.handlers if isinstance(each, LogCaptureHandler)]:
            logger.removeHandler(handler)


def test_no_control_or_format_character_reaches_the_log(written: io.StringIO) -> None:
    uncaptured()
    log = structlog.get_logger("fedloop.test")
    log.info("device", words=HOSTILE, nested={HOSTILE: [HOSTILE, {"deep": HOSTILE}]}, **{HOSTILE[:20]: 1})
    logging.getLogger("uvicorn.error").warning("Invalid request: %s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("request_failed", path=HOSTILE)
        logging.getLogger("uvicorn.error").exception(HOSTILE)
    text = written.getvalue()
    assert BAD.findall(decoded(text)) == []
    assert "line two" in text
    assert "Traceback" in text
    own = [line for line in text.splitlines() if not line.startswith("    ")]
    assert len(own) == 4, "no word of theirs looks like a line of its own"


def decoded(text: str) -> str:
    """Decodes JSON escapes too, as a reader does."""
    if not text.startswith("{"):
        return text
    entries = [json.loads(line) for line in text.splitlines()]
    return "".join(f"{key}{value}" for each in entries for key, value in each.items()).replace("\n", "")


def test_the_length_of_a_line_is_limited(written: io.StringIO) -> None:
    log = structlog.get_logger("fedloop.test")
    log.info("device", words="x" * 900_000)
    log.info("device", reasons=["y" * 1_000] * 1_000, labels={f"{at}": "z" * 1_000 for at in range(1_000)})
    try:
        raise ValueError("w" * 900_000)
    except ValueError:
        log.exception("request_failed")
    for line in written.getvalue().split("\n"):
        assert len(line) < 3 * logs.LINE_CHARACTERS
    assert "more" in written.getvalue()


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=100 if LONG else 10)
@given(st.dictionaries(st.text(), documents))
def test_every_logged_value_is_printable_and_limited(values: dict[str, Any]) -> None:
    cleaned = logs._sanitize(None, "info", dict(values))
    text = json.dumps(cleaned, ensure_ascii=False)
    assert BAD.findall(text) == []
    assert len(text) < 3 * logs.LINE_CHARACTERS
