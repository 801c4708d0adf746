"""`python -P -m models.pretrain.planner.ranks REQUEST.json`, one of the processes that `probe` starts.

All compute at once to see how they share cores; the first two then send each other messages and train a few steps by
every probed plan, in turns, so that a busy machine slows all of them alike. Process 0 writes `measured.json`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from edge_client import process
from models import job as jobs
from models.pretrain import optimizers, trainer, world
from models.pretrain import plan as plans
from models.pretrain.batches import Arrays
from models.pretrain.collectives import cost
from models.pretrain.objective import objective_of
from models.pretrain.parallelize import sizes_of
from models.pretrain.training import Options
from models.zoo import ModelSpec

TURNS = 3
STEPS = 2
SENT_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)


def main(path: Path) -> None:
    torch.set_num_threads(1)
    request = json.loads(path.read_text())
    job = jobs.read(Path(request["job"]))
    spec, options = job.spec(), job.options(Options)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    device = world.own_device(plans.ParallelPlan())

    with joined(store, "all", rank, count, device):
        slowdown = _slowdown(rank, count, spec, device)
    found: dict[str, Any] = {"slowdown": slowdown, "seconds": {}}
    if rank < 2:
        with joined(store, "pair", rank, 2, device):
            found["link"] = _link(device)
            fitting = [text for text in request["probes"] if _fits(text, spec, options)]
            seconds: dict[str, list[float]] = {text: [] for text in fitting}
            for turn in range(TURNS):
                for text in fitting:
                    seconds[text] += _train(text, spec, options, device)[turn == 0 :]
            found["seconds"] = {text: statistics.median(values) for text, values in seconds.items()}
            found["alone"] = _alone(spec, options, device)
    if rank == 0:
        (Path(request["out"]) / "measured.json").write_text(json.dumps(found))


def examples(spec: ModelSpec, rows: int) -> Arrays:
    """Made-up data of the right shape."""
    x, y = spec.example_batch(rows)
    return Arrays(x.numpy(), y.numpy().astype(np.int32))


@contextmanager
def joined(store: Store, name: str, rank: int, count: int, device: torch.device) -> Iterator[None]:
    """A group of processes for the length of a `with`, apart from earlier ones of the same store."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _slowdown(rank: int, count: int, spec: ModelSpec, device: torch.device) -> list[tuple[int, float]]:
    """(processes, how much longer each takes than one alone) for 1, 2, 4, … and all."""
    module = spec.build(0).to(device)
    x = spec.example_batch(4)[0].to(device)

    def work() -> None:
        for _ in range(4):
            y = module(x)
            y.backward(torch.ones_like(y))
        _settle(device)

    work()
    seconds: dict[int, list[float]] = {}
    numbers = sorted({*(2**power for power in range(10) if 2**power < count), count})
    for _ in range(TURNS):
        for number in numbers:
            dist.barrier()
            took = torch.zeros(1, device=device)
            if rank < number:
                began = time.perf_counter()
                work()
                took += (time.perf_counter() - began) / number
            dist.all_reduce(took)  # the mean of those that computed
            seconds.setdefault(number, []).append(float(took))
    alone = statistics.median(seconds[1])
    return [(number, statistics.median(seconds[number]) / alone) for number in numbers]


def _link(device: torch.device) -> list[tuple[float, float, float]]:
    """(bytes sent, seconds, messages) of all-reduces along the longest chain, by size."""
    samples = []
    for size in SENT_BYTES:
        x = torch.zeros(size // 4, device=device)
        chain = cost.all_reduce(2, size)
        seconds = [_timed(lambda x=x: dist.all_reduce(x), device) for _ in range(4 * TURNS)]  # type: ignore[misc]
        samples.append((chain.sent_bytes, statistics.median(seconds[TURNS:]), chain.messages))
    return samples


def _fits(text: str, spec: ModelSpec, options: Options) -> bool:
    try:
        plans.check(plans.parse(text), sizes_of(spec), batch_size=options.batch_size)
    except plans.PlanError:
        return False
    return True


def _train(text: str, spec: ModelSpec, options: Options, device: torch.device) -> list[float]:
    """Seconds of `STEPS` steps by a plan, of the slower of both processes."""
    here = world.arrange(plans.parse(text), device)
    training = trainer.build(spec, examples(spec, 2 * options.batch_size), options, here, 0)
    training.train_step()
    return [_timed(training.train_step, device) for _ in range(STEPS)]


def _alone(spec: ModelSpec, options: Options, device: torch.device) -> tuple[float, float]:
    """(seconds, seconds of processor time) of a step of process 0 that trains alone; on a GPU both are the same."""
    module = spec.build(0).to(device).train()
    x, y = spec.example_batch(options.batch_size)
    (stepper,) = optimizers.build([module], options)
    objective = objective_of(spec)
    found = []
    for _ in range(TURNS * STEPS + 1):
        dist.barrier()
        if dist.get_rank() == 0:
            began, used = time.perf_counter(), time.thread_time()
            stepper.zero_grad()
            loss = objective(module(x.to(device)), y.long().to(device)) / len(x)
            loss.backward()  # type: ignore[no-untyped-call]
            stepper.step()
            _settle(device)
            took = time.perf_counter() - began
            found.append((took, time.thread_time() - used if device.type == "cpu" else took))
    dist.barrier()
    return (
        (statistics.median(took for took, _ in found[1:]), statistics.median(used for _, used in found[1:]))
        if found
        else (0.0, 0.0)
    )


def _timed(work: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    _settle(device)
    took = torch.tensor([time.perf_counter() - began], device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    process.die_with_parent()
    main(Path(sys.argv[1]))
