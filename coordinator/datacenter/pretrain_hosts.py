"""The hosts of a pretraining, from the options of the command to the `hosts` table of its job file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.datacenter.jobs import DatacenterJob
from coordinator.datacenter.pretrain_config import Pretraining
from coordinator.errors import UserError
from models.pretrain.hosts import hostfile
from models.pretrain.hosts.hostfile import Host, HostsError, HostSettings

SLURM = "slurm"
"""In place of a hosts file: the nodes of the Slurm job in which the command runs."""


@dataclass(frozen=True)
class Hosts:
    """The hosts, with their addresses, and how processes are started on them."""

    hosts: tuple[Host, ...]
    remote_shell: str
    python: str

    def check(self, config: Pretraining) -> None:
        """Requires that `config` can train on these hosts.

        Raises:
            UserError: it cannot.
        """
        if config.server is not None:
            raise UserError(
                "--hosts spreads a [plan]; a parameter server, [server], trains on this machine only"
            )
        if not config.checkpoint.every:
            raise UserError(
                "--hosts resumes from checkpoints when a host is lost, and checkpoint.every is 0; set it above 0"
            )
        needed, slots = config.parallel_plan.processes, sum(host.slots for host in self.hosts)
        if needed > slots:
            raise UserError(
                f"the plan needs {needed} processes, the hosts have {slots} slots; "
                "choose a plan with fewer processes, or raise slots=N in the hosts file"
            )

    def applied_to(self, job: DatacenterJob, sizes: Mapping[str, Any]) -> DatacenterJob:
        """`job` on these hosts; dp follows the hosts that are there. `sizes`: of the model."""
        settings = HostSettings(self.hosts, job.processes, self.remote_shell, self.python)
        plan = {key: value for key, value in job.plan.items() if key != "dp"}
        return replace(job, plan=plan, more={**job.more, "hosts": {**asdict(settings), "sizes": dict(sizes)}})


def load(source: str, remote_shell: str | None, python: str | None) -> Hosts:
    """The hosts in the file `source`, or of the Slurm job around this command.

    Raises:
        UserError: naming the bad lines, or the option that does not fit.
    """
    try:
        hosts = hostfile.from_slurm(os.environ) if source == SLURM else _read(Path(source))
        shell = remote_shell or (hostfile.SRUN if source == SLURM else hostfile.SSH)
        hostfile.check_remote_shell(shell)
        loaded = Hosts(tuple(hostfile.resolve(hosts)), shell, python or sys.executable)
        hostfile.require_safe(loaded.python)
    except HostsError as error:
        raise UserError(str(error)) from None
    return loaded


def _read(path: Path) -> list[Host]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hosts {path}: cannot be read: {error}") from None
    return hostfile.parse(text, f"--hosts {path}")
