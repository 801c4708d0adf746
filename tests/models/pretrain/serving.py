"""Trainings by a parameter server, some with a slow worker or a server that dies. Runs in the ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.processes import process
from models.pretrain.objective import objective_of
from models.pretrain.parameter_server import replica
from models.pretrain.parameter_server.client import Client
from models.pretrain.parameter_server.role import Training, contribute
from models.pretrain.parameter_server.settings import Servers
from models.pretrain.parameter_server.shard import mean, split
from tests.models.pretrain import curves

SEED = 5

Values = list[npt.NDArray[Any]]


def training(servers: Servers, steps: int = curves.STEPS) -> Training:
    return Training(curves.small_gpt(), curves.tokens(), curves.settings(steps=steps), servers, SEED)


def part(store: str, steps: int = curves.STEPS, kind: type[Client] = Client, **table: Any) -> dict[str, Any]:
    """One process's: of a worker the servers' records and its params, of a server its record and params."""
    servers, rank, where = Servers(**table), int(os.environ["RANK"]), f"file://{store}"
    if rank >= servers.workers:
        record = training(servers, steps).serve(rank, where)
        return {"record": record, "values": [value.numpy() for value in replica._own[0].shard.values()]}
    module, records, failovers = training(servers, steps).work(rank, where, kind=kind)
    values = [p.detach().numpy() for parameters in split(module, servers.servers) for p in parameters]
    return {"records": records, "values": values, "failovers": failovers}


def part_with_last_worker_asleep(
    store: str, until_updates: int, steps: int = curves.STEPS, **table: Any
) -> dict[str, Any]:
    """As `part`, but the last worker does not push before the others have made `until_updates` updates."""

    class Asleep(Client):
        def push(self, clock: int, loss: float) -> int:
            while self.records()[0]["updates"] < until_updates:
                time.sleep(0.005)
            return super().push(clock, loss)

    last = int(os.environ["RANK"]) == Servers(**table).workers - 1
    return part(store, steps, Asleep if last else Client, **table)


def part_with_dying_primary(store: str, at_update: int, when: str, **table: Any) -> dict[str, Any]:
    """As `part`, but the first replica of shard 0 is killed `before` or `after` its backup has an update.

    With `unreplicated` it is killed after, and has never told its backup anything.
    """
    if int(os.environ["RANK"]) != Servers(**table).workers:
        return part(store, **table)
    child = os.fork()
    if not child:
        process.die_with_parent()
        hand_on = replica.Replica._forward

        def die(self: replica.Replica, update: replica.Update) -> bool:
            if update.version == at_update and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            fine = when == "unreplicated" or hand_on(self, update)
            if update.version == at_update:
                os.kill(os.getpid(), signal.SIGKILL)
            return fine

        replica.Replica._forward = die  # type: ignore[method-assign]
        part(store, **table)
        os._exit(0)
    return {"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


def without_server(workers: int, heard: int) -> tuple[list[float], Values]:
    """What the first `heard` of `workers` train together, in one process: losses and params."""
    servers = Servers(workers=workers, mode="k-of-n", keep=heard)
    of = training(servers)
    here = of.replica(workers)
    losses = []
    for step in range(of.steps):
        found, gradients = [], []
        for worker in range(heard):
            module = of.spec.build(SEED).train()
            for mine, kept in zip(module.parameters(), here.shard.values(), strict=True):
                mine.data = kept
            batch = of.batches(worker)[step]
            found.append(contribute(module, batch, objective_of(of.spec), workers))
            gradients.append([p.grad for p in module.parameters() if p.grad is not None])
        here.shard.apply(mean(gradients))
        losses.append(float(np.mean(found)))
    return losses, [value.numpy() for value in here.shard.values()]
