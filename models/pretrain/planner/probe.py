"""Measures a model and this machine: pieces in one process, then short trainings, links and the sharing of cores in
several. The result is a profile.

What the formulas do not know, such as the time that DTensor takes to dispatch an operation, is the difference between
what a process computed in a short training and what was predicted of it; it becomes an overhead of that way of splitting.
On a CPU it is told from processor time, which does not pass while a process waits: for others of this machine, for
messages, for the stage before. Waiting is what the formulas do know. An overhead is never negative, and one that a
training's steps do not agree on is left out.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from edge_client import process
from models.job import Job
from models.pretrain import plan as plans
from models.pretrain import world
from models.pretrain.collectives import cost
from models.pretrain.parallelize import sizes_of
from models.pretrain.plan import ParallelPlan
from models.pretrain.planner import pieces, predict
from models.pretrain.planner.crew import Crew
from models.pretrain.planner.profile import FREE, Machine, Profile
from models.pretrain.training import Options

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
"""Short trainings, every one with a way of splitting that those before it lack."""

MOST_ROWS = 16
TURNS = 3
SPREAD = 0.5
"""Half the distance between quartiles of a training's steps, relative to their median, from which on they say nothing."""
FIXED_PARTS = ("compute", "optimizer", "other")
"""Parts of a prediction in which a process computes rather than waits."""

Steps = Sequence[Sequence[float]]
"""(seconds, seconds of processor time) of each step."""


def measure(job: Job, options: Options, per_host: int, crew: Crew | None, report: process.Report) -> Profile:
    """The profile of a job's model on this machine, with `per_host` processes on a host; `crew` are some of them.

    Raises:
        JobError: a measuring process failed; its last words are in the message.
    """
    spec, device = job.spec(), world.own_device(ParallelPlan())
    torch.set_num_threads(1)
    report(stage="plan", step=0, steps=4, what="pieces of the model")
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
    if crew is None or crew.count < 2:
        return profile
    report(stage="plan", step=1, steps=4, what="links, the sharing of cores and short trainings")
    profile = _with_machine(profile, crew.ask("machine"))
    fitting = [text for text in PROBES if _fits(text, profile, options, crew.count)]
    probes: dict[str, Steps] = {}
    for size in sorted({plans.parse(text).processes for text in fitting}):
        texts = [text for text in fitting if plans.parse(text).processes == size]
        probes |= crew.ask("steps", processes=size, plans=texts, turns=TURNS, race=False)
    return calibrated(profile, options.batch_size, probes, crew.ask("alone", processes=1)["alone"])


def calibrated(profile: Profile, batch_size: int, probes: Mapping[str, Steps], alone: Steps) -> Profile:
    """`profile` with overheads such that predictions agree with what processes computed in probes: plan -> steps.

    Probes ran on one host. `alone` are steps of one process without torch.distributed.
    """
    used = agreed(alone)
    if used is not None:
        expected = computing(predict.predict(ParallelPlan(), _on_one_host(profile, 1), batch_size))
        profile = replace(profile, step=max(0.0, used - expected))
    for text, steps in probes.items():
        plan, used = plans.parse(text), agreed(steps)
        new = {name: n for name, n in predict.uses(plan, profile).items() if name not in profile.overhead}
        if used is None or not new:
            continue
        here = _on_one_host(profile, plan.processes)
        extra = max(0.0, used - computing(predict.predict(plan, here, batch_size)))
        shares = {name: extra / len(new) / times for name, times in new.items()}
        profile = replace(profile, overhead={**profile.overhead, **shares})
    return profile


def agreed(steps: Steps) -> float | None:
    """Median processor time of steps, or None where they are too far apart to tell."""
    if len(steps) < 2:
        return None
    used = [step[1] for step in steps]
    low, middle, high = statistics.quantiles(used, n=4, method="inclusive")
    return None if (high - low) / 2 > SPREAD * middle else middle


def computing(prediction: predict.Prediction) -> float:
    """Seconds in which a process computes."""
    return sum(prediction.parts.get(part, 0.0) for part in FIXED_PARTS)


def _on_one_host(profile: Profile, processes: int) -> Profile:
    """With a core for each, as sharing one adds nothing to processor time."""
    machine = replace(profile.machine, per_host=processes, cores=processes, slowdown=((processes, 1.0),))
    return replace(profile, machine=machine)


def _fits(text: str, profile: Profile, options: Options, processes: int) -> bool:
    plan = plans.parse(text)
    try:
        plans.check(plan, profile.sizes, batch_size=options.batch_size)
    except plans.PlanError:
        return False
    return plan.processes <= processes


def _with_machine(profile: Profile, measured: dict[str, Any]) -> Profile:
    slowdown = tuple((int(count), max(1.0, factor)) for count, factor in measured["slowdown"])
    samples = [cost.Sample(size, seconds, messages) for size, seconds, messages in measured["link"]]
    link = cost.fit(samples) if len(samples) > 1 else FREE
    machine = replace(profile.machine, slowdown=slowdown, inside=link, between=link)
    return replace(profile, machine=machine)


def _memory_bytes(device: torch.device, per_host: int) -> float:
    """What a process may use: the GPU's, or its share of what the host has free."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / per_host
