"""The process of a job: `python -m coordinator.jobs.job_process FOLDER`.

It does what the command of the same kind does, into FOLDER/out, and goes on where an earlier attempt stopped. Frameworks are
imported in workers of its own, which end with it; it ends with the coordinator's thread that started it.
"""

from __future__ import annotations

import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.datacenter import compression, pretrain_config, pretraining, release_export
from coordinator.datacenter.documents import CONFIG, EXPERIMENT, REPORT, write_document
from coordinator.datacenter.job_worker import JobFailed
from coordinator.datacenter.jobs import Environment
from coordinator.datacenter.release_export import ReleaseRequest
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiments import experiment as experiments
from coordinator.jobs import folders
from coordinator.jobs.documents import read_compression, read_export
from coordinator.jobs.folders import Task
from coordinator.rounds.events import Emit, EventLog, LineFile
from coordinator.rounds.records import RoundRecord, as_row
from coordinator.runs import simulation
from edge_client.processes.process import die_with_parent, lower_priority


class Reporter:
    """Progress as events of the job."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def stage(self, message: str, /) -> None:
        self._emit("stage", message=message)

    def note(self, message: str, /) -> None:
        self._emit("note", message=message)

    def begin(self, rounds: int, done: int) -> None:
        self._emit("rounds", total=rounds, done=done)

    def round(self, record: RoundRecord) -> None:
        self._emit("round", **as_row(record))

    def trained(self, line: Mapping[str, Any], /) -> None:
        if "note" in line:
            self.note(str(line["note"]))
        else:
            self._emit("progress", **line)


def main(folder: Path) -> int:
    """Runs the job in `folder`; returns the exit status."""
    die_with_parent()
    lower_priority()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal reaches the coordinator, which ends this process
    task = folders.read_task(folder)
    lines = LineFile(folder / folders.EVENTS)
    emit = EventLog(lines, lambda: datetime.now(UTC))
    emit("started", kind=task.kind)
    error = None
    try:
        _RUN[task.kind](task, folder / folders.OUT, Reporter(emit))
    except (UserError, RunInterrupted) as failure:
        error = _reason(failure)
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    emit("ended", **({"error": error} if error else {}))
    lines.close()
    folders.write_outcome(folder, error)
    return 1 if error else 0


def _reason(failure: UserError | RunInterrupted) -> str:
    """Why a job failed, without what a command's user could type next."""
    cause = failure.__context__
    if isinstance(failure, RunInterrupted) and cause is not None:
        return cause.summary if isinstance(cause, JobFailed) else str(cause)
    return failure.summary if isinstance(failure, JobFailed) else str(failure)


def _simulate(task: Task, out: Path, progress: Reporter) -> None:
    environment = simulation.Environment(task.data_dir, progress)
    if (out / EXPERIMENT).exists():
        simulation.resume(out, environment)
    else:
        simulation.simulate(experiments.resolve(task.document, "experiment", stored=True), out, environment)


def _pretrain(task: Task, out: Path, progress: Reporter) -> None:
    environment = Environment(task.data_dir, progress)
    if (out / CONFIG).exists():
        pretraining.resume(out, environment)
    else:
        pretraining.pretrain(pretrain_config.resolve(task.document, "pretraining"), out, environment)


def _plan(task: Task, out: Path, progress: Reporter) -> None:
    document = dict(task.document)
    planner = document.pop("planner")
    config = pretrain_config.resolve(document, "pretraining")
    ranking = pretraining.plan(config, planner, Environment(task.data_dir, progress))
    out.mkdir(exist_ok=True)
    write_document(out / REPORT, ranking)


def _compress(task: Task, out: Path, progress: Reporter) -> None:
    request = read_compression(task.document)
    compression.compress(_source(task), request, out, Environment(task.data_dir, progress))


def _export(task: Task, out: Path, progress: Reporter) -> None:
    shutil.rmtree(out, ignore_errors=True)  # of an attempt that was killed
    body = read_export(task.document)
    request = ReleaseRequest(
        body.name,
        body.version,
        precision=body.precision,
        device_classes=body.device_class,
        options={"dataset": body.dataset, "real_rows": body.real_rows},
        data_options=body.data_options(),
        max_accuracy_drop=body.max_accuracy_drop,
    )
    release_export.export(_source(task), request, out, Environment(task.data_dir, progress))


def _source(task: Task) -> Path:
    assert task.source is not None  # the service requires one for these kinds
    return task.source


_RUN: Mapping[str, Callable[[Task, Path, Reporter], None]] = {
    "simulation": _simulate,
    "pretraining": _pretrain,
    "plan": _plan,
    "compression": _compress,
    "export": _export,
}


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
