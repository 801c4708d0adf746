"""Structured logs: events with keys on standard error, as text on a terminal, as one JSON object a line otherwise.

Logs never hold arrays, tokens or a user's data. Lines may quote a device: control and format characters are escaped, and
the length of a line is limited. uvicorn's own access log is off; `coordinator.server.middleware` writes ours.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from edge_client.wire.strict import printable

LINE_CHARACTERS = 8_000
"""Limit of all values of a line together; a traceback may have as many again."""
_VALUE_CHARACTERS = 500
_LEVELS = 4


def configure(style: str) -> None:
    """Sets up structlog and standard logging of this process; `style`: auto, text or json."""
    text = sys.stderr.isatty() if style == "auto" else style == "text"
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper("iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processors=_processors(text), foreign_pre_chain=shared)
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("fedloop").setLevel(logging.INFO)


def _processors(text: bool) -> list[structlog.typing.Processor]:
    plain: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,  # as text, to be sanitized like the rest
        _sanitize,
    ]
    if text:
        return [
            *plain,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,  # the others print values of variables
            ),
        ]
    return [*plain, structlog.processors.JSONRenderer()]


def _sanitize(logger: Any, name: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The line with printable values of limited length.

    Keeps the end of a traceback, which says what happened, and indents its lines: an error message with a newline could
    look like a line of the log.
    """
    trace = str(line.pop("exception", ""))[-LINE_CHARACTERS:]
    sanitized = _Sanitizer().mapping(line, _LEVELS)
    if trace:
        sanitized["exception"] = "\n".join(f"    {printable(each)}" for each in trace.split("\n"))
    return sanitized


class _Sanitizer:
    """Makes the values of one line printable and limits them to `LINE_CHARACTERS` together."""

    def __init__(self) -> None:
        self._left = LINE_CHARACTERS

    def mapping(self, values: Mapping[Any, Any], levels: int) -> dict[str, Any]:
        sanitized: dict[str, Any] = {}
        for key, value in values.items():
            if self._left <= 0:
                sanitized["…"] = f"{len(values) - len(sanitized)} more"
                break
            sanitized[self._text(str(key))] = self._value(value, levels)
        return sanitized

    def _value(self, value: Any, levels: int) -> Any:
        if value is None or isinstance(value, (bool, int, float)):
            self._left -= 8
            return value
        if levels and isinstance(value, Mapping):
            return self.mapping(value, levels - 1)
        if levels and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return self._sequence(value, levels - 1)
        return self._text(str(value))

    def _sequence(self, values: Sequence[Any], levels: int) -> list[Any]:
        sanitized: list[Any] = []
        for value in values:
            if self._left <= 0:
                return [*sanitized, f"… {len(values) - len(sanitized)} more"]
            sanitized.append(self._value(value, levels))
        return sanitized

    def _text(self, text: str) -> str:
        shown = printable(text, min(_VALUE_CHARACTERS, max(1, self._left)))
        self._left -= len(shown) + 4
        return shown
