"""A search for the pipeline that takes a model into a device's budget: `python -P -m models.compress.search JOB.json`.

    1. the ladder (`models.compress.ladder`): pipelines that train nothing are run at once
    2. successive halving (Jamieson, Talwalkar 2016): the others with few epochs; of those within the budget the better half in full
    3. what every candidate came to: bytes, memory, latency and accuracy, those first that no other one beats in all of them
    4. the choice: of all that hold the budget and the bound, the smallest within a standard error of the most accurate one
       (the one-standard-error rule, Breiman 1984, section 3.4.3), or none, and which came nearest

The job file is that of a compression without `steps`, and with `budget`, `first` (end with the first candidate that fits), `student`
and `sets`. Its `x_test` are rows to choose by: neither learnt from nor those of the report. Leaves a folder for every candidate,
whose steps are kept as those of any pipeline, `pareto.png`, and `result.json` with the steps of the chosen one.
"""

from __future__ import annotations

import math
import shutil
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from edge_client import process
from models import job as jobs
from models.compress import memory, pipeline, report, tiles, worker
from models.compress.ladder import Candidate, Table, ladder
from models.compress.pipeline import Tell
from models.compress.step import Data, Model, StepRefused
from models.options import bounded

DROP = 0.02
"""How far below the source's own the accuracy may be, where no bound is given."""

Rung = Literal["short", "full"]


@dataclass(frozen=True)
class Budget:
    """What a device has; 0: not bounded.

    Attributes:
        memory_bytes: of the arena in tflite-micro, of LiteRT for what does not run there.
        size_bytes: of the `.tflite`.
        latency_us: of one row, in LiteRT, on this machine.
        accuracy: at least; 0: `DROP` below the source's.
    """

    memory_bytes: int = bounded(0, 0, 2**40)
    size_bytes: int = bounded(0, 0, 2**40)
    latency_us: float = bounded(0.0, 0.0, 1e12)
    accuracy: float = bounded(0.0, 0.0, 1.0)

    def missed(self, outcome: Outcome) -> dict[str, float]:
        """Bounds that `outcome` misses, and by which fraction of them."""
        costs = {
            "memory": (outcome.memory_bytes, self.memory_bytes),
            "size": (outcome.size_bytes, self.size_bytes),
            "latency": (outcome.latency_us, self.latency_us),
        }
        missed = {name: cost / most - 1 for name, (cost, most) in costs.items() if most and cost > most}
        if outcome.accuracy < self.accuracy - 1e-9:
            missed["accuracy"] = 1 - outcome.accuracy / self.accuracy
        return missed


@dataclass(frozen=True)
class Outcome:
    """What a candidate came to, on rows to choose by.

    Attributes:
        steps: as they were run.
        rung: `short` while it was trained for few epochs only.
        runtime: what `memory_bytes` was measured in.
    """

    name: str
    steps: tuple[Table, ...]
    rung: Rung
    model: str
    precision: str
    accuracy: float
    size_bytes: int
    memory_bytes: int
    runtime: str
    latency_us: float
    tflite: bytes

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """What is the better the less of it there is."""
        return self.size_bytes, self.memory_bytes, self.latency_us, -self.accuracy


@dataclass(frozen=True)
class Refused:
    """A candidate that cannot be made of this model, and why. `failed`: not by its own rules, but with this error."""

    name: str
    reason: str
    failed: Exception | None = None


@dataclass(frozen=True)
class Found:
    """All that was tried. `chosen`: None where nothing fits; `nearest` is then what misses by least."""

    outcomes: Sequence[Outcome]
    refused: Sequence[Refused]
    chosen: Outcome | None
    nearest: Outcome | None


def run(path: Path, say: process.Report) -> None:
    """The whole job, from its file."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    tiles.refuse()
    job = jobs.read(path)
    budget = job.table("budget", Budget) or Budget()
    source, data = worker.model_in(job), worker.data_in(job)
    sets = job.settings.get("sets", {})
    candidates = ladder(source.spec, job.settings.get("student"), sets)
    _require_kinds(sets, candidates)
    for candidate in candidates:
        pipeline.planned(candidate.steps, candidate.name)
    own = report.accuracy(source.module, data.x_test, data.y_test)
    if not budget.accuracy:
        budget = replace(budget, accuracy=max(0.0, own - DROP))
    say(checked=True)
    found = Search(source, data, job.out, job.seed, budget, lambda line: say(**line)).run(
        candidates, first=job.flag("first", False)
    )
    rows = _rows(found, budget)
    report.plot([row for row in rows if "refused" not in row], job.out / "pareto.png")
    jobs.write_result(
        job.out,
        {
            "budget": asdict(budget),
            "source": {"model": source.spec.name, "accuracy": own},
            "rows": len(data.x_test),
            "candidates": rows,
            "chosen": found.chosen.name if found.chosen else None,
            "nearest": found.nearest.name if found.nearest else None,
            "steps": steps_of(found.chosen, budget) if found.chosen else [],
            "seconds": time.perf_counter() - started,
        },
    )


def _require_kinds(sets: Mapping[str, object], candidates: Sequence[Candidate]) -> None:
    """What is set is set of a step that some candidate has."""
    kinds = {step["kind"]: None for candidate in candidates for step in candidate.steps}
    for kind in sets:
        if kind not in kinds:
            raise jobs.JobError(
                f"{kind} is set, but a search has no step of that kind; it has {', '.join(kinds)}"
            )


class Search:
    """Candidates run in folders of their own, below one folder."""

    def __init__(
        self, source: Model, data: Data, folder: Path, seed: int, budget: Budget, tell: Tell
    ) -> None:
        self._source, self._data, self._folder, self._seed = source, data, folder, seed
        self._budget, self._tell = budget, tell
        self._outcomes: dict[str, Outcome] = {}
        self._refused: dict[str, Refused] = {}
        self._ran: list[tuple[Path, tuple[Table, ...]]] = []

    def run(self, candidates: Sequence[Candidate], *, first: bool = False) -> Found:
        """Tries the candidates; with `first` only until one fits.

        One that fails, whatever a library raised of this model, is refused with what it raised, and the others are tried.

        Raises:
            Exception: the last one, where all that did not refuse failed.
        """
        at_once = [candidate for candidate in candidates if not candidate.trains]
        trained = [candidate for candidate in candidates if candidate.trains]
        if not self._all(at_once, "full", first) and not self._all(trained, "short", first):
            self._all(self._promising(trained), "full", first)
        return self._found()

    def _all(self, candidates: Iterable[Candidate], rung: Rung, first: bool) -> bool:
        """Whether to end here."""
        for candidate in candidates:
            self._try(candidate, rung)
            outcome = self._outcomes.get(candidate.name)
            if first and outcome is not None and not self._budget.missed(outcome):
                return True
        self._time_in_turns()
        return False

    def _try(self, candidate: Candidate, rung: Rung) -> None:
        self._tell({"candidate": candidate.name, "rung": rung})
        steps = candidate.steps if rung == "full" else candidate.short()
        place = self._folder / f"{candidate.name}-{rung}"
        self._borrow(place, steps)
        try:
            done = pipeline.run(
                pipeline.planned(steps, candidate.name),
                self._source,
                self._data,
                place,
                self._seed,
                tell=self._tell,
            )
            last, figures = done[-1].model, done[-1].record["figures"]
            assert last.tflite is not None  # every candidate ends with a file
            needed = memory.needed(last.tflite, self._data.x_test)
        except StepRefused as error:
            self._refused[candidate.name] = Refused(candidate.name, str(error))
            return
        except OSError:  # a full disk is no fault of the candidate
            raise
        except Exception as error:
            traceback.print_exc()
            reason = f"failed with {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            self._refused[candidate.name] = Refused(candidate.name, reason, error)
            return
        finally:
            self._ran.append((place, steps))
        self._outcomes[candidate.name] = Outcome(
            candidate.name,
            steps,
            rung,
            last.spec.name,
            last.precision,
            figures["accuracy"],
            figures["bytes"],
            needed.memory_bytes,
            needed.runtime,
            report.latency({"": last.tflite}, self._data.x_test)[""],
            last.tflite,
        )

    def _borrow(self, place: Path, steps: tuple[Table, ...]) -> None:
        """Copies steps that another candidate has in common; the pipeline takes those whose key is its own."""
        for folder, others in self._ran:
            common = 0
            while common < min(len(steps), len(others)) and steps[common] == others[common]:
                common += 1
            for number in range(common + 1):
                for step in folder.glob(f"step-{number:02}-*"):
                    if not (place / step.name).exists():
                        place.mkdir(parents=True, exist_ok=True)
                        part = place / f".{step.name}"
                        shutil.rmtree(part, ignore_errors=True)
                        shutil.copytree(step, part)
                        part.rename(place / step.name)

    def _promising(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The half, by accuracy, of those within the budget apart from it; the nearest one where there is none."""
        tried = {each.name: self._outcomes[each.name] for each in candidates if each.name in self._outcomes}
        within = [name for name, outcome in tried.items() if not self._missed_costs(outcome)]
        if not within:
            within = sorted(tried, key=lambda name: sum(self._missed_costs(tried[name]).values()))[:1]
        best = sorted(within, key=lambda name: -tried[name].accuracy)[: math.ceil(len(within) / 2)]
        return [candidate for candidate in candidates if candidate.name in best]

    def _missed_costs(self, outcome: Outcome) -> dict[str, float]:
        missed = self._budget.missed(outcome)
        missed.pop("accuracy", None)
        return missed

    def _time_in_turns(self) -> None:
        """Only latencies of one measurement compare."""
        if not self._outcomes:
            return
        latencies = report.latency(
            {name: outcome.tflite for name, outcome in self._outcomes.items()}, self._data.x_test
        )
        for name, latency in latencies.items():
            self._outcomes[name] = replace(self._outcomes[name], latency_us=latency)

    def _found(self) -> Found:
        outcomes = list(self._outcomes.values())
        refused = list(
            self._refused.values()
        )  # one trained in full may be, and has its outcome with few epochs
        failures = [each.failed for each in refused if each.failed is not None]
        if failures and not outcomes:
            raise failures[-1]
        return Found(
            outcomes,
            refused,
            choice(outcomes, self._budget, len(self._data.x_test)),
            min(outcomes, key=lambda outcome: sum(self._budget.missed(outcome).values()), default=None),
        )


def choice(outcomes: Sequence[Outcome], budget: Budget, rows: int) -> Outcome | None:
    """The smallest, by bytes, of those that fit and are within a standard error of the most accurate one that fits.

    Args:
        rows: that the accuracies are of.
    """
    fitting = [outcome for outcome in outcomes if not budget.missed(outcome)]
    if not fitting:
        return None
    best = max(outcome.accuracy for outcome in fitting)
    error = math.sqrt(best * (1 - best) / rows)
    alike = [outcome for outcome in fitting if outcome.accuracy >= best - error - 1e-9]
    return min(alike, key=lambda outcome: (outcome.size_bytes, outcome.memory_bytes))


def undominated(outcomes: Sequence[Outcome]) -> list[str]:
    """Names of those that no other one beats: at least as good in everything, and better in something."""
    return [
        one.name
        for one in outcomes
        if not any(
            other.costs != one.costs and all(a <= b for a, b in zip(other.costs, one.costs, strict=True))
            for other in outcomes
        )
    ]


def steps_of(outcome: Outcome, budget: Budget) -> list[Table]:
    """Its pipeline; one that is to fit into an arena is seen to run in it, on every row."""
    steps = list(outcome.steps)
    if budget.memory_bytes and outcome.runtime == "tflite-micro" and outcome.precision == "static-int8":
        flash = min(budget.size_bytes, 2**31)
        room = {"arena_bytes": min(budget.memory_bytes, 2**31), "flash_bytes": flash}
        steps.append({"kind": "micro", **room, "max_accuracy_drop": 1.0})
    return steps


def _rows(found: Found, budget: Budget) -> list[dict[str, Any]]:
    front = undominated(found.outcomes)
    rows: list[dict[str, Any]] = []
    for outcome in found.outcomes:
        about = {key: value for key, value in vars(outcome).items() if key not in ("tflite", "size_bytes")}
        rows.append(
            {
                **about,
                "bytes": outcome.size_bytes,
                "steps": [dict(step) for step in outcome.steps],
                "front": outcome.name in front,
                "missed": budget.missed(outcome),
            }
        )
    return [*rows, *({"name": each.name, "refused": each.reason} for each in found.refused)]


if __name__ == "__main__":
    process.serve(run)
