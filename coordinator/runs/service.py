"""Runs on the fleet of devices: each runs in its own thread and is resumed when the process restarts.

    create ─► queued ─► prepare (worker processes) ─► running: round after round ─► finished
                                                                └► failed, cancelled

The whole state of a run is in the database: its experiment, what was prepared, the last committed round and the open one.
A thread may therefore end at any point, with its process or before it, and the next one continues from there; no state is
passed on in memory.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection, Row

from coordinator.context.services import Services
from coordinator.context.stalls import StallLog
from coordinator.db import runs as rows
from coordinator.db import secure
from coordinator.errors import Refusal, UserError
from coordinator.experiments import experiment as experiments
from coordinator.experiments.schema import Experiment
from coordinator.fleets.device import sweep_uploads
from coordinator.fleets.device_asynchronous import AsynchronousDeviceFleet
from coordinator.fleets.statistics import StatisticsFleet
from coordinator.project_names import DEFAULT_PROJECT
from coordinator.registry.registration import DeclaredFile, hold_files
from coordinator.rounds.fleet import Stopped
from coordinator.runs import admission, own_model, statistics_run
from coordinator.runs.live_evaluation import AsynchronousEvaluatingFleet, EvaluatingFleet
from coordinator.runs.live_run import LiveRun
from coordinator.sandbox import policy
from coordinator.scheduling.deployments import Deployment
from coordinator.short_ids import short_id
from coordinator.storage.errors import is_temporary
from coordinator.workers.pool import WorkerPool
from edge_client.wire.schema import DataSchema

_log = structlog.get_logger("fedloop.runs")

_AGAIN_SECONDS = 5.0
_CLEAN_UP_SECONDS = 10.0
"""Between attempts while the disk or the database fails."""

MakeFleet = Callable[[Services, Deployment, float], EvaluatingFleet]
MakeAsynchronousFleet = Callable[[Services, Deployment, float], AsynchronousEvaluatingFleet]


def _asynchronous_devices(
    services: Services, deployment: Deployment, patience_seconds: float
) -> AsynchronousDeviceFleet:
    return AsynchronousDeviceFleet(services, deployment, patience_seconds=patience_seconds)


"""Creates the fleet of a run; the number is its patience in seconds."""


class RunService:
    """The runs of this process."""

    def __init__(
        self,
        services: Services,
        make_fleet: MakeFleet,
        monotonic: Callable[[], float] = time.monotonic,
        make_asynchronous_fleet: MakeAsynchronousFleet = _asynchronous_devices,
    ) -> None:
        self._services = services
        self._make_fleet = make_fleet
        self._make_asynchronous_fleet = make_asynchronous_fleet
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._fleets: dict[str, EvaluatingFleet | AsynchronousEvaluatingFleet | StatisticsFleet] = {}

    def start(self) -> None:
        """Resumes every run that is queued or was running, and removes blobs and uploads that no row refers to."""
        services = self._services
        services.blobs.keep_only(services.database.read(rows.blobs_in_use))
        sweep_uploads(services)
        for run in services.database.read(rows.live):
            self._start_thread(run)

    def create(
        self,
        document: Mapping[str, Any],
        sets: Sequence[str] = (),
        own_files: Mapping[str, DeclaredFile] | None = None,
        *,
        project: str = DEFAULT_PROJECT,
    ) -> str:
        """Starts a new run of this experiment in a project and returns its id.

        `own_files`: the files of the user's own model by their names in `OwnModel`, if it comes with the experiment.

        Raises:
            UserError: listing all problems of the experiment, or code or files that it may not name.
            Refusal: 404, it names a version that does not exist; 409 `missing_files`, 422 `hash_mismatch`: of `own_files`.
        """
        changed = experiments.apply_settings(dict(document), sets)
        experiment = experiments.resolve(changed, "experiment", "devices")
        services = self._services.for_project(project)
        experiment = admission.admit(experiment, services, comes_with_model=own_files is not None)
        if own_files is not None:
            own_model.require_fit(experiment)
            own_model.require_interpreter()
        notices = admission.ignored_keys(changed, experiment)
        return self._create(services, experiment, notices, "train", own_files)

    def create_statistics(
        self, document: Mapping[str, Any], sets: Sequence[str] = (), *, project: str = DEFAULT_PROJECT
    ) -> str:
        """Starts a statistics round over the devices that this experiment selects, and returns its id.

        Raises:
            UserError: listing all bad keys of the experiment.
        """
        experiment = statistics_run.resolve(document, tuple(sets))
        return self._create(self._services.for_project(project), experiment, [], "statistics")

    def statistics_report(self, connection: Connection, run: str) -> dict[str, Any]:
        """What devices reported in a statistics round so far."""
        return statistics_run.read_report(connection, run)

    def statistics_schema(self, connection: Connection, run: str) -> tuple[DataSchema, list[str]]:
        """The data schema that these statistics make, and notices.

        Raises:
            UserError: `no_schema`: the devices contradict each other.
        """
        return statistics_run.make_schema(connection, run)

    def cancel(self, run: str) -> None:
        """Ends a run now and notifies the devices that work on it.

        Raises:
            Refusal: there is no such run (404), or it has ended already (409).
        """
        services = self._services
        services.database.read(partial(rows.require, run=run))
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

    def resume(self, run: str) -> None:
        """Continues a failed or cancelled run behind its last committed round.

        Raises:
            Refusal: there is no such run (404), or it is neither failed nor cancelled (409).
        """
        services = self._services
        row = services.database.read(partial(rows.require, run=run))
        if row.kind != "train":
            raise Refusal(409, "not_resumable", f"run {run} collects statistics; start it again instead")
        if row.experiment["federation"].get("mode") == "async":
            raise Refusal(
                409,
                "not_resumable",
                f"run {run} is asynchronous: what its devices were at when it ended is lost; start another from its model",
            )
        self.join(run, _CLEAN_UP_SECONDS)  # a thread that has just ended removes what the run left
        if not services.database.write(partial(rows.resume, run=run, now=services.clock())).result():
            state = services.database.read(partial(rows.require, run=run)).state
            raise Refusal(
                409, "not_resumable", f"run {run} is {state}; only a failed or cancelled run is resumed"
            )
        self._start_thread(run)
        services.signals.notify(f"run:{run}", "events")

    def close(self, patience_seconds: float = 5.0) -> None:
        """Waits for the threads, which end because the signals are closed. Threads that do not end in time are abandoned."""
        end = time.monotonic() + patience_seconds
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def join(self, run: str, seconds: float) -> bool:
        """Waits until the thread of a run ends; False after the timeout."""
        with self._lock:
            thread = self._threads.get(run)
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _create(
        self,
        services: Services,
        experiment: Experiment,
        notices: list[str],
        kind: rows.RunKind,
        own_files: Mapping[str, DeclaredFile] | None = None,
    ) -> str:
        run = str(uuid.uuid4())
        resolved = experiment.model_dump(mode="json", exclude_none=True)
        with ExitStack() as stack:
            hold_files(services, stack, own_files or {})
            services.commit(
                partial(
                    rows.create,
                    run=run,
                    name=experiment.name,
                    experiment=resolved,
                    notices=notices,
                    now=services.clock(),
                    kind=kind,
                    own_model=own_files and {name: asdict(file) for name, file in own_files.items()},
                )
            )
        self._start_thread(run)
        return run

    def _start_thread(self, run: str) -> None:
        # The worker processes of a run die with the thread that starts them, so that is the thread of the run.
        thread = threading.Thread(
            target=self._run_thread, args=(run,), name=f"run-{short_id(run)}", daemon=True
        )
        with self._lock:
            self._threads[run] = thread
        thread.start()

    def _run_thread(self, run: str) -> None:
        try:
            stalls = StallLog(self._services, run)
            while not self._attempt(run, stalls):
                self._services.signals.wait(
                    f"run:{run}", self._services.signals.seen(f"run:{run}"), _AGAIN_SECONDS
                )
            stalls.flush()
            self._clean_up(run)
        except Stopped:
            _log.info("run_left", run=run)
        except Exception:
            _log.exception("run_left", run=run)  # the next process resumes it
        finally:
            with self._lock:
                self._threads.pop(run, None)

    def _attempt(self, run: str, stalls: StallLog) -> bool:
        """Runs the run to its end; False if something temporary prevents it, such as a full disk.

        Raises:
            Stopped: the process is ending.
        """
        try:
            stalls.flush()
            self._run_to_end(run)
        except Stopped:
            raise
        except Exception as error:
            if self._services.signals.closed:
                raise Stopped from error
            if not is_temporary(error):
                raise
            stalls.report(error)
            return False
        return True

    def _run_to_end(self, run: str) -> None:
        """Runs until the run is finished, failed or cancelled; temporary errors are raised."""
        try:
            self._run(run)
        except Stopped:
            if self._services.signals.closed:
                raise
        except Exception as error:
            if self._services.signals.closed or is_temporary(error):
                raise
            if isinstance(error, UserError):
                self._fail(run, str(error))
            else:
                _log.exception("run_failed", run=run)
                self._fail(run, f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._fleets.pop(run, None)

    def _run(self, run: str) -> None:
        services = self._services
        row = self._require_live(run)
        if row.kind == "statistics":
            self._run_statistics(run, Experiment.model_validate(row.experiment), row.project)
            return
        folder = services.settings.home / "runs" / run
        folder.parent.mkdir(exist_ok=True)  # not the home: it may be a mount point that is not mounted
        folder.mkdir(exist_ok=True)
        with ExitStack() as stack:
            make_pool = partial(_start_pool, stack, services, folder)
            live = LiveRun(services, run, folder, self._monotonic, make_pool)
            stack.callback(services.deployments.remove, run)
            if (known := live.known_deployment()) is not None:
                services.deployments.add(known)
            deployment, patience = live.prepare()
            services.deployments.add(deployment)
            if live.is_asynchronous:
                buffered = self._make_asynchronous_fleet(services, deployment, patience)
                self._register(run, buffered)
                live.run_asynchronous_rounds(buffered)
            else:
                fleet = self._make_fleet(services, deployment, patience)
                self._register(run, fleet)
                live.run_rounds(fleet)

    def _register(self, run: str, fleet: EvaluatingFleet | AsynchronousEvaluatingFleet) -> None:
        with self._lock:
            self._fleets[run] = fleet
        self._require_live(run)  # a cancellation from here on finds the fleet

    def _run_statistics(self, run: str, experiment: Experiment, project: str) -> None:
        services = self._services
        deployment = statistics_run.deployment_of(run, experiment, project)
        fleet = StatisticsFleet(services, deployment)
        with self._lock:
            self._fleets[run] = fleet
        services.deployments.add(deployment)
        try:
            self._require_live(run)  # a cancellation from here on finds the fleet
            statistics_run.run_statistics(services, run, experiment, fleet)
        finally:
            services.deployments.remove(run)

    def _require_live(self, run: str) -> Row[Any]:
        row = self._services.database.read(partial(rows.find, run=run))
        if row is None or row.state not in rows.LIVE:
            raise Stopped
        return row

    def _clean_up(self, run: str) -> None:
        """Removes the folder of a run that has ended, and blobs and uploads of its open work."""
        services = self._services
        sweep_uploads(services)
        shutil.rmtree(services.settings.home / "runs" / run, ignore_errors=True)

        def unneeded(connection: Connection) -> set[str]:
            row = rows.find(connection, run)
            if row is None or row.state in rows.LIVE:
                return set()
            left = rows.blobs_of_round(connection, run, row.round + 1) | rows.blobs_left(connection, run)
            return left - rows.blobs_in_use(connection)

        with services.blobs.reference_lock:
            services.blobs.remove(services.database.read(unneeded))
        services.database.write(partial(_forget_messages, run=run)).result()

    def _fail(self, run: str, error: str) -> None:
        line = " ".join(error.split())[:1000]
        services = self._services
        devices = services.database.write(
            partial(rows.end, run=run, state="failed", now=services.clock(), error=line)
        ).result()
        services.signals.notify("events", *(f"device:{device}" for device in devices or ()))


def _start_pool(stack: ExitStack, services: Services, folder: Path, modules: Sequence[str]) -> WorkerPool:
    settings = services.settings
    launch = policy.launch(settings, folder)
    return stack.enter_context(WorkerPool(settings.workers, folder / "workers.log", modules, launch))


def _forget_messages(connection: Connection, run: str) -> None:
    """Deletes the messages of secure aggregation of a run that has ended."""
    row = rows.find(connection, run)
    if row is not None and row.state not in rows.LIVE:
        secure.forget(connection, run)
