"""A sweep: the runs of a grid of experiments, several at once, and a table of their results.

The folder of a sweep holds `plan.json`, a folder for each run, and in the end `sweep.csv`, `sweep.json` and `sweep.png`.
Each run is a process of its own (`coordinator.runs.sweep_worker`) that ends with this one. A run's folder is that of a
simulation, so a killed sweep continues every run from its last committed round.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.errors import RunInterrupted, UserError
from coordinator.experiments.grid import Combination
from coordinator.extras import problems_with
from coordinator.output_folders import begin, locked, require_new, resumable, undone_if_refused
from coordinator.reports import sweep as reports
from coordinator.reports.folder_state import is_finished
from coordinator.reports.progress import Quiet
from coordinator.runs import simulation
from coordinator.runs.simulation import Environment
from edge_client.files import write_durably
from edge_client.processes.process import Launch

PLAN = "plan.json"
_WORKER = "coordinator.runs.sweep_worker"
_LOG = "run.log"
"""Output of a run's process, in its folder until it is finished."""
_NAME_CHARACTERS = 80
_QUOTES = str.maketrans("", "", "\"'{}[]")
"""What TOML puts around values, which names of folders leave out."""
_ERROR_BYTES = 65_536

OnFinished = Callable[[Path, dict[str, Any]], None]
"""Receives the folder and the report of a run as soon as it is finished, and of those finished before."""


def sweep(
    name: str,
    combinations: Sequence[Combination],
    out: Path,
    environment: Environment,
    *,
    jobs: int | None = None,
    on_finished: OnFinished = lambda folder, report: None,
) -> dict[str, Any]:
    """Runs all experiments into the empty or new folder `out` and returns the contents of `sweep.json`.

    `jobs`: runs at once; by default as many as the cores hold workers.

    Raises:
        UserError: an experiment or its data is wrong, or `out` is not empty.
        RunInterrupted: a run stopped for another reason; the sweep can be resumed.
    """
    require_new(out, hint=f", or go on with: fedloop sweep --resume {out}")
    runtimes = {each for one in combinations for each in one.experiments[0].federation.runtimes}
    by_rows = any(one.experiments[0].privacy.mechanism == "example" for one in combinations)
    if lacking := problems_with(sorted(runtimes), "example" if by_rows else None):
        raise UserError("\n".join(lacking))
    with undone_if_refused(out, lambda: any(out.glob("*/checkpoint/checkpoint.json"))):
        _write_plan(name, combinations, out)
        return resume(out, environment, jobs=jobs, on_finished=on_finished)


def resume(
    out: Path,
    environment: Environment,
    *,
    jobs: int | None = None,
    on_finished: OnFinished = lambda folder, report: None,
) -> dict[str, Any]:
    """Continues the sweep in `out`: keeps finished runs, resumes the others from their last committed round.

    Raises:
        UserError: `out` holds no sweep, or a run's experiment or data were changed since.
        RunInterrupted: as `sweep`.
    """
    try:
        plan: dict[str, Any] = json.loads((out / PLAN).read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"--resume {out}: there is no sweep here (no {PLAN})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{out / PLAN}: cannot be read: {error}") from None
    folders = [out / each for row in plan["rows"] for each in row["folders"]]
    how = f"nothing committed is lost; go on with: fedloop sweep --resume {out}"
    taken = UserError(f"{out}: another process is running this sweep")
    with resumable(how, RunInterrupted), locked(out / ".lock", taken):
        at_once = jobs or max(1, len(os.sched_getaffinity(0)) // plan["workers"])
        environment.progress.stage(f"{len(folders)} runs, {at_once} at once")
        _Runs(out, folders, environment, on_finished).run(at_once)
        loaded = {
            each: json.loads((out / each / "report.json").read_text("utf-8"))
            for row in plan["rows"]
            for each in row["folders"]
        }
        return reports.write(out, plan, loaded)


def _write_plan(name: str, combinations: Sequence[Combination], out: Path) -> None:
    """Writes the experiment of every run into its folder, then the plan: with a plan, the sweep can be resumed."""
    rows = []
    width = len(str(len(combinations)))
    for number, one in enumerate(combinations, 1):
        bare = "-".join(one.values.values()).translate(_QUOTES)
        slug = re.sub(r"[^\w.=+-]+", "_", bare)[:_NAME_CHARACTERS] or "run"
        folders = [f"{number:0{width}}-{slug}-seed{each.seed}" for each in one.experiments]
        for folder, experiment in zip(folders, one.experiments, strict=True):
            begin(out / folder, "experiment.toml", experiment.to_toml())
        seeds = [each.seed for each in one.experiments]
        rows.append({"values": dict(one.values), "label": one.label, "seeds": seeds, "folders": folders})
    workers = max(one.experiments[0].simulation.workers for one in combinations)
    keys = list(combinations[0].values)
    document = {"name": name, "keys": keys, "workers": workers, "rows": rows}
    write_durably(out / PLAN, json.dumps(document, indent=2).encode())


@dataclass(frozen=True)
class _Started:
    folder: Path
    process: subprocess.Popen[bytes]


class _Runs:
    """The processes of a sweep."""

    def __init__(
        self, out: Path, folders: Sequence[Path], environment: Environment, on_finished: OnFinished
    ) -> None:
        self._out = out
        self._count = len(folders)
        self._waiting = deque(each for each in folders if not is_finished(each))
        self._kept = [each for each in folders if is_finished(each)]
        self._environment = environment
        self._on_finished = on_finished
        self._done = 0

    def run(self, at_once: int) -> None:
        """Runs all that are not finished. Kills the others when one fails; they can be resumed."""
        for folder in self._kept:
            self._finished(folder, "kept from before")
        running: dict[int, _Started] = {}
        try:
            while self._waiting or running:
                while self._waiting and len(running) < at_once:
                    started = self._start(self._waiting.popleft())
                    running[os.pidfd_open(started.process.pid)] = started
                for ended in select.select(list(running), [], [])[0]:
                    started = running.pop(ended)
                    os.close(ended)
                    self._end(started)
        finally:
            for descriptor, started in running.items():
                started.process.kill()
                started.process.wait()
                os.close(descriptor)

    def _start(self, folder: Path) -> _Started:
        launch = Launch()
        data_dir = [] if self._environment.data_dir is None else [str(self._environment.data_dir)]
        with (folder / _LOG).open("wb") as log:
            process = subprocess.Popen(
                launch.command("-m", _WORKER, str(folder), *data_dir),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=launch.environment(),
            )
        return _Started(folder, process)

    def _end(self, started: _Started) -> None:
        status = started.process.wait()
        log = started.folder / _LOG
        if status == 0:
            self._finished(started.folder, "")
            return
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _ERROR_BYTES))
            output = file.read().decode("utf-8", "replace").strip()
        name = started.folder.name
        if status == 2:
            raise UserError(f"{name}: {output}")
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        raise RunInterrupted(f"{name}: {output or f'its process ended with {how}'}")

    def _finished(self, folder: Path, remark: str) -> None:
        self._done += 1
        (folder / _LOG).unlink(missing_ok=True)
        # finished: this removes what a killed process left
        report = simulation.resume(folder, replace(self._environment, progress=Quiet()))
        final = reports.final_figures(report)
        figures = ", ".join(
            f"{key.replace('_', ' ')} {value:.4f}"
            for key in reports.SCORES
            if (value := final[key]) is not None
        )
        self._environment.progress.note(f"{self._done}/{self._count} {folder.name}: {remark or figures}")
        self._on_finished(folder, report)
