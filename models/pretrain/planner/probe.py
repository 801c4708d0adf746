"""Measures a model and this machine: pieces in one process, then short trainings, links and the sharing of cores in
several. The result is a profile.

What the formulas do not know, such as the time that DTensor takes to dispatch an operation, is the difference between a
short training that was measured and what was predicted of it; it becomes an overhead of that way of splitting.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from edge_client import process
from models.job import Job, JobError
from models.pretrain import plan as plans
from models.pretrain import world
from models.pretrain.collectives import cost
from models.pretrain.parallelize import sizes_of
from models.pretrain.planner import pieces, predict
from models.pretrain.planner.profile import FREE, Machine, Profile
from models.pretrain.training import Options

PROBES = (
    "dp=2",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "cp=2",
    "pp=2,microbatches=4",
    "pp=2,schedule=interleaved,microbatches=4",
    "pp=2,schedule=zbv,microbatches=4",
)
"""Short trainings, every one with one way of splitting."""

MOST_ROWS = 16
MOST_PROBED = 16
"""Processes that are started to see how they share cores."""


def measure(job: Job, options: Options, per_host: int, report: process.Report) -> Profile:
    """The profile of a job's model on this machine, with `per_host` processes on a host.

    Raises:
        JobError: a probing process failed; its last words are in the message.
    """
    spec, device = job.spec(), world.own_device(plans.ParallelPlan())
    torch.set_num_threads(1)
    report(stage="plan", step=0, steps=3, what="pieces of the model")
    rows = max(2, min(options.batch_size, MOST_ROWS))
    found = pieces.measure(spec, rows, device)
    profile = Profile(
        sizes=sizes_of(spec),
        first=found.first,
        layers=found.layers,
        last=found.last,
        loss=found.loss,
        optimizer=pieces.optimizer(spec, options, device),
        machine=Machine(
            device=device.type,
            cores=len(os.sched_getaffinity(0)) if device.type == "cpu" else torch.cuda.device_count(),
            per_host=per_host,
            memory_bytes=_memory_bytes(device, per_host),
        ),
        about={"machine": platform.node() or platform.machine(), "torch": torch.__version__},
    )
    report(stage="plan", step=1, steps=3, what="links and the sharing of cores")
    measured = _measured(job, options, per_host)
    report(stage="plan", step=2, steps=3, what="plans")
    profile = _with_machine(profile, measured)
    return calibrated(profile, options.batch_size, measured["seconds"], measured["alone"])


def calibrated(
    profile: Profile, batch_size: int, seconds: dict[str, float], alone: tuple[float, float]
) -> Profile:
    """`profile` with overheads such that predictions agree with what probes took: plan -> seconds.

    Probes ran two processes on one host. `alone` is what one took, on the clock and of its processor; how these
    differ is how busy the machine was with something else, and probes would have been the faster by as much.
    """
    took, used = alone
    busy = max(1.0, took / used) if used else 1.0
    pair = replace(profile, machine=replace(profile.machine, per_host=2))
    pair = replace(
        pair, step=max(0.0, used - predict.predict(plans.ParallelPlan(), pair, batch_size).seconds)
    )
    for text, slowed in seconds.items():
        measured = slowed / busy
        plan = plans.parse(text)
        for name, times in predict.uses(plan, pair).items():
            slow = pair.machine.slower(2)
            expected = predict.predict(plan, pair, batch_size).seconds
            if name not in pair.overhead:
                extra = max(0.0, (measured - expected) / times / slow)
                pair = replace(pair, overhead={**pair.overhead, name: extra})
    return replace(pair, machine=profile.machine)


def _with_machine(profile: Profile, measured: dict[str, Any]) -> Profile:
    slowdown = tuple((int(count), max(1.0, factor)) for count, factor in measured["slowdown"])
    samples = [cost.Sample(size, seconds, messages) for size, seconds, messages in measured["link"]]
    link = cost.fit(samples) if len(samples) > 1 else FREE
    machine = replace(profile.machine, slowdown=slowdown, inside=link, between=link)
    return replace(profile, machine=machine)


def _measured(job: Job, options: Options, per_host: int) -> dict[str, Any]:
    """What `models.pretrain.planner.ranks` measured in as many processes as a host has, two at least."""
    count = max(2, min(per_host, MOST_PROBED))
    if torch.cuda.is_available():
        count = min(count, torch.cuda.device_count())
    if count < 2:
        return {"slowdown": [(1, 1.0)], "link": [], "seconds": {}, "alone": (0.0, 0.0)}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **process.worker_environment(),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        request = Path(folder) / "request.json"
        request.write_text(json.dumps({"job": str(job.path), "probes": PROBES, "out": folder}))
        log = stack.enter_context((Path(folder) / "log.txt").open("w+"))
        ranks = []
        for rank in range(count):
            started = subprocess.Popen(
                [sys.executable, "-P", "-m", "models.pretrain.planner.ranks", str(request)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            stack.callback(started.wait)
            stack.callback(started.kill)
            ranks.append(started)
        for started in ranks:
            if started.wait():
                log.seek(0)
                last = [line for line in log.read().splitlines() if line.strip()][-1:] or ["it said nothing"]
                raise JobError(f"{job.path}: a probing process failed: {last[0].strip()}")
        found: dict[str, Any] = json.loads((Path(folder) / "measured.json").read_text())
    return found


def _memory_bytes(device: torch.device, per_host: int) -> float:
    """What a process may use: the GPU's, or its share of what the host has free."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / per_host
