"""Runs the ServerApp of an app on our grid, and reports to the command how it went."""

from __future__ import annotations

import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp

from coordinator.flower_apps.dispatcher import Dispatcher
from coordinator.flower_apps.forks import Forks
from coordinator.flower_apps.grid import LocalGrid, make_nodes
from coordinator.flower_apps.loading import LoadFailed, describe, load
from coordinator.flower_internals import SUPERLINK_NODE_ID, take_identity
from edge_client.processes.channel import send_frame


def serve(job: dict[str, Any], command: socket.socket, forks: Forks) -> None:
    """Loads both components, runs the ServerApp, and sends the command what is for its report, or an error."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_id, config = job["run_id"], job["config"]
    take_identity(run_id, SUPERLINK_NODE_ID)
    nodes = make_nodes(job["clients"])
    dispatcher = Dispatcher(job["workers"], nodes, forks, time.time)
    try:
        app = load("serverapp", job["server"], Path(job["folder"]), ServerApp)
        dispatcher.wait_until_loaded()
    except LoadFailed as error:
        send_frame(command, {"load_failed": str(error)})
        return
    context = Context(
        run_id=run_id, node_id=SUPERLINK_NODE_ID, node_config={}, state=RecordDict(), run_config=dict(config)
    )
    problem = _run(app, LocalGrid(nodes, dispatcher, run_id, config, time.time), context)
    sys.stdout.flush()
    send_frame(command, {"problem": problem, **_figures(dispatcher)})


def _run(app: ServerApp, grid: LocalGrid, context: Context) -> str | None:
    """What went wrong, if anything."""
    try:
        app(grid=grid, context=context)
    except KeyboardInterrupt:
        return "interrupted"
    except SystemExit as error:
        return None if error.code in (None, 0) else describe(error)
    except Exception as error:
        traceback.print_exc()
        return describe(error)
    return None


def _figures(dispatcher: Dispatcher) -> dict[str, Any]:
    return {
        "messages": {
            kind: {"sent": sent, "failed": dispatcher.failed[kind]}
            for kind, sent in sorted(dispatcher.sent.items())
        },
        "failures": dispatcher.failures,
        "first_reply_at": dispatcher.first_reply_at,
    }
