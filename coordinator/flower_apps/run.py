"""The command's side of an app's run: checks, starts the app's processes, and writes the report."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator import extras
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiments.settings import apply_settings
from coordinator.flower_apps.app_file import FILE, FlowerApp
from coordinator.json_values import flatten
from coordinator.output_folders import begin, require_new, undone_if_refused
from edge_client.files import write_durably
from edge_client.processes.channel import Closed, receive_frame, send_frame
from edge_client.processes.process import Launch, worker_environment

REPORT = "report.json"

_HOST = "coordinator.flower_apps.host"
_FLOWER = "1.41."
_PART = "Flower apps"
_SETTINGS = {"federation.clients": 1, "simulation.workers": 0}
"""Keys that `--set` may give with `--flower-app`, and the least value of each."""
_RUN_ID_BITS = 63
_SHOWN_REASONS = 5
_GRACE_SECONDS = 5.0
_SIGNALLED = 128
"""Exit statuses above say which signal ended a process, as in a shell."""
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def settings(sets: Iterable[str]) -> dict[str, int]:
    """What `--set` gives for the run of an app, by key. Raises: UserError: a key or a value is wrong."""
    given = flatten(apply_settings({}, sets))
    for key, value in given.items():
        if key not in _SETTINGS:
            raise UserError(
                f"--set {key}: a Flower app has no such key; known are {' and '.join(_SETTINGS)}. Keys of the app itself are given "
                "with --run-config"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < _SETTINGS[key]:
            raise UserError(f"--set {key}={value!r}: expected a whole number from {_SETTINGS[key]}")
    return given


def run(
    app: FlowerApp,
    out: Path,
    given: dict[str, int],
    *,
    output_to_stderr: bool = False,
    clock: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """Runs an app and returns the report, which is also in the folder `out`, new or empty. What the app prints passes through.

    Args:
        given: as `settings` returns it.
        output_to_stderr: whether the app's standard output goes to standard error.
        clock: Unix time.

    Raises:
        UserError: Flower is not installed, `out` is not empty, or the app cannot be loaded.
        RunInterrupted: the ServerApp failed or was stopped; the report says what there is to say.
    """
    _require_flower()
    require_new(out)
    started_at = clock()
    clients = given.get("federation.clients", app.clients)
    workers = given.get("simulation.workers") or len(os.sched_getaffinity(0))
    document = {
        "app": app.name,
        "folder": str(app.folder),
        "serverapp": app.server,
        "clientapp": app.client,
        "run_config": app.config,
        "clients": clients,
        "workers": min(workers, clients),
    }
    with undone_if_refused(out):
        begin(out, REPORT, _encode({"state": "running", **document}))
        values = _run_processes(_job(app, document), output_to_stderr)
        if "load_failed" in values:
            raise UserError(f"{app.folder / FILE}: {values['load_failed']}")
    problem, first_reply_at = values.pop("problem"), values.pop("first_reply_at", None)
    report = {
        "state": "failed" if problem else "finished",
        **document,
        **values,
        "problem": problem,
        "first_reply_seconds": first_reply_at and round(first_reply_at - started_at, 3),
        "seconds": round(clock() - started_at, 3),
    }
    write_durably(out / REPORT, _encode(report).encode())
    if problem:
        raise RunInterrupted(f"the ServerApp of {app.name} ended early: {problem}; report in {out}/")
    return report


def summarize(report: dict[str, Any], out: Path) -> str:
    """The result of an app's run in a few lines: messages, failures, time."""
    messages = ", ".join(
        f"{figures['sent']} {kind}" + (f" ({figures['failed']} failed)" if figures["failed"] else "")
        for kind, figures in report["messages"].items()
    )
    reasons = list(dict.fromkeys(failure["reason"] for failure in report["failures"]))
    return "\n".join(
        [
            f"{report['app']}: {report['clients']} clients on {report['workers']} workers, {report['seconds']:.1f} s",
            f"messages: {messages or 'none'}",
            *(f"failed: {reason}" for reason in reasons[:_SHOWN_REASONS]),
            *([f"and for {more} more reasons"] if (more := len(reasons) - _SHOWN_REASONS) > 0 else []),
            f"report in {out}/",
        ]
    )


def _require_flower() -> None:
    version = extras.installed_version("flwr")
    if version is None or not version.startswith(_FLOWER):
        found = "flwr is not installed here" if version is None else f"flwr {version} is installed here"
        raise UserError(f"--flower-app needs flwr {_FLOWER}x, and {found}; {extras.how_to_install(_PART)}")


def _job(app: FlowerApp, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "folder": str(app.folder),
        "server": app.server,
        "client": app.client,
        "config": app.config,
        "clients": document["clients"],
        "workers": document["workers"],
        "run_id": secrets.randbits(_RUN_ID_BITS),
    }


def _run_processes(job: dict[str, Any], output_to_stderr: bool) -> dict[str, Any]:
    """What the ServerApp's process reported, or at least the `problem`."""
    launch = Launch(environment=lambda: worker_environment() | _QUIET)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                launch.command("-m", _HOST, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if output_to_stderr else None,
                env=launch.environment(),
            )
        values: dict[str, Any] = {"problem": "interrupted"}
        try:
            send_frame(ours, job)
            values = receive_frame(ours).values
            process.wait()
        except Closed:
            values = {"problem": _describe_end(process.wait())}
        except KeyboardInterrupt:  # which reached the ServerApp too; a second one does not wait for it
            ours.settimeout(_GRACE_SECONDS)
            with suppress(Closed, KeyboardInterrupt, subprocess.TimeoutExpired):
                values = receive_frame(ours).values
                process.wait(_GRACE_SECONDS)
        finally:
            process.terminate()
            process.wait()
    return values


def _describe_end(status: int) -> str:
    if status > _SIGNALLED:
        return f"its process was ended by {signal.Signals(status - _SIGNALLED).name}"
    return f"its process ended with status {status}"


def _encode(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2) + "\n"
