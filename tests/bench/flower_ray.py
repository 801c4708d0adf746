"""Runs a Flower app on Flower's own Ray engine, as `flwr run` does it: a script for a Python that has flwr[simulation].

`python -P tests/bench/flower_ray.py APP CLIENTS RUN-CONFIG`, the last in JSON. Without a SuperLink, which would only add to its time.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

from flwr.app import Context, RecordDict
from flwr.simulation.run_simulation import _run_simulation
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.telemetry import EventType

_RUN, _SERVER = 7, 1


def main(folder: Path, clients: int, changes: dict[str, float | str]) -> None:
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, _RUN, _SERVER
    run = Run.create_empty(_RUN)
    run.override_config, run.primary_task_id, run.federation_id = changes, 1, NOOP_FEDERATION_ID
    sys.path.insert(0, str(folder))
    _run_simulation(
        num_supernodes=clients,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app_attr=app["components"]["clientapp"],
        server_app_attr=app["components"]["serverapp"],
        app_dir=str(folder),
        is_app=True,
        run=run,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {
                "num_cpus": len(os.sched_getaffinity(0)),
                "include_dashboard": False,
                "logging_level": "ERROR",
            },
        },
        server_app_context=Context(_RUN, _SERVER, {}, RecordDict(), {**app["config"], **changes}),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), json.loads(sys.argv[3]))
