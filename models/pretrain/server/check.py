"""Whether a job can be done with a parameter server as its `server` table asks."""

from __future__ import annotations

from models.job import Job, JobError
from models.pretrain.server.settings import Servers
from models.pretrain.training import Options


def of(job: Job) -> Servers:
    """The servers of a job.

    Raises:
        JobError: with every reason why there can be none such.
    """
    servers = job.table("server", Servers) or Servers()
    options = job.options(Options)
    found = servers.problems(options.batch_size, options.clip_norm)
    if job.settings.get("plan"):
        found.append("plan is for trainings without a server; leave it out")
    if "checkpoint" in job.settings:
        found.append("checkpoint is for trainings without a server; use replicas")
    if found:
        raise JobError(f"{job.path}: server: " + "; ".join(found))
    return servers
