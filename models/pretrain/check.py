"""Whether a model and a batch can follow a plan: `python -P -m models.pretrain.check JOB.json`.

Looks at the job file alone, so that an impossible training is refused before data is copied or processes are
started. `result.json` gives the sizes that limit plans and the number of parameters. Imports nothing of torch.distributed
that a plan would need.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import torch

from edge_client import process
from models import job as jobs
from models.pretrain import freezing, initial
from models.pretrain import plan as plans
from models.pretrain.parallelize import sizes_of
from models.pretrain.training import Options


def check(path: Path, report: process.Report) -> None:
    """The whole job, from its file.

    Raises:
        PlanError: with every reason why the model cannot follow the plan, or why what is to be frozen cannot be.
        JobError: the params to begin with do not fit.
    """
    job = jobs.read(path)
    spec, options = initial.starting(job, job.spec()), job.options(Options)
    plan = plan_of(job, 1)
    sizes = sizes_of(spec)
    plans.check(plan, sizes, batch_size=options.batch_size)
    with torch.device("meta"):
        whole = spec.module()
        parameters = sum(parameter.numel() for parameter in whole.parameters())
        freezing.freeze(whole, spec.layout, options, plan)
    jobs.write_result(
        job.out, {"sizes": dataclasses.asdict(sizes), "plan": str(plan), "parameters": parameters}
    )


def plan_of(job: jobs.Job, processes: int) -> plans.ParallelPlan:
    """The plan of a job, its dp as large as `processes` allow where it names none."""
    given = job.settings.get("plan", {})
    if not isinstance(given, dict):
        raise jobs.JobError(f"{job.path}: plan is {given!r}, expected an object")
    try:
        plan = plans.from_table(given)
    except plans.PlanError as error:
        raise jobs.JobError(f"{job.path}: {error}") from None
    return plan if "dp" in given else replace(plan, dp=max(1, processes // plan.processes))


if __name__ == "__main__":
    process.serve(check)
