"""`python -P -m models.pretrain.planner.bench_rank JOB.json`: one of the planner's bench workers.

    machine  how processes that compute at once share the cores, the cost of messages between two of them, and the memory
             that a process has before it trains
    alone    seconds of a step of process 0 by itself
    steps    seconds of steps of several plans, in turns, with the real trainer

`alone` and `steps` are of the job's model, or of the `model` of the request.

Requests come on standard input, one a line; process 0 answers on standard output.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from edge_client.processes import process
from models import job as jobs
from models.pretrain import optimizers, trainer, world
from models.pretrain.data import documents
from models.pretrain.data.batches import Arrays
from models.pretrain.objective import as_targets, objective_of
from models.pretrain.plan import ParallelPlan, parse
from models.pretrain.planner import collective_cost, pieces
from models.pretrain.training import TrainingOptions
from models.pretrain.world import World
from models.zoo.spec import ModelSpec

TURNS = 3
STEPS = 2
SENT_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
SLOW_SECONDS = 0.1
"""A pass of four rows, or a step, that takes longer is measured fewer times."""
HOPELESS = 1.5
"""A plan whose fastest step takes this many times the best plan's median is not measured again."""


def main(path: Path) -> None:
    answers = process.own_stdout()
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, options = documents.spec_of(job), job.options(TrainingOptions)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    device = world.select_device(ParallelPlan())
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        size = request.get("processes", count)
        requested = replace(options, batch_size=request.get("batch_size", options.batch_size))
        answer: Mapping[str, object] = {}
        if rank < size:
            with process_group(store, str(number), rank, size, device):
                if request["what"] == "machine":
                    answer = {
                        "slowdown": _slowdown(rank, count, spec, device),
                        "link": _link(device),
                        "process_bytes": resident_bytes() if device.type == "cpu" else 0,
                    }
                elif request["what"] == "alone":
                    answer = {"alone": _alone(_model(request, job), requested, device)}
                else:
                    answer = measure_plans(
                        request["plans"],
                        _model(request, job),
                        requested,
                        Worlds(device),
                        request["turns"],
                        request["race"],
                        request["enough_seconds"],
                    )
        if rank == 0:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _model(request: Mapping[str, Any], job: jobs.JobFile) -> ModelSpec:
    return (
        jobs.JobFile(job.path, {"model": request["model"]}).spec()
        if "model" in request
        else documents.spec_of(job)
    )


def resident_bytes() -> int:
    """Memory of this process, shared libraries included; 0 where the system does not tell."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        pages = Path("/proc/self/statm").read_text("utf-8").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def examples(spec: ModelSpec, rows: int) -> Arrays:
    """Synthetic data of the right shape."""
    x, y = spec.example_batch(rows)
    return Arrays(x.numpy(), y.numpy().astype(np.int32))


@contextmanager
def process_group(store: Store, name: str, rank: int, count: int, device: torch.device) -> Iterator[None]:
    """A process group for the length of a `with`, separate from earlier ones on the same store."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_plans(
    texts: Sequence[str],
    spec: ModelSpec,
    options: TrainingOptions,
    worlds: Worlds,
    turns: int = TURNS,
    race: bool = False,
    enough_seconds: float = math.inf,
) -> dict[str, list[tuple[float, float]]]:
    """(seconds, processor seconds) of every step of each plan, on the slowest process; plans take turns. A collective.

    `race`: a plan that is hopeless after a turn is not measured in the next. No turn starts after `enough_seconds` of
    steps.
    """
    data = examples(spec, 2 * options.batch_size)
    seconds: dict[str, list[tuple[float, float]]] = {text: [] for text in texts}
    running = list(texts)
    for _ in range(turns):
        for text in running:
            training = trainer.build(spec, data, options, worlds.of(parse(text)), 0)
            training.train_step()
            seconds[text] += [_timed(training.train_step, worlds.device) for _ in range(STEPS)]
            del training
        if race:
            best = min(statistics.median(took for took, _ in seconds[text]) for text in running)
            running = [text for text in running if min(seconds[text])[0] <= HOPELESS * best]
        # all processes have the same figures, so either all stop here or none
        if sum(took for steps in seconds.values() for took, _ in steps) > enough_seconds:
            break
    return seconds


class Worlds:
    """Worlds of plans; plans with the same extents share a mesh, since its groups cost sockets."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[tuple[Any, ...], World] = {}

    def of(self, plan: ParallelPlan) -> World:
        extents = plan.pp, plan.replicate, plan.shard, plan.cp, plan.tp, plan.devices
        if extents not in self._known:
            self._known[extents] = world.build(plan, self.device)
        return replace(self._known[extents], plan=plan)


def _slowdown(rank: int, count: int, spec: ModelSpec, device: torch.device) -> list[tuple[int, float]]:
    """(processes, slowdown of each against one alone) for 1, 2, 4, … and all."""
    module, x = pieces.busiest(spec, device)

    def work(times: int) -> None:
        for _ in range(times):
            y = module(x)
            y.backward(torch.ones_like(y))
            module.zero_grad()
        torch.get_device_module(device).synchronize()

    work(1)
    once = _timed(lambda: work(1), device)[0]  # the same on all
    times, turns = (4, 2 * TURNS) if once < SLOW_SECONDS else (1, 2)
    seconds: dict[int, list[float]] = {}
    numbers = sorted({*(2**power for power in range(10) if 2**power < count), count})
    for _ in range(turns):
        for number in numbers:
            dist.barrier()
            took = torch.zeros(1, device=device)
            if rank < number:
                began = time.perf_counter()
                work(times)
                took += (time.perf_counter() - began) / number
            dist.all_reduce(took)  # the mean over those that computed
            seconds.setdefault(number, []).append(float(took))
    alone = statistics.median(seconds[1])
    return [(number, statistics.median(seconds[number]) / alone) for number in numbers]


def _link(device: torch.device) -> list[tuple[float, float, float]]:
    """(bytes sent, seconds, messages) of all-reduces between two processes along the longest chain, by size."""
    pair = dist.new_group([0, 1])
    samples = []
    for size in SENT_BYTES:
        x = torch.zeros(size // 4, device=device)
        chain = collective_cost.all_reduce(2, size)
        if dist.get_rank() < 2:
            seconds = []
            for _ in range(4 * TURNS):
                dist.barrier(pair)
                began = time.perf_counter()
                dist.all_reduce(x, group=pair)
                torch.get_device_module(device).synchronize()
                seconds.append(time.perf_counter() - began)
            samples.append((chain.sent_bytes, statistics.median(seconds[TURNS:]), chain.messages))
    dist.barrier()
    return samples


def _alone(spec: ModelSpec, options: TrainingOptions, device: torch.device) -> list[tuple[float, float]]:
    """(seconds, processor seconds) of steps of process 0, without torch.distributed."""
    module = spec.build(0).to(device).train()
    x, y = spec.example_batch(options.batch_size)
    stepper = optimizers.over(list(module.parameters()), options)
    objective = objective_of(spec)

    def step() -> None:
        stepper.zero_grad()
        loss = objective(module(x.to(device)), as_targets(y).to(device)) / len(x)
        loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()

    times = TURNS * STEPS if _timed(step, device)[0] < SLOW_SECONDS else STEPS + 1
    return [_timed(step, device) for _ in range(times)]


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """(seconds, seconds this thread computed) on the slowest process; equal on a GPU."""
    dist.barrier()
    began, used = time.perf_counter(), time.thread_time()
    work()
    torch.get_device_module(device).synchronize()
    took = time.perf_counter() - began
    both = torch.tensor([took, time.thread_time() - used if device.type == "cpu" else took], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    seconds, computed = both.tolist()
    return seconds, computed


if __name__ == "__main__":
    process.die_with_parent()
    main(Path(sys.argv[1]))
