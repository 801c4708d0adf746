"""Whether a model and a batch can follow a plan: `python -P -m models.pretrain.check JOB.json`.

Looks at the job file alone, so that an impossible training is refused before data is copied or processes are
started. `result.json` gives the sizes that limit plans and the number of parameters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from edge_client import process
from models import job as jobs
from models.pretrain import freezing, initial, worker
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
    plan = worker.plan_of(job, 1)
    sizes = sizes_of(spec)
    plans.check(plan, sizes, batch_size=options.batch_size)
    with torch.device("meta"):
        whole = spec.module()
        parameters = sum(parameter.numel() for parameter in whole.parameters())
        freezing.freeze(whole, spec.layout, options, plan)
    jobs.write_result(
        job.out, {"sizes": dataclasses.asdict(sizes), "plan": str(plan), "parameters": parameters}
    )


if __name__ == "__main__":
    process.serve(check)
