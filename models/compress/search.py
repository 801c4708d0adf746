"""A search for the pipeline that makes a model fit a device's budget: `python -P -m models.compress.search JOB.json`.

    1. the ladder (`models.compress.ladder`): pipelines without training run in full at once
    2. successive halving (Jamieson, Talwalkar 2016): the others run with few epochs; the better half of those within the budget in full
    3. the outcomes: bytes, memory, latency and accuracy, or R2, of every candidate, and which are Pareto-optimal
    4. the choice: of all within the budget and the bound, the smallest within a standard error of the most accurate one
       (the one-standard-error rule, Breiman 1984, section 3.4.3); if none fits, the nearest

The job file is that of a compression without `steps`, and with `budget`, `first` (stop at the first candidate that fits), `student`
and `sets`. Its `x_test` are rows to choose by: used neither for training nor for the report. Leaves a folder for every candidate,
whose steps are stored as in any pipeline, `pareto.png`, and `result.json` with the steps of the chosen one.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from edge_client.processes import process
from models import job as jobs
from models.compress import amx, compression_process, memory, pipeline, report
from models.compress.ladder import Candidate, Table, ladder
from models.compress.step import Data, OnProgress, StepModel, StepRefused
from models.options import bounded
from models.tasks import TASKS, Task

DROP = 0.02
"""How far the accuracy may drop below the source's without an explicit bound."""

Rung = Literal["short", "full"]


@dataclass(frozen=True)
class Budget:
    """Limits of a device; 0 means unlimited.

    Attributes:
        memory_bytes: of the arena in tflite-micro, or of LiteRT for files that do not run there.
        size_bytes: of the `.tflite`.
        latency_us: of one row, in LiteRT, on this machine.
        accuracy: the minimum, of quantities of R2; 0: `DROP` below the source's.
    """

    memory_bytes: int = bounded(0, 0, 2**40)
    size_bytes: int = bounded(0, 0, 2**40)
    latency_us: float = bounded(0.0, 0.0, 1e12)
    accuracy: float = bounded(0.0, 0.0, 1.0)

    def missed(self, outcome: Outcome) -> dict[str, float]:
        """Each limit that `outcome` misses, with the excess as a fraction of the limit."""
        costs = {
            "memory": (outcome.memory_bytes, self.memory_bytes),
            "size": (outcome.size_bytes, self.size_bytes),
            "latency": (outcome.latency_us, self.latency_us),
        }
        missed = {name: cost / most - 1 for name, (cost, most) in costs.items() if most and cost > most}
        if outcome.quality < self.accuracy - 1e-9:
            missed["accuracy"] = 1 - outcome.quality / self.accuracy
        return missed


@dataclass(frozen=True)
class Outcome:
    """The result of a candidate, on the rows to choose by.

    Attributes:
        steps: as they ran.
        rung: `short` if it was trained for few epochs only.
        quality: accuracy, or R2 of quantities.
        runtime: where `memory_bytes` was measured.
    """

    name: str
    steps: tuple[Table, ...]
    rung: Rung
    model: str
    precision: str
    quality: float
    size_bytes: int
    memory_bytes: int
    runtime: str
    latency_us: float
    tflite: bytes

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """Lower is better for each."""
        return self.size_bytes, self.memory_bytes, self.latency_us, -self.quality


@dataclass(frozen=True)
class Refused:
    """A candidate that is impossible for this model, and why. `failed`: an unexpected error rather than a refusal."""

    name: str
    reason: str
    failed: Exception | None = None


@dataclass(frozen=True)
class SearchResult:
    """The outcomes of all candidates. `chosen`: None if nothing fits; `nearest` misses the limits by the least."""

    outcomes: Sequence[Outcome]
    refused: Sequence[Refused]
    chosen: Outcome | None
    nearest: Outcome | None


def run(path: Path, emit: process.Report) -> None:
    """Runs the job in the file `path`."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    amx.disable()
    job = jobs.read(path)
    budget = job.table("budget", Budget) or Budget()
    source, data = compression_process.model_in(job), compression_process.data_in(job)
    sets = job.settings.get("sets", {})
    candidates = ladder(source.spec, job.settings.get("student"), sets)
    _require_kinds(sets, candidates)
    for candidate in candidates:
        pipeline.plan_steps(candidate.steps, candidate.name)
    task = TASKS[source.spec.task]
    source_quality = report.quality(source.module, data.x_test, data.y_test)
    if not budget.accuracy:
        budget = replace(budget, accuracy=max(0.0, source_quality - DROP))
    emit(checked=True)
    result = Search(source, data, job.out, job.seed, budget, lambda line: emit(**line)).run(
        candidates, first=job.flag("first", False)
    )
    rows = _rows(result, budget, task)
    report.plot([row for row in rows if "refused" not in row], job.out / "pareto.png", len(data.x_test))
    jobs.write_result(
        job.out,
        {
            "budget": asdict(budget),
            "source": {"model": source.spec.name, task.figure: source_quality},
            "rows": len(data.x_test),
            "candidates": rows,
            "chosen": result.chosen.name if result.chosen else None,
            "nearest": result.nearest.name if result.nearest else None,
            "steps": steps_of(result.chosen, budget) if result.chosen else [],
            "seconds": time.perf_counter() - started,
        },
    )


def _require_kinds(sets: Mapping[str, object], candidates: Sequence[Candidate]) -> None:
    kinds = {step["kind"]: None for candidate in candidates for step in candidate.steps}
    for kind in sets:
        if kind not in kinds:
            raise jobs.JobError(
                f"{kind} is set, but a search has no step of that kind; it has {', '.join(kinds)}"
            )


class Search:
    """Runs candidates, each in its own folder below `folder`."""

    def __init__(
        self, source: StepModel, data: Data, folder: Path, seed: int, budget: Budget, on_progress: OnProgress
    ) -> None:
        self._source, self._data, self._folder, self._seed = source, data, folder, seed
        self._budget, self._on_progress = budget, on_progress
        self._outcomes: dict[str, Outcome] = {}
        self._refused: dict[str, Refused] = {}
        self._ran: list[tuple[Path, tuple[Table, ...]]] = []

    def run(self, candidates: Sequence[Candidate], *, first: bool = False) -> SearchResult:
        """Tries the candidates; with `first` only until one fits.

        If a library raises any error for a candidate, the candidate is refused with that error and the search continues.

        Raises:
            Exception: the last error, if no candidate succeeded and at least one failed.
        """
        at_once = [candidate for candidate in candidates if not candidate.trains]
        trained = [candidate for candidate in candidates if candidate.trains]
        if not self._run_all(at_once, "full", first) and not self._run_all(trained, "short", first):
            self._run_all(self._promising(trained), "full", first)
        return self._result()

    def _run_all(self, candidates: Iterable[Candidate], rung: Rung, first: bool) -> bool:
        """Runs the candidates on one rung. True if the search ends here, because one fits and `first` is set."""
        for candidate in candidates:
            self._try(candidate, rung)
            outcome = self._outcomes.get(candidate.name)
            if first and outcome is not None and not self._budget.missed(outcome):
                return True
        self._time_in_turns()
        return False

    def _try(self, candidate: Candidate, rung: Rung) -> None:
        self._on_progress({"candidate": candidate.name, "rung": rung})
        steps = candidate.steps if rung == "full" else candidate.short()
        candidate_folder = self._folder / f"{candidate.name}-{rung}"
        self._copy_common_steps(candidate_folder, steps)
        try:
            done = pipeline.run(
                pipeline.plan_steps(steps, candidate.name),
                self._source,
                self._data,
                candidate_folder,
                self._seed,
                on_progress=self._on_progress,
            )
            last, figures = done[-1].model, done[-1].record["figures"]
            assert last.tflite is not None  # the last step of every candidate makes a file
            memory_bytes, runtime = memory.measure(last.tflite, self._data.x_test)
        except StepRefused as error:
            self._refused[candidate.name] = Refused(candidate.name, str(error))
            return
        except OSError:  # a full disk is not the candidate's fault
            raise
        except Exception as error:
            traceback.print_exc()
            reason = f"failed with {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            self._refused[candidate.name] = Refused(candidate.name, reason, error)
            return
        finally:
            self._ran.append((candidate_folder, steps))
        self._outcomes[candidate.name] = Outcome(
            candidate.name,
            steps,
            rung,
            last.spec.name,
            last.precision,
            report.worth(figures),
            figures["bytes"],
            memory_bytes,
            runtime,
            report.latency({"": last.tflite}, self._data.x_test)[""],
            last.tflite,
        )

    def _copy_common_steps(self, candidate_folder: Path, steps: tuple[Table, ...]) -> None:
        """Copies the leading steps shared with another candidate; the pipeline reuses those with a matching key."""
        for folder, others in self._ran:
            common = len(
                list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(steps, others, strict=False)))
            )
            for number in range(common + 1):
                for step in folder.glob(f"step-{number:02}-*"):
                    if not (candidate_folder / step.name).exists():
                        candidate_folder.mkdir(parents=True, exist_ok=True)
                        part = candidate_folder / f".{step.name}"
                        shutil.rmtree(part, ignore_errors=True)
                        shutil.copytree(step, part)
                        part.rename(candidate_folder / step.name)

    def _promising(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The more accurate half of those within the budget, accuracy aside; the nearest one if there are none."""
        tried = {each.name: self._outcomes[each.name] for each in candidates if each.name in self._outcomes}
        within = [name for name, outcome in tried.items() if not self._missed_costs(outcome)]
        if not within:
            within = sorted(tried, key=lambda name: sum(self._missed_costs(tried[name]).values()))[:1]
        best = sorted(within, key=lambda name: -tried[name].quality)[: math.ceil(len(within) / 2)]
        return [candidate for candidate in candidates if candidate.name in best]

    def _missed_costs(self, outcome: Outcome) -> dict[str, float]:
        missed = self._budget.missed(outcome)
        missed.pop("accuracy", None)
        return missed

    def _time_in_turns(self) -> None:
        """Measures all latencies again together: only latencies of one measurement are comparable."""
        if not self._outcomes:
            return
        latencies = report.latency(
            {name: outcome.tflite for name, outcome in self._outcomes.items()}, self._data.x_test
        )
        for name, latency in latencies.items():
            self._outcomes[name] = replace(self._outcomes[name], latency_us=latency)

    def _result(self) -> SearchResult:
        outcomes = list(self._outcomes.values())
        # A candidate refused in its full training still has its outcome of the short one.
        refused = list(self._refused.values())
        failures = [each.failed for each in refused if each.failed is not None]
        if failures and not outcomes:
            raise failures[-1]
        return SearchResult(
            outcomes,
            refused,
            choose(outcomes, self._budget, len(self._data.x_test), TASKS[self._source.spec.task]),
            min(outcomes, key=lambda outcome: sum(self._budget.missed(outcome).values()), default=None),
        )


def choose(
    outcomes: Sequence[Outcome], budget: Budget, rows: int, task: Task = TASKS["classification"]
) -> Outcome | None:
    """The smallest outcome, by bytes, of those that fit and are within a standard error (`lower_bound`) of the most accurate one.

    Args:
        rows: number of rows that qualities are measured on.
    """
    fitting = [outcome for outcome in outcomes if not budget.missed(outcome)]
    if not fitting:
        return None
    bound = lower_bound if task.figure == "accuracy" else lower_bound_of_r2
    least = bound(max(outcome.quality for outcome in fitting), rows)
    similar = [outcome for outcome in fitting if outcome.quality >= least - 1e-9]
    return min(similar, key=lambda outcome: (outcome.size_bytes, outcome.memory_bytes))


def lower_bound(share: float, rows: int) -> float:
    """`share` of `rows` less its standard error, computed with two more successes and failures (Agresti and Coull 1998).

    Without them, sqrt(p(1-p) / n) is 0 at p = 1, where one row less would count as worse.
    """
    adjusted_rows = rows + 4
    adjusted = (share * rows + 2) / adjusted_rows
    return share - math.sqrt(adjusted * (1 - adjusted) / adjusted_rows)


def lower_bound_of_r2(r2: float, rows: int) -> float:
    """R2 of `rows` less its standard error, 2 · sqrt(R2 / n) · (1 - R2) (Olkin and Finn 1995, section 2)."""
    return r2 - 2 * math.sqrt(max(0.0, r2) / rows) * (1 - r2)


def steps_of(outcome: Outcome, budget: Budget) -> list[Table]:
    """The outcome's pipeline; if it must fit an arena, with a step that runs it there on every row."""
    steps = list(outcome.steps)
    if budget.memory_bytes and outcome.runtime == "tflite-micro" and outcome.precision == "static-int8":
        flash = min(budget.size_bytes, 2**31)
        room = {"arena_bytes": min(budget.memory_bytes, 2**31), "flash_bytes": flash}
        steps.append({"kind": "micro", **room, "max_accuracy_drop": 1.0})
    return steps


def _rows(result: SearchResult, budget: Budget, task: Task) -> list[dict[str, Any]]:
    front = report.pareto_front([outcome.costs for outcome in result.outcomes])
    rows: list[dict[str, Any]] = []
    for index, outcome in enumerate(result.outcomes):
        fields = {
            key: value
            for key, value in vars(outcome).items()
            if key not in ("tflite", "size_bytes", "quality")
        }
        rows.append(
            {
                **fields,
                "accuracy": None,
                task.figure: outcome.quality,
                "bytes": outcome.size_bytes,
                "steps": [dict(step) for step in outcome.steps],
                "front": index in front,
                "missed": budget.missed(outcome),
            }
        )
    return [*rows, *({"name": each.name, "refused": each.reason} for each in result.refused)]


if __name__ == "__main__":
    process.serve(run)
