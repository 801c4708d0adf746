"""Measures a model and this machine: pieces in one process, then short trainings, links and core sharing in several.

Costs outside the formulas, such as DTensor's dispatch time, are the difference between the computing time of a short
training and its prediction; the difference becomes an overhead of that way of splitting. On a CPU it is measured in
processor time, which does not pass while a process waits: for other processes of the machine, for messages, for the
previous stage. The formulas do cover waiting. An overhead is never negative, and is left out if a training's steps
disagree on it.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from edge_client.processes import process
from models.job import JobFile
from models.pretrain import plan_rules, world
from models.pretrain.data import documents
from models.pretrain.parallelize import sizes_of
from models.pretrain.plan import ParallelPlan, parse
from models.pretrain.planner import collective_cost, layer_profile, predict
from models.pretrain.planner.bench_workers import BenchWorkers
from models.pretrain.planner.profile import FREE, Machine, Profile
from models.pretrain.training import TrainingOptions

PROBES = (
    "dp=2",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "tp=2,loss_parallel=true",
    "cp=2",
    "pp=2,microbatches=4",
    "pp=2,schedule=interleaved,microbatches=4",
    "pp=2,schedule=zero-bubble,microbatches=4",
    "dp=2,pp=2,microbatches=2",
)
"""Short trainings, each with one way of splitting that the previous ones lack."""

MAX_ROWS, FEW_ROWS = 16, 4
"""Rows of the measured batches; few where one row is slow."""
TURNS = 3
ENOUGH_SECONDS = 10.0
"""No further turn of short trainings starts after this time."""
SPREAD = 0.5
"""Half the interquartile range of a training's steps relative to their median, above which they are discarded."""
FIXED_PARTS = ("compute", "optimizer", "other")
"""Parts of a prediction in which a process computes rather than waits."""

Steps = Sequence[Sequence[float]]
"""(seconds, processor seconds) of each step."""


def measure(
    job: JobFile,
    options: TrainingOptions,
    per_host: int,
    workers: BenchWorkers | None,
    report: process.Report,
) -> Profile:
    """The profile of a job's model on this machine, with `per_host` processes on a host, some of them `workers`.

    Raises:
        JobError: a measuring process failed; the message has the last line of its log.
    """
    spec, device = documents.spec_of(job), world.select_device(ParallelPlan())
    torch.set_num_threads(1)
    report(stage="plan", step=0, steps=4, what="pieces of the model")
    few = layer_profile.slow(spec, device)
    rows = max(2, min(options.batch_size, FEW_ROWS if few else MAX_ROWS))
    profile = Profile(
        sizes_of(spec),
        *layer_profile.measure(spec, rows, device),
        optimizer=layer_profile.optimizer(spec, options, device),
        machine=Machine(
            device=device.type,
            cores=len(os.sched_getaffinity(0)) if device.type == "cpu" else torch.cuda.device_count(),
            per_host=per_host,
            memory_bytes=_memory_bytes(device, per_host),
        ),
        about={"machine": platform.node() or platform.machine(), "torch": torch.__version__},
    )
    if workers is None or workers.count < 2:
        return profile
    report(stage="plan", step=1, steps=4, what="links, the sharing of cores and short trainings")
    found = workers.request("machine")
    slowdown = tuple((int(count), max(1.0, factor)) for count, factor in found["slowdown"])
    link = collective_cost.fit(found["link"]) if len(found["link"]) > 1 else FREE
    machine = replace(profile.machine, slowdown=slowdown, inside=link, between=link)
    profile = replace(profile, machine=machine)
    # overheads do not depend on rows: for a large model they show better, and sooner, in a small batch
    batch_size = min(options.batch_size, FEW_ROWS) if few else options.batch_size
    small = [text for text in PROBES if parse(text).processes <= workers.count]
    sizes = profile.sizes
    fitting = [text for text in small if not plan_rules.problems(parse(text), sizes, batch_size=batch_size)]
    probes = workers.steps(
        fitting, turns=TURNS, race=False, batch_size=batch_size, enough_seconds=ENOUGH_SECONDS
    )
    alone = workers.request("alone", processes=1, batch_size=batch_size)["alone"]
    return calibrate(profile, batch_size, probes, alone)


def calibrate(profile: Profile, batch_size: int, probes: Mapping[str, Steps], alone: Steps) -> Profile:
    """`profile` with overheads that make predictions match the computing times of `probes`: plan -> steps.

    Probes ran on one host. `alone` are steps of one process without torch.distributed.
    """
    used = consistent_median(alone)
    if used is not None:
        expected = computing_seconds(predict.predict(ParallelPlan(), _on_one_host(profile, 1), batch_size))
        profile = replace(profile, step=max(0.0, used - expected))
    for text, steps in probes.items():
        plan, used = parse(text), consistent_median(steps)
        new = {name: n for name, n in predict.uses(plan, profile).items() if name not in profile.overhead}
        if used is None or not new:
            continue
        here = _on_one_host(profile, plan.processes)
        extra = max(0.0, used - computing_seconds(predict.predict(plan, here, batch_size)))
        shares = {name: extra / len(new) / times for name, times in new.items()}
        profile = replace(profile, overhead={**profile.overhead, **shares})
    return profile


def consistent_median(steps: Steps) -> float | None:
    """Median processor time of steps, or None where they vary too much."""
    if len(steps) < 2:
        return None
    used = [step[1] for step in steps]
    low, middle, high = statistics.quantiles(used, n=4, method="inclusive")
    return None if (high - low) / 2 > SPREAD * middle else middle


def computing_seconds(prediction: predict.Prediction) -> float:
    """Seconds in which a process computes."""
    return sum(prediction.parts.get(part, 0.0) for part in FIXED_PARTS)


def _on_one_host(profile: Profile, processes: int) -> Profile:
    """`profile` with a core for each process, since sharing one adds nothing to processor time."""
    machine = replace(profile.machine, per_host=processes, cores=processes, slowdown=((processes, 1.0),))
    return replace(profile, machine=machine)


def _memory_bytes(device: torch.device, per_host: int) -> float:
    """Memory available to a process: the GPU's, or its share of the host's free memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / per_host
