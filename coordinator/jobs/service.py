"""Jobs of this process: queued in the database, each run by a process of its own, as many at a time as there are slots.

    create ─► queued ─► running ─► finished          resume: failed, cancelled, interrupted ─► queued
                           └► failed, cancelled, interrupted

The order is that of `fedloop pretrain --slots`: by priority, then by arrival, each that still fits
(`coordinator.datacenter.pretrain_queue.allocate`). A job that runs keeps its slots. The process of a job dies with the thread
that starts it, so with this process; the next one marks the job as interrupted and says so.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.datacenter.job_worker import exit_reason
from coordinator.datacenter.pretrain_queue import Claim, may_start
from coordinator.errors import Refusal, UserError
from coordinator.jobs import documents, folders, queries
from coordinator.jobs.folders import Task
from coordinator.jobs.tables import JobRow, Kind
from coordinator.project_names import DEFAULT_PROJECT
from coordinator.sandbox import policy
from coordinator.short_ids import short_id

_log = structlog.get_logger("fedloop.jobs")

_SOURCES: Mapping[Kind, tuple[Kind, ...]] = {
    "compression": ("simulation", "pretraining", "compression"),
    "export": ("simulation", "pretraining", "compression"),
}
"""Kinds that start from the model of another job -> kinds of that job."""
MAX_LIVE = 500
"""Jobs that have not ended, of all projects together."""
_UNCONFINED: tuple[Kind, ...] = ("pretraining", "plan", "export")
"""Kinds that need what the sandbox refuses: sockets between processes, or in an export the memory figures of /proc."""


class JobService:
    """Starts, stops and lists jobs."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._slots = services.settings.job_slots
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._is_closed = False

    def start(self) -> None:
        """Marks what an earlier process left running as interrupted, and starts what is queued."""
        services = self._services
        if count := services.commit(partial(queries.interrupt, now=services.clock())):
            _log.warning("jobs_interrupted", count=count)
        self._dispatch()

    def folder(self, job: str) -> Path:
        """The folder of a job."""
        return self._services.settings.home / "jobs" / job

    def create(
        self,
        kind: Kind,
        document: Mapping[str, Any],
        sets: Sequence[str],
        source: str | None,
        priority: int,
        created_by: str,
        project: str = DEFAULT_PROJECT,
    ) -> JobRow:
        """Queues a new job of a project.

        Raises:
            UserError: listing all problems of the document, or what it may not name; it needs more slots than there are.
            Refusal: 404, it names a job or a version that does not exist; 409 `job_state`, its source has not finished;
                409 `no_jobs`, this coordinator runs none; 409 `too_many_jobs`.
        """
        services, job = self._services.for_project(project), str(uuid.uuid4())
        if not self._slots:
            raise Refusal(409, "no_jobs", "this coordinator runs no jobs: its --job-slots is 0")
        if len(self._services.database.read(queries.live)) >= MAX_LIVE:
            raise Refusal(409, "too_many_jobs", f"{MAX_LIVE} jobs have not ended; wait, or cancel some")
        folder = self.folder(job)
        checked = documents.check(kind, document, sets, folder, services)
        if checked.processes > self._slots:
            raise UserError(
                f"the {kind} needs {checked.processes} processes at once, but this coordinator has {self._slots} slots for jobs; "
                "ask for fewer, or have it started with a higher --job-slots"
            )
        services.database.read(partial(self._require_source, kind=kind, source=source))
        row = JobRow(
            job, 0, kind, checked.name[:200], "queued", checked.document, source, checked.processes, priority, 0,
            created_by, services.clock(), None, None, None, project,
        )  # fmt: skip
        try:
            folder.parent.mkdir(exist_ok=True)  # not the home: it may be a mount point that is not mounted
            folder.mkdir()
            for name, content in checked.init.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(content, folder / name)
            created = services.commit(partial(queries.create, job=row))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._dispatch()
        return created

    def cancel(self, job: str) -> None:
        """Ends a job now; what it has written so far stays.

        Raises:
            Refusal: 404, there is no such job; 409 `job_state`, it has ended.
        """
        services = self._services
        row = services.database.read(partial(queries.require, job=job))
        ended = services.commit(partial(queries.end, job=job, state="cancelled", now=services.clock()))
        if not ended:
            raise _wrong_state(row, "has ended already")
        with self._lock:
            process = self._processes.get(job)
        if process is not None:
            process.kill()  # its workers die with it
        self._dispatch()

    def resume(self, job: str) -> None:
        """Queues a job again that failed, was cancelled or interrupted; it goes on where it stopped, as far as its kind can.

        Raises:
            Refusal: 404, there is no such job; 409 `job_state`.
        """
        self._change_ended(job, queries.requeue)
        self._dispatch()

    def remove(self, job: str) -> None:
        """Removes a job that has ended, with its files.

        Raises:
            Refusal: 404, there is no such job; 409 `job_state`.
        """
        self._change_ended(job, queries.remove)
        shutil.rmtree(self.folder(job), ignore_errors=True)

    def close(self, patience_seconds: float = 5.0) -> None:
        """Ends the processes of all jobs; the next start marks them as interrupted."""
        end = time.monotonic() + patience_seconds
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.values())
            for process in self._processes.values():
                process.kill()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _change_ended(self, job: str, change: Callable[[Connection, str], bool]) -> None:
        """Applies `change` to a job that has ended; raises as `resume`."""
        services = self._services
        row = services.database.read(partial(queries.require, job=job))
        with self._lock:
            is_ending = job in self._threads
        if is_ending or not services.commit(lambda at: change(at, job)):
            raise _wrong_state(row, "is still ending" if is_ending else f"is {row.state}")

    def _require_source(self, connection: Connection, kind: Kind, source: str | None) -> None:
        kinds = _SOURCES.get(kind, ())
        if (source is None) != (not kinds):
            needed = (
                f"needs the id of a finished job as source: {', '.join(kinds)}" if kinds else "has no source"
            )
            raise UserError(f"source: a job of kind {kind} {needed}")
        if source is None:
            return
        row = queries.require(connection, source)
        if row.kind not in kinds:
            raise UserError(f"source: job {source} is of kind {row.kind}; expected {' or '.join(kinds)}")
        if row.state != "finished":
            raise _wrong_state(row, f"is {row.state}; a source has finished")

    def _dispatch(self) -> None:
        """Starts every queued job whose turn it is."""
        services = self._services
        with self._lock:
            if self._is_closed:
                return
            rows = services.database.read(queries.live)
            claims = {row.id: _claim(row, row.id in self._threads) for row in rows}
            for row in rows:
                claim = claims[row.id]
                if claim.running or not may_start(claim, list(claims.values()), self._slots):
                    continue
                if services.commit(partial(queries.begin, job=row.id, now=services.clock())):
                    claims[row.id] = _claim(row, running=True)
                    self._start_thread(row)

    def _start_thread(self, row: JobRow) -> None:
        thread = threading.Thread(
            target=self._run_thread, args=(row,), name=f"job-{short_id(row.id)}", daemon=True
        )
        self._threads[row.id] = thread
        thread.start()

    def _run_thread(self, row: JobRow) -> None:
        services = self._services
        try:
            error = self._run(row)
        except UserError as failure:
            error = str(failure)
        except Exception as failure:
            _log.exception("job_failed", job=row.id)
            error = f"{type(failure).__name__}: {failure}"
        finally:
            with self._lock:
                self._processes.pop(row.id, None)
        try:
            if not self._is_closed:
                state: Any = "failed" if error else "finished"
                end = partial(queries.end, job=row.id, state=state, now=services.clock(), error=error)
                if services.commit(end):  # not if it was cancelled
                    _log.info("job_ended", job=row.id, state=state)
        except Exception:
            _log.exception("job_end_not_stored", job=row.id)  # the next start marks it as interrupted
        finally:
            with self._lock:
                self._threads.pop(row.id, None)
            self._dispatch()

    def _run(self, row: JobRow) -> str | None:
        """Runs the process of a job to its end; returns the error, None for success.

        Raises:
            UserError: it would run outside the sandbox and names a file that may no longer be read.
        """
        settings, folder = self._services.settings, self.folder(row.id)
        source = self.folder(row.source) / folders.OUT if row.source else None
        folders.write_task(folder, Task(row.kind, dict(row.document), source, settings.data_dir))
        confined = row.kind not in _UNCONFINED
        if not confined:
            documents.recheck(row.kind, row.document, folder, settings)
        launch = policy.launch(settings, folder, readable=(source,) if source else (), confined=confined)
        environment = launch.environment()
        if not confined:
            environment["TMPDIR"] = tempfile.gettempdir()  # the path of a socket has at most 107 bytes
        with (folder / folders.LOG).open("ab") as log:
            process = subprocess.Popen(
                launch.command("-m", "coordinator.jobs.job_process", str(folder)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        with self._lock:
            self._processes[row.id] = process
            if self._is_closed:
                process.kill()
        if self._services.database.read(partial(queries.require, job=row.id)).state == "cancelled":
            process.kill()  # before it could be found
        status = process.wait()
        shutil.rmtree(folder / policy.TEMPORARY, ignore_errors=True)
        outcome = folders.read_outcome(folder)
        return exit_reason(status, folder / folders.LOG) if outcome is None else outcome["error"]


def _claim(row: JobRow, running: bool) -> Claim:
    return Claim(row.number, row.processes, row.priority, running)


def _wrong_state(row: JobRow, how: str) -> Refusal:
    return Refusal(409, "job_state", f"job {row.id} {how}", state=row.state)
