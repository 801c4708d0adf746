"""`python -P -m models.pretrain.hosts JOB.json`: trains a job on the hosts of its `hosts` table.

On SIGTERM the processes finish the step and save it. When this process ends, however it ends, those on the hosts do too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from edge_client.processes import process
from models import job as jobs
from models.pretrain.hosts.allocation import Limits
from models.pretrain.hosts.hostfile import HostSettings
from models.pretrain.hosts.launcher import Launcher
from models.pretrain.training import TrainingOptions

PASSED_PREFIXES = (
    "FEDLOOP_TORCH_",
    "TORCH_",
    "PYTORCH_",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "HF_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
)
"""Variables that hosts get. They start with their own environment otherwise: paths and secrets of this machine stay here."""

PASSED = ("PYTHONPATH", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "FEDLOOP_DATA_DIR")


def passed(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of `environment` that hosts get, and one thread per process."""
    named = {
        key: value for key, value in environment.items() if key in PASSED or key.startswith(PASSED_PREFIXES)
    }
    return process.ONE_THREAD | named


def launch(path: Path, report: process.Report) -> None:
    job = jobs.read(path)
    settings = job.table("hosts", HostSettings)
    if settings is None:
        raise jobs.JobError(f"{path}: hosts is missing")
    limits = Limits(
        job.settings.get("plan", {}), settings.processes, settings.sizes, job.options(TrainingOptions)
    )
    full = limits.allocate(settings.hosts)
    if full is None or full.processes != settings.processes:
        raise jobs.JobError(f"{path}: hosts and plan do not fit {settings.processes} processes")
    launcher = Launcher(path, settings, limits, report, passed(os.environ))

    def stop(number: int, frame: object) -> None:
        launcher.stopping = True

    signal.signal(signal.SIGTERM, stop)
    if status := launcher.run():
        sys.exit(status)


if __name__ == "__main__":
    process.serve(launch)
