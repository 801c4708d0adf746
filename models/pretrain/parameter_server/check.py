"""Checks a job for the parameter server against its `server` table."""

from __future__ import annotations

from models.job import JobError, JobFile
from models.pretrain.parameter_server.settings import Servers
from models.pretrain.training import TrainingOptions


def from_job(job: JobFile) -> Servers:
    """The servers of a job.

    Raises:
        JobError: with every reason why they cannot train it.
    """
    servers = job.table("server", Servers) or Servers()
    options = job.options(TrainingOptions)
    problems = servers.problems(options.batch_size, options.clip_norm)
    if job.settings.get("plan"):
        problems.append("plan is for trainings without a server; leave it out")
    if "checkpoint" in job.settings:
        problems.append("checkpoint is for trainings without a server; use replicas")
    if problems:
        raise JobError(f"{job.path}: server: " + "; ".join(problems))
    return servers
