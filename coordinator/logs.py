"""Structured logs: events with keys on standard error, for people on a terminal, one JSON object a line otherwise.

Never arrays, tokens or a user's data. uvicorn's own access log is off; `coordinator.middleware` writes ours.
"""

from __future__ import annotations

import logging
import sys

import structlog


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
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processors=_rendering(text), foreign_pre_chain=shared)
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("fedloop").setLevel(logging.INFO)


def _rendering(text: bool) -> list[structlog.typing.Processor]:
    plain = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if text:
        return [
            plain,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,  # the others show values of variables
            ),
        ]
    return [plain, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
