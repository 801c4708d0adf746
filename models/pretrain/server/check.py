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
    k_of_n = servers.mode == "k-of-n"
    reasons = {
        f"keep is {servers.keep}, expected 1 to {servers.workers}, the workers, with mode k-of-n": k_of_n
        and not 1 <= servers.keep <= servers.workers,
        "keep goes with mode k-of-n": servers.keep and not k_of_n,
        "staleness goes with mode ssp": servers.staleness and servers.mode != "ssp",
        "options.clip_norm needs one server, for none of several sees the whole gradient": options.clip_norm
        and servers.servers > 1,
        f"a batch of {options.batch_size} rows cannot be shared by {servers.workers} workers": options.batch_size
        < servers.workers,
        "plan is for trainings without a server; leave it out": job.settings.get("plan"),
        "checkpoint is for trainings without a server; use replicas": "checkpoint" in job.settings,
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise JobError(f"{job.path}: server: " + "; ".join(found))
    return servers
