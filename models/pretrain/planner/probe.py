"""Measures a model and this machine: pieces in one process, then short trainings, links and core sharing in several.

A model of which one row takes long is not trained: its overheads, which do not depend on its size, are those of a small
reference model, and show less in it anyway. No process then holds more of it than one piece.

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
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from models.job import JobFile
from models.pretrain import plan_rules, world
from models.pretrain.data import documents
from models.pretrain.parallelize import sizes_of
from models.pretrain.plan import ParallelPlan, parse
from models.pretrain.planner import collective_cost, layer_profile, predict
from models.pretrain.planner.bench_workers import BenchWorkers
from models.pretrain.planner.phases import Phases
from models.pretrain.planner.profile import FREE, Machine, Profile
from models.pretrain.planner.profile_cache import Cache
from models.pretrain.training import TrainingOptions
from models.zoo.spec import ModelSpec

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

REFERENCE: dict[str, Any] = {
    "name": "gpt",
    "options": {"width": 64, "layers": 4, "heads": 4},
    "input_shape": [32],
    "classes": 256,
    "input_dtype": "int32",
    "task": "next_token",
}
"""A model whose short trainings show the overheads of this machine where those of the job's model would take minutes. It
has the layers that the probes need."""
REFERENCE_ROWS = 8
SLOW_SECONDS = 0.01
"""A model of which a forward pass of one row takes longer is not trained."""
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
    phases: Phases,
    cache: Cache,
) -> Profile:
    """The profile of a job's model on this machine, with `per_host` processes on a host, some of them `workers`.

    Raises:
        JobError: a measuring process failed; the message has the last line of its log.
    """
    spec, device = documents.spec_of(job), world.select_device(ParallelPlan())
    torch.set_num_threads(1)
    with phases.phase("pieces", "pieces of the model"):
        profile = _alone(spec, options, device, per_host, cache)
    if workers is None or workers.count < 2:
        return profile
    with phases.phase("machine", "links and the sharing of cores"):
        found = workers.request("machine")
    slowdown = tuple((int(count), max(1.0, factor)) for count, factor in found["slowdown"])
    link = collective_cost.fit(found["link"]) if len(found["link"]) > 1 else FREE
    machine = replace(
        profile.machine,
        slowdown=slowdown,
        inside=link,
        between=link,
        process_bytes=found["process_bytes"],
    )
    profile = replace(profile, machine=machine)
    with phases.phase("short trainings", "short trainings"):
        if forward_seconds(profile) < SLOW_SECONDS:
            return _calibrated(profile, options.batch_size, workers, None)

        def measured() -> Overheads:
            small = JobFile(job.path, {"model": REFERENCE}).spec()
            alone = replace(_alone(small, options, device, per_host, cache), machine=machine)
            found = _calibrated(alone, REFERENCE_ROWS, workers, REFERENCE)
            return Overheads(found.step, found.overhead)

        overheads = cache.get(["overheads", workers.count, options.optimizer], Overheads, measured)
    return replace(profile, step=overheads.step, overhead=overheads.overhead)


def forward_seconds(profile: Profile) -> float:
    """Of one row, on one process."""
    pieces = (profile.first, *profile.layers, profile.last, profile.loss)
    return sum(piece.forward.at(1) for piece in pieces)


@dataclass(frozen=True)
class Overheads:
    """`step` and `overhead` of a profile."""

    step: float = 0.0
    overhead: dict[str, float] = field(default_factory=dict)


def _alone(
    spec: ModelSpec, options: TrainingOptions, device: torch.device, per_host: int, cache: Cache
) -> Profile:
    """What one process can measure."""
    return Profile(
        sizes_of(spec),
        *layer_profile.measure(spec, device, cache),
        optimizer=layer_profile.optimizer(options, device, cache),
        machine=Machine(
            device=device.type,
            cores=len(os.sched_getaffinity(0)) if device.type == "cpu" else torch.cuda.device_count(),
            per_host=per_host,
            memory_bytes=_memory_bytes(device, per_host),
            shared_memory=device.type == "cpu",
        ),
        about={"machine": platform.node() or platform.machine(), "torch": torch.__version__},
    )


def _calibrated(
    profile: Profile, batch_size: int, workers: BenchWorkers, model: Mapping[str, Any] | None
) -> Profile:
    """`profile` with the overheads that short trainings of its model show; None: of the workers' job."""
    small = [text for text in PROBES if parse(text).processes <= workers.count]
    fitting = [
        text for text in small if not plan_rules.problems(parse(text), profile.sizes, batch_size=batch_size)
    ]
    asked: dict[str, Any] = {"batch_size": batch_size, **({"model": model} if model else {})}
    probes = workers.steps(fitting, turns=TURNS, race=False, enough_seconds=ENOUGH_SECONDS, **asked)
    alone = workers.request("alone", processes=1, **asked)["alone"]
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
