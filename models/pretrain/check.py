"""Checks whether a model and a batch can follow a plan: `python -P -m models.pretrain.check JOB.json`.

It reads only the job file, so an impossible training is rejected before data is copied or processes start.
`result.json` has the model's sizes that limit plans and its number of parameters. It avoids the imports of
torch.distributed that a plan would need.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import torch

from edge_client.processes import process
from models import job as jobs
from models.catalog import MODELS
from models.pretrain import freezing, initial, plan_rules
from models.pretrain import plan as plans
from models.pretrain.data import documents
from models.pretrain.parallel.model import fp8
from models.pretrain.parallelize import require_splittable, sizes_of
from models.pretrain.recovery import fine_tuning
from models.pretrain.training import TrainingOptions
from models.zoo.trial import require_answers


def check(path: Path, report: process.Report) -> None:
    """Checks a job from its file.

    Raises:
        PlanError: with every reason why the model cannot follow the plan or freeze the named modules.
        JobError: the initial params do not fit.
    """
    job = jobs.read(path)
    spec, options = initial.with_init(job, documents.spec_of(job)), job.options(TrainingOptions)
    plan = plan_of(job, 1)
    sizes = sizes_of(spec)
    plan_rules.check(plan, sizes, options)
    if plan.precision == "fp8":  # on this machine, where the training will be
        fp8.require_support(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if spec.name not in MODELS:
        require_answers(spec)
    with torch.device("meta"):
        module = spec.module()
        parameters = sum(parameter.numel() for parameter in module.parameters())
        require_splittable(module, spec.layout, plan)
        freezing.freeze(module, spec.layout, options, plan)
        trained = fine_tuning.trained(module)
    found = {"sizes": dataclasses.asdict(sizes), "parameters": parameters, "trained": trained}
    jobs.write_result(job.out, {**found, "plan": str(plan)})


def plan_of(job: jobs.JobFile, processes: int) -> plans.ParallelPlan:
    """The plan of a job; without a dp, dp takes all remaining `processes`."""
    table = job.settings.get("plan", {})
    if not isinstance(table, dict):
        raise jobs.JobError(f"{job.path}: plan is {table!r}, expected an object")
    try:
        plan = plans.from_table(table)
    except plans.PlanError as error:
        raise jobs.JobError(f"{job.path}: {error}") from None
    return plan if "dp" in table else replace(plan, dp=max(1, processes // plan.processes))


if __name__ == "__main__":
    process.serve(check)
