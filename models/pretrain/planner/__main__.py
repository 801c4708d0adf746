"""`python -P -m models.pretrain.planner JOB.json`: ranks the plans that can train a job's model.

Besides what `models.pretrain.training_process` reads, the job may have `planner`, a table of `PlannerOptions`; its `plan` fixes the
keys it names. Writes `profile.json`, `plan.json` (the ranking), and `result.json` with everything:

    {"profile": {…}, "processes": 2, "ranking": [{"plan", "processes", "seconds", "predicted", "measured", "memory_bytes", "parts", "memory"}, …],
     "refused": [{"plan", "reason"}, …], "explanation": ["…", …], "phases": {"pieces": {"seconds", "processor_seconds"}, …}, "scaling": {…}}

`scaling.options` are the training options that change if its rule is applied.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_client.files import write_durably
from edge_client.processes import process
from models import job as jobs
from models.options import bounded
from models.pretrain.plan import MAX_PROCESSES, PlanError
from models.pretrain.planner import bench_workers, explain, profile, scaling
from models.pretrain.planner.bench_workers import BenchWorkers
from models.pretrain.planner.phases import Phases
from models.pretrain.planner.profile import Profile
from models.pretrain.planner.scaling import Rule
from models.pretrain.planner.search import SearchResult, search_up_to
from models.pretrain.planner.verify import verify
from models.pretrain.training import TrainingOptions

REFUSED = 200
"""Largest number of refused plans in the result; many are alike."""


@dataclass(frozen=True)
class PlannerOptions:
    """What to plan for.

    Attributes:
        processes: in all; plans for fewer are ranked with those for all.
        per_host: processes on a host; 0: all on one.
        memory_mib: of a process; 0: what this machine has.
        profile: a file to plan with instead of measuring; relative to the job file.
        scaling: how options follow the batch; none leaves them unchanged.
        base_batch_size: the batch that the options were tuned for; 0: the current one.
        slow_between: how many times slower a message between hosts is than inside one.
        measure: number of kinds of plans to measure, of which the fastest is chosen; 0: the best prediction is chosen.
            Nothing is measured where this machine cannot tell: for several hosts, for more processes than it starts,
            with a kept profile.
        cache: whether figures of pieces that this machine measured before may be used, and new ones are kept.
    """

    processes: int = bounded(1, 1, MAX_PROCESSES)
    per_host: int = bounded(0, 0, MAX_PROCESSES)
    memory_mib: int = bounded(0, 0, 1 << 30)
    profile: str = ""
    scaling: Rule = "none"
    base_batch_size: int = bounded(0, 0, 1_000_000)
    slow_between: float = bounded(1.0, 1.0, 1e6)
    measure: int = bounded(6, 0, 1000)
    cache: bool = True

    @property
    def host(self) -> int:
        """Processes on a host."""
        return self.per_host or self.processes


def plan(path: Path, report: process.Report) -> None:
    """Plans a job."""
    job, phases = jobs.read(path), Phases(report)
    training = job.options(TrainingOptions)
    settings = job.table("planner", PlannerOptions) or PlannerOptions()
    fixed = job.settings.get("plan", {})
    if not isinstance(fixed, dict):
        raise jobs.JobError(f"{path}: plan is {fixed!r}, expected an object")
    with ExitStack() as stack:
        workers = None
        if not settings.profile:
            count = max(1, bench_workers.max_workers(max(2, settings.host)))
            workers = stack.enter_context(bench_workers.start(job, count))
        measured = _profile(job, settings, training, workers, phases)
        try:
            with phases.phase("search", "all plans"):
                found = search_up_to(measured, training.batch_size, settings.processes, fixed)
        except PlanError as error:
            raise jobs.JobError(f"{path}: {error}") from None
        # measurements here apply to a training of these processes on one host like this one
        alike = workers is not None and workers.count == settings.processes == settings.host
        if (
            workers is not None
            and alike
            and settings.slow_between == 1
            and found.ranking
            and settings.measure
        ):
            with phases.phase("measurement", "the most promising plans"):
                found = verify(found, workers, settings.measure)
    phases.end(fitting=len(found.ranking), refused=len(found.refused))
    profile.write(measured, job.out / "profile.json")
    ranking = {"ranking": explain.rows(found)}
    write_durably(job.out / "plan.json", (json.dumps(ranking, indent=2) + "\n").encode())
    scaled = _scaling(settings, training, _steps_per_epoch(job, training))
    jobs.write_result(job.out, {**result(found, measured, settings, phases), "scaling": scaled})


def result(
    found: SearchResult, measured: Profile, settings: PlannerOptions, phases: Phases
) -> dict[str, Any]:
    """The result of a search, as JSON."""
    return {
        "profile": dataclasses.asdict(measured),
        "processes": settings.processes,
        "phases": phases.seconds,
        "ranking": explain.rows(found),
        "refused": [
            {"plan": str(refused.plan), "reason": refused.reason} for refused in found.refused[:REFUSED]
        ],
        "explanation": [
            *explain.explain(found, measured, settings.processes),
            phases.sentence(),
            *_unmeasured(found, settings),
        ],
    }


def _unmeasured(found: SearchResult, settings: PlannerOptions) -> list[str]:
    """Why nothing was measured, where it should have been."""
    if not settings.measure or not found.ranking or found.ranking[0].measured is not None:
        return []
    if settings.profile:
        return ["Predicted only: the profile is a kept one, and may be from another machine."]
    return [
        f"Predicted only: this machine cannot show what {settings.processes} processes, {settings.host} a host, will take."
    ]


def _profile(
    job: jobs.JobFile,
    settings: PlannerOptions,
    training: TrainingOptions,
    workers: BenchWorkers | None,
    phases: Phases,
) -> Profile:
    per_host = settings.host
    if settings.profile:
        found = profile.read(job.file("planner.profile", settings.profile))
    else:
        from models.pretrain import world
        from models.pretrain.plan import ParallelPlan
        from models.pretrain.planner import probe, profile_cache

        cache = profile_cache.of_device(world.select_device(ParallelPlan()), keep=settings.cache)
        found = probe.measure(job, training, per_host, workers, phases, cache)
    machine = replace(found.machine, per_host=per_host)
    if settings.memory_mib:
        machine = replace(machine, memory_bytes=settings.memory_mib * 2.0**20, shared_memory=False)
    if settings.slow_between > 1:
        inside, slow = machine.inside, settings.slow_between
        machine = replace(
            machine, between=replace(inside, alpha=inside.alpha * slow, beta=inside.beta * slow)
        )
    return replace(found, machine=machine)


def _scaling(settings: PlannerOptions, training: TrainingOptions, steps_per_epoch: int) -> dict[str, Any]:
    """How the options should follow the batch, and whether they are to."""
    base = settings.base_batch_size or training.batch_size
    rule = settings.scaling if settings.scaling != "none" else scaling.rule_for(training.optimizer)
    after = dataclasses.asdict(scaling.scaled(training, base, rule, steps_per_epoch))
    before = dataclasses.asdict(training)
    return {
        "rule": rule,
        "applied": settings.scaling != "none",
        "base_batch_size": base,
        "batch_size": training.batch_size,
        "options": {name: after[name] for name in after if after[name] != before[name]},
    }


def _steps_per_epoch(job: jobs.JobFile, training: TrainingOptions) -> int:
    """Of the training set, or 0 where the job names none."""
    if not {"arrays", "tokens"} & set(job.settings):
        return 0
    from models.pretrain.data import documents, sources

    return -(-len(sources.from_job(job, documents.spec_of(job), training.shift).train) // training.batch_size)


if __name__ == "__main__":
    process.serve(plan)
