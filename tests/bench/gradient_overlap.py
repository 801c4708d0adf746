"""Exposed communication of a step: what is left of the exchange of gradients when the last backward pass ends.

    python -m tests.bench --only gradient_overlap

With the overlap and without it (all buckets after the pass), a step of each in turn by the same processes, for plans with tp
and with pp:

    loopback          a transformer, four processes on this machine's cores: processors move the bytes, so a core must be idle
    network           the same, the ranks of dp in two network namespaces, joined by a cable of `RATE` bits a second
    network, asleep   layers that sleep as long as they would compute, which needs no core; beside what the planner predicts

Without the command ip, or where no namespace can be made, the last two are left out and the bench says so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from edge_client.processes import process
from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.parallel.data.gradient_sums import GradientSums
from models.pretrain.parallelize import sizes_of
from models.pretrain.planner import predict
from models.pretrain.planner.bench_rank import examples
from models.pretrain.planner.collective_cost import Link
from models.pretrain.planner.profile import Cost, Machine, Optimizer, Piece, Profile
from models.pretrain.training import TrainingOptions
from models.zoo import ModelSpec, gpt
from models.zoo.layout import Layout
from tests.support import ranks
from tests.support.namespaces import TwoHosts, two_hosts

PLANS = ("dp=2,tp=2", "dp=2,pp=2,schedule=1f1b,microbatches=2")
BATCH, TURNS = 16, 9
RATE = 10**9
"""Bits a second, each way."""
LAYERS, WIDTH, SECONDS = 6, 512, 0.03
"""Of the sleeping model: a layer has a million params and sleeps so long in a forward pass, twice as long in a backward pass."""


def run() -> dict[str, Any]:
    """By edition and plan: median seconds of exposed communication and of a step, with and without overlap."""
    found = {
        "loopback": {text: _figures(ranks.run(4, f"{__name__}:timed", text, "gpt")[0]) for text in PLANS}
    }
    _print("loopback", found["loopback"])
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
            limit(hosts)
        except (pytest.skip.Exception, RuntimeError) as error:
            print(f"gradient overlap: no network of two hosts: {error}")
            return found
        for edition, model in (("network", "gpt"), ("network, asleep", "asleep")):
            found[edition] = {text: _figures(across(hosts, text, model)) for text in PLANS}
            if model == "asleep":
                for text in PLANS:
                    found[edition][text]["predicted"] = predicted(text)
            _print(edition, found[edition])
    return found


Times = dict[str, list[tuple[float, float]]]
"""(exposed seconds, seconds) of every step, `with` and `without` overlap."""


def _figures(times: Times) -> dict[str, float]:
    figures = {}
    for way, steps in times.items():
        exposed, seconds = zip(*steps, strict=True)
        figures |= {f"exposed {way}": statistics.median(exposed), f"step {way}": statistics.median(seconds)}
    ratios = [a / b for (a, _), (b, _) in zip(times["with"], times["without"], strict=True)]
    return {**figures, "ratio": statistics.median(ratios)}


def _print(edition: str, found: dict[str, dict[str, float]]) -> None:
    for text, each in found.items():
        beside = f"; predicted {1e3 * each['predicted']:.0f} ms" if "predicted" in each else ""
        print(
            f"gradient overlap, {edition}, {text}: exposed {1e3 * each['exposed with']:.0f} ms with, "
            f"{1e3 * each['exposed without']:.0f} ms without (ratio {each['ratio']:.2f}); steps {1e3 * each['step with']:.0f} "
            f"and {1e3 * each['step without']:.0f} ms{beside}"
        )


def timed(text: str, model: str) -> Times:
    """Times of the slowest process, steps with and without overlap in turns. Runs in the ranks."""
    torch.set_num_threads(1)
    spec = asleep() if model == "asleep" else gpt.spec((64,), 256, width=256, layers=8, heads=4)
    options = TrainingOptions(steps=1000, batch_size=BATCH)
    with world.join(plans.parse(text)) as here:
        ways = {}
        for way, overlap in (("with", True), ("without", False)):
            with patch.object(trainer, "GradientSums", partial(GradientSums, overlap=overlap)):
                ways[way] = trainer.build(spec, examples(spec, 2 * BATCH), options, here, 0)
        times: Times = {way: [] for way in ways}
        for turn in range(TURNS + 1):
            for way, training in ways.items():
                step = _step(training)
                if turn:
                    times[way].append(step)
    return times


def _step(training: trainer.Trainer) -> tuple[float, float]:
    """(exposed seconds, seconds without the optimizer's) of one step: from when the last process has ended its passes to when
    the last has its sums. Processes of one machine share a clock."""
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    batch = training.batches[training.step]
    dist.barrier()
    began = time.monotonic()
    training.run(batch)
    passed = time.monotonic()
    training.sums.finish()
    summed = time.monotonic()
    for optimizer in training.optimizers:
        optimizer.step()
    training.step += 1
    moments = torch.tensor([-began, passed, summed], dtype=torch.float64)
    dist.all_reduce(moments, dist.ReduceOp.MAX)
    first, passed, summed = moments.tolist()
    return summed - passed, summed + first


def across(hosts: TwoHosts, text: str, model: str) -> Times:
    """`timed` in processes of two hosts, those with the same params in different ones."""
    plan = plans.parse(text)
    commands = []
    for rank in range(plan.processes):
        host = hosts.names[rank // plan.tp % plan.dp]
        places = {"RANK": rank, "WORLD_SIZE": plan.processes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        meeting = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "cable"}
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # addresses without names
        variables = {name: str(value) for name, value in {**places, **meeting, **quiet}.items()}
        command = ["ip", "netns", "exec", host, sys.executable, "-m", __name__, text, model]
        commands.append(
            subprocess.Popen(
                command, env={**os.environ, **process.ONE_THREAD, **variables}, stdout=subprocess.PIPE
            )
        )
    outputs = [command.communicate()[0] for command in commands]
    if any(command.returncode for command in commands):
        raise AssertionError(f"{text}: ranks ended with {[command.returncode for command in commands]}")
    times: Times = json.loads(outputs[0])
    return times


def limit(hosts: TwoHosts) -> None:
    """The cable carries `RATE` bits a second each way."""
    for name in hosts.names:
        shaping = ["tbf", "rate", f"{RATE}bit", "burst", "256kb", "latency", "100ms"]
        command = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "cable", "root", *shaping]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * SECONDS)
        return gradient


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slept: torch.Tensor = _Sleep.apply(x)
        return x + self.down(self.up(slept).relu())


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)
        self.layers = nn.ModuleList(_Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        output: torch.Tensor = self.head(x)
        return output


def asleep() -> ModelSpec:
    """A model whose layers sleep, however many rows or tp ranks there are."""
    layout = Layout(
        order=("begin", "layers.*", "head"),
        columns=("layers.*.up",),
        rows=("layers.*.down",),
        hidden=2 * WIDTH,
    )
    return ModelSpec("asleep", _Chain, (WIDTH,), 16, layout=layout)


def predicted(text: str) -> float:
    """What the planner predicts to be exposed of the sleeping model's exchange over the cable, where all cores are idle."""
    plan = plans.parse(text)
    layer = Piece(
        "layer",
        split_values=4 * WIDTH**2,
        forward=Cost(fixed=SECONDS),
        backward={"none": Cost(fixed=2 * SECONDS)},
    )
    profile = Profile(
        sizes_of(asleep()),
        Piece("first", values=WIDTH * (WIDTH + 1), backward={"none": Cost()}),
        tuple(replace(layer, name=f"layer {number}") for number in range(LAYERS)),
        Piece("last", values=16 * (WIDTH + 1), backward={"none": Cost()}),
        Piece("loss", backward={"none": Cost()}),
        Optimizer(),
        # groups of dp share the cable, those of stages one after the other
        Machine(cores=2, per_host=1, between=Link(0.0, plan.tp * 8 / RATE)),
    )
    return predict.predict(plan, profile, BATCH).parts["dp"]


def main() -> None:
    process.die_with_parent()
    times = timed(sys.argv[1], sys.argv[2])
    if os.environ["RANK"] == "0":
        json.dump(times, sys.stdout)


if __name__ == "__main__":
    main()
