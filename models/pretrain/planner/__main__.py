"""`python -P -m models.pretrain.planner JOB.json`: ranks the plans that a job's model can be trained by.

Beside what `models.pretrain.worker` reads the job may have `planner`, a table of `Settings`; its `plan` fixes the keys
it names. Writes `profile.json`, `plan.json` (the ranking), and `result.json` with everything:

    {"profile": {…}, "ranking": [{"plan", "seconds", "predicted", "measured", "memory_bytes", "parts", "memory"}, …],
     "refused": [{"plan", "reason"}, …], "explanation": ["…", …], "scaling": {…}}

`scaling.options` are the options of the training that change where its rule is applied.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_client import process
from edge_client.files import write_durably
from models import job as jobs
from models import options
from models.options import bounded
from models.pretrain.plan import MOST, PlanError
from models.pretrain.planner import crew as crews
from models.pretrain.planner import explain, profile, scaling
from models.pretrain.planner.crew import Crew
from models.pretrain.planner.profile import Profile, ProfileError
from models.pretrain.planner.scaling import Rule
from models.pretrain.planner.search import Found, search
from models.pretrain.planner.verify import verify
from models.pretrain.training import Options

REFUSED = 200
"""Refused plans that are written out, of many alike."""


@dataclass(frozen=True)
class Settings:
    """What to plan for.

    Attributes:
        processes: in all.
        per_host: processes on a host; 0: all on one.
        memory_mib: of a process; 0: what this machine has.
        profile: a file to plan with instead of measuring; relative to the job file.
        scaling: how options follow the batch; none leaves them.
        base_batch_size: the batch that the options are right for; 0: the one given.
        slow_between: how many times slower a message between hosts is than inside one.
        measure: how many kinds of plans are tried out, and the fastest of them chosen; 0: the best predicted is. None are
            where this machine cannot tell: for several hosts, for more processes than it starts, with a kept profile.
    """

    processes: int = bounded(1, 1, MOST)
    per_host: int = bounded(0, 0, MOST)
    memory_mib: int = bounded(0, 0, 1 << 30)
    profile: str = ""
    scaling: Rule = "none"
    base_batch_size: int = bounded(0, 0, 1_000_000)
    slow_between: float = bounded(1.0, 1.0, 1e6)
    measure: int = bounded(6, 0, 1000)

    @property
    def host(self) -> int:
        """Processes on a host."""
        return self.per_host or self.processes


def plan(path: Path, report: process.Report) -> None:
    """The whole job."""
    job = jobs.read(path)
    given = job.options(Options)
    settings = settings_of(job)
    fixed = job.settings.get("plan", {})
    if not isinstance(fixed, dict):
        raise jobs.JobError(f"{path}: plan is {fixed!r}, expected an object")
    with ExitStack() as stack:
        crew = stack.enter_context(_crew(job, settings)) if not settings.profile else None
        measured = _profile(job, settings, given, crew, report)
        try:
            found = search(measured, given.batch_size, settings.processes, fixed)
        except PlanError as error:
            raise jobs.JobError(f"{path}: {error}") from None
        if crew is not None and found.ranking and settings.measure and _tells(crew, settings):
            report(stage="plan", step=3, steps=4, what="the most promising plans")
            found = verify(found, crew, settings.measure)
    report(stage="plan", step=4, steps=4, fitting=len(found.ranking), refused=len(found.refused))
    profile.write(measured, job.out / "profile.json")
    ranking = {"ranking": explain.rows(found)}
    write_durably(job.out / "plan.json", (json.dumps(ranking, indent=2) + "\n").encode())
    scaling_asked = _scaling(settings, given, _steps_per_epoch(job, given))
    jobs.write_result(job.out, {**result(found, measured, settings), "scaling": scaling_asked})


def result(found: Found, measured: Profile, settings: Settings) -> dict[str, Any]:
    """What is written of a search."""
    return {
        "profile": profile.table(measured),
        "ranking": explain.rows(found),
        "refused": [
            {"plan": str(refused.plan), "reason": refused.reason} for refused in found.refused[:REFUSED]
        ],
        "explanation": [*explain.explain(found, measured, settings.processes), *_unmeasured(found, settings)],
    }


def _unmeasured(found: Found, settings: Settings) -> list[str]:
    """That nothing was measured, although it was asked for, and why."""
    if not settings.measure or not found.ranking or found.ranking[0].measured is not None:
        return []
    if settings.profile:
        return ["Predicted only: the profile is a kept one, and may be that of another machine."]
    return [
        f"Predicted only: this machine cannot show what {settings.processes} processes, {settings.host} a host, will take."
    ]


def settings_of(job: jobs.Job) -> Settings:
    try:
        return options.read(Settings, job.settings.get("planner", {}), f"{job.path}: planner")
    except options.OptionError as error:
        raise jobs.JobError(str(error)) from None


def _crew(job: jobs.Job, settings: Settings) -> AbstractContextManager[Crew]:
    return crews.hired(job, max(1, crews.most(max(2, settings.host))))


def _tells(crew: Crew, settings: Settings) -> bool:
    """Whether what these processes take is what a training's will."""
    return crew.count == settings.processes == settings.host and settings.slow_between == 1


def _profile(
    job: jobs.Job, settings: Settings, given: Options, crew: Crew | None, report: process.Report
) -> Profile:
    per_host = settings.host
    if settings.profile:
        try:
            found = profile.read(job.file("planner.profile", settings.profile))
        except ProfileError as error:
            raise jobs.JobError(str(error)) from None
    else:
        from models.pretrain.planner import probe

        found = probe.measure(job, given, per_host, crew, report)
    machine = replace(found.machine, per_host=per_host)
    if settings.memory_mib:
        machine = replace(machine, memory_bytes=settings.memory_mib * 2.0**20)
    if settings.slow_between > 1:
        inside, slow = machine.inside, settings.slow_between
        machine = replace(
            machine, between=replace(inside, alpha=inside.alpha * slow, beta=inside.beta * slow)
        )
    return replace(found, machine=machine)


def _scaling(settings: Settings, given: Options, steps_per_epoch: int) -> dict[str, Any]:
    """What the batch asks of the options, and whether it is to be done."""
    base = settings.base_batch_size or given.batch_size
    rule = settings.scaling if settings.scaling != "none" else scaling.suited(given.optimizer)
    after = dataclasses.asdict(scaling.scaled(given, base, rule, steps_per_epoch))
    before = dataclasses.asdict(given)
    return {
        "rule": rule,
        "applied": settings.scaling != "none",
        "base_batch_size": base,
        "batch_size": given.batch_size,
        "options": {name: after[name] for name in after if after[name] != before[name]},
    }


def _steps_per_epoch(job: jobs.Job, given: Options) -> int:
    """Of the training set, or 0 where the job names none."""
    if not {"arrays", "tokens"} & set(job.settings):
        return 0
    from models.pretrain.data import sources

    return -(-len(sources.of(job, job.spec(), given.shift).train) // given.batch_size)


if __name__ == "__main__":
    process.serve(plan)
