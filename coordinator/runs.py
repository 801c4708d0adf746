"""Runs on the fleet of devices: made, carried through by a thread each, taken up again when the process starts.

    create ─► queued ─► prepare (worker processes) ─► running: round after round ─► finished
                                                                └► failed, cancelled

What is true of a run is in the database: its experiment, what was prepared, the last committed round and the open
one. So a thread may end anywhere, with its process or before it, and the next one goes on from there; nothing is
handed over in memory.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from coordinator import admission
from coordinator import experiment as experiments
from coordinator.db import runs as rows
from coordinator.db.store import is_disk_full
from coordinator.errors import Refusal, UserError
from coordinator.experiment import Experiment
from coordinator.federated_evaluation import Devices
from coordinator.fleets.deployments import Deployment
from coordinator.fleets.device import sweep_uploads
from coordinator.fleets.fleet import Stopped
from coordinator.live_run import LiveRun
from coordinator.sandbox import policy
from coordinator.services import Services
from coordinator.simulation.pool import TORCH, WorkerPool

_log = structlog.get_logger("fedloop.runs")

_AGAIN_SECONDS = 5.0
"""Between attempts while the disk is full or the database is away."""

FleetOf = Callable[[Services, Deployment, float], Devices]
"""Makes the fleet of a run; the number is its patience in seconds."""


class RunService:
    """The runs of this process."""

    def __init__(
        self,
        services: Services,
        fleet_of: FleetOf,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self._fleet_of = fleet_of
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._fleets: dict[str, Devices] = {}

    def start(self) -> None:
        """Takes up every run that is queued or was under way, and clears away what no row needs any more."""
        services = self._services
        services.blobs.keep_only(services.database.read(rows.blobs_in_use))
        sweep_uploads(services)
        for run in services.database.read(rows.live):
            self._carry(run)

    def create(self, document: Mapping[str, Any], sets: Sequence[str] = ()) -> str:
        """A new run of this experiment, on its way; its id.

        Raises:
            UserError: listing everything that is wrong with the experiment, or naming what it may not name.
            Refusal: 404, it names a version that is not there.
        """
        given = experiments.changed(dict(document), sets)
        experiment = admission.admit(experiments.resolve(given, "experiment", "devices"), self._services)
        run = str(uuid.uuid4())
        resolved = experiment.model_dump(mode="json", exclude_none=True)
        now = self._services.clock()
        self._services.database.write(
            partial(
                rows.create,
                run=run,
                name=experiment.name,
                experiment=resolved,
                notices=notices(given, experiment),
                now=now,
            )
        ).result()
        self._services.signals.notify("events")
        self._carry(run)
        return run

    def cancel(self, run: str) -> None:
        """Ends a run now; devices that work for it are told.

        Raises:
            Refusal: there is no such run (404), or it has ended already (409).
        """
        services = self._services
        found = services.database.read(partial(rows.find, run=run))
        if found is None:
            raise Refusal(404, "unknown_run", f"there is no run {run}")
        devices = services.database.write(
            partial(rows.end, run=run, state="cancelled", now=services.clock())
        ).result()
        if devices is None:
            raise Refusal(409, "run_ended", f"run {run} has already ended")
        services.deployments.remove(run)
        with self._lock:
            fleet = self._fleets.get(run)
        if fleet is not None:
            fleet.stop()
        services.signals.notify(f"run:{run}", "events", *(f"device:{device}" for device in devices))

    def close(self, patience_seconds: float = 5.0) -> None:
        """Waits for the threads, which end because the signals are closed. What does not end in time is left."""
        end = time.monotonic() + patience_seconds
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def join(self, run: str, seconds: float) -> bool:
        """Waits until nobody works on a run any more; False when the time is up."""
        with self._lock:
            thread = self._threads.get(run)
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _carry(self, run: str) -> None:
        # Its worker processes die with the thread that starts them, which is this one.
        thread = threading.Thread(target=self._live, args=(run,), name=f"run-{run[:8]}", daemon=True)
        with self._lock:
            self._threads[run] = thread
        thread.start()

    def _live(self, run: str) -> None:
        try:
            while not self._attempt(run):
                self._services.signals.wait(
                    f"run:{run}", self._services.signals.seen(f"run:{run}"), _AGAIN_SECONDS
                )
            self._clear(run)
        except Stopped:
            _log.info("run_left", run=run)
        except Exception:
            _log.exception("run_left", run=run)  # taken up again by the next process
        finally:
            with self._lock:
                self._threads.pop(run, None)

    def _attempt(self, run: str) -> bool:
        """Carries the run to its end; False where something that can be mended is in the way, such as a full disk.

        Raises:
            Stopped: the process is ending.
        """
        try:
            self._through(run)
        except Stopped:
            if self._services.signals.closed:
                raise
        except UserError as error:
            self._failed(run, str(error))
        except Exception as error:
            if self._services.signals.closed:
                raise Stopped from error
            if is_disk_full(error) or isinstance(error, OperationalError):
                _log.error("run_waits", run=run, reason=str(error)[:300])
                return False
            _log.exception("run_failed", run=run)
            self._failed(run, f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._fleets.pop(run, None)
        return True

    def _through(self, run: str) -> None:
        services = self._services
        self._require_live(run)
        folder = services.settings.home / "runs" / run
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            pool = partial(_pool, stack, services, folder)
            live = LiveRun(services, run, folder, self._monotonic, pool)
            stack.callback(services.deployments.remove, run)
            if (known := live.known()) is not None:
                services.deployments.add(known)
            deployment, patience = live.prepare()
            services.deployments.add(deployment)
            fleet = self._fleet_of(services, deployment, patience)
            with self._lock:
                self._fleets[run] = fleet
            self._require_live(run)  # who cancels it from here on finds the fleet
            live.rounds(fleet)

    def _require_live(self, run: str) -> None:
        row = self._services.database.read(partial(rows.find, run=run))
        if row is None or row.state not in rows.LIVE:
            raise Stopped

    def _clear(self, run: str) -> None:
        """Removes what a run that has ended needs no more: its folder, and blobs and uploads of the round it was in."""
        services = self._services
        sweep_uploads(services)
        shutil.rmtree(services.settings.home / "runs" / run, ignore_errors=True)

        def unneeded(connection: Connection) -> set[str]:
            row = rows.find(connection, run)
            if row is None or row.state in rows.LIVE:
                return set()
            return rows.blobs_of_round(connection, run, row.round + 1) - rows.blobs_in_use(connection)

        with services.blobs.naming:
            services.blobs.remove(services.database.read(unneeded))

    def _failed(self, run: str, error: str) -> None:
        line = " ".join(error.split())[:1000]
        services = self._services
        devices = services.database.write(
            partial(rows.end, run=run, state="failed", now=services.clock(), error=line)
        ).result()
        services.signals.notify("events", *(f"device:{device}" for device in devices or ()))


def notices(given: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """What of the file, as it was given, does not apply to a real fleet."""
    told = []
    data = given.get("data", {})
    for key in ("partition", "public_samples"):
        if key in data:
            told.append(f"data.{key} is ignored: devices hold data of their own")
    shares = experiment.federation.runtimes
    if len(set(shares.values())) > 1 and "runtimes" in given.get("federation", {}):
        told.append(f"of federation.runtimes only the names count: allowed are {', '.join(sorted(shares))}")
    if "simulation" in given:
        told.append("[simulation] is ignored")
    return told


def _pool(stack: ExitStack, services: Services, folder: Path) -> WorkerPool:
    settings = services.settings
    launch = policy.launch(settings, folder)
    return stack.enter_context(WorkerPool(settings.workers, folder / "workers.log", TORCH, launch))
