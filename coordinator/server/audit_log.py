"""What the process itself adds to the audit log: its start, and a signed head every hour, which is also logged."""

from __future__ import annotations

import asyncio
import os
import pwd
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

import structlog

from coordinator.audit.entries import Entry, append, last
from coordinator.context.services import Services
from coordinator.errors import Refusal

HEAD_SECONDS = 3600.0

_log = structlog.get_logger("fedloop.audit")


def record_start(services: Services) -> None:
    """Records that this process serves from now on, under which user of the system, and what it permits."""
    settings = services.settings
    details = {
        "version": version("fedloop"),
        "pid": os.getpid(),
        "ca_sha256": services.authority.ca_sha256,
        "allowed_code": len(settings.allow_code),
        "sandbox": not settings.no_sandbox,
        "needs_approval": settings.needs_approval,
    }
    entry = Entry("done", "process", _system_user(), "start", details=details)
    services.commit(partial(append, entry=entry, now=services.clock()))


async def keep_head(services: Services) -> None:
    """Signs the head now and then every hour if the log grew, for ever. Logs it, so that a copy leaves this machine with the log.

    If the log was altered, logs that as an error every hour.
    """
    while True:
        try:
            await asyncio.to_thread(_sign_head, services)
        except Refusal as refusal:
            _log.error("audit_altered", reason=str(refusal))
        except Exception:  # a full disk or an unreachable database: the coordinator continues to serve
            _log.exception("audit_head_not_signed")
        await asyncio.sleep(HEAD_SECONDS)


def _sign_head(services: Services) -> None:
    newest = services.audit_heads.newest()
    if newest is None or (newest.number, newest.hash) != services.database.read(last):
        head = services.audit_heads.sign(services.database, services.clock())
        _log.info("audit_head", **asdict(head))


def _system_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
