"""One process of a parameter server: `python -P -m models.pretrain.parameter_server.role JOB.json`, a worker or a server by rank.

The environment variable RANK is its rank; FEDLOOP_RENDEZVOUS is an init method of torch.distributed (`file://…`),
alternatively MASTER_ADDR and MASTER_PORT. The package's `__main__` sets them on one machine; on several, start this on
each.

Worker 0 reports progress, with the loss of its own share, and writes `curve.jsonl`, `model.safetensors` and `result.json`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn

from edge_client.processes import process
from models import job as jobs
from models.pretrain import evaluation, initial, optimizers, params
from models.pretrain.data import documents, sources
from models.pretrain.data.batches import Batch, Batches, Share, Source
from models.pretrain.objective import Objective, objective_of, router_losses
from models.pretrain.parameter_server import check, replica, rules
from models.pretrain.parameter_server.client import Client
from models.pretrain.parameter_server.replica import Replica
from models.pretrain.parameter_server.settings import Servers
from models.pretrain.parameter_server.shard import Shard, split
from models.pretrain.recovery.curve import NAME as CURVE
from models.pretrain.recovery.curve import REPORTS, Curve
from models.pretrain.training import TrainingOptions
from models.zoo.spec import ModelSpec

RENDEZVOUS = "FEDLOOP_RENDEZVOUS"
"""Environment variable."""


def run(path: Path, report: process.Report) -> None:
    """Runs one process of the job."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    job = jobs.read(path)
    servers, options = check.from_job(job), job.options(TrainingOptions)
    spec = documents.spec_of(job)
    data = sources.from_job(job, spec, options.shift)
    spec = initial.with_init(job, spec)
    training = Training(spec, data.train, options, servers, job.seed)
    rank = int(os.environ["RANK"])
    where = os.environ.get(RENDEZVOUS, "env://")

    if rank >= servers.workers:
        report(stage="serve", process=servers.name(rank), pid=os.getpid())
        training.serve(rank, where)
        return

    per_epoch = training.batches(0).steps_per_epoch

    def on_step(step: int, loss: float) -> None:
        if rank == 0 and (step % max(1, training.steps // REPORTS) == 0 or step == training.steps):
            report(
                stage="pretrain",
                step=step,
                steps=training.steps,
                epoch=-(-step // per_epoch),
                epochs=-(-training.steps // per_epoch),
                loss=loss,
                lr=options.rate(step - 1, training.steps),
            )

    module, records, failovers = training.work(rank, where, on_step)
    if rank == 0:
        losses: list[float] = records[0]["losses"]
        curve = Curve(job.out / CURVE)
        curve.cut(0)
        rates = [options.rate(step, training.steps) for step in range(len(losses))]
        curve.add(1, losses, rates, server=str(servers))
        saved = params.save(module, job.out / "model.safetensors")
        result = {
            **saved,
            **data.about,
            "world_size": servers.processes,
            "device": "cpu",
            "backend": "tensorpipe",
            "plan": "",
            "server": str(servers),
            "failovers": failovers,
            "seconds": time.perf_counter() - started,
            "losses": losses,
            "shards": [
                {key: value for key, value in record.items() if key != "losses"} for record in records
            ],
            **evaluation.evaluate(module, spec, data.test, torch.device("cpu")).document(),
        }
        jobs.write_result(job.out, result)


class Training:
    """The settings all processes of a job share. Every process builds the model from the seed; nobody sends it."""

    def __init__(
        self, spec: ModelSpec, source: Source, options: TrainingOptions, servers: Servers, seed: int
    ) -> None:
        self.spec, self.source, self.options, self.servers, self.seed = spec, source, options, servers, seed
        self.steps = options.steps_of(self.batches(0).steps_per_epoch)

    def batches(self, worker: int) -> Batches:
        share = Share(rows=(1,) * self.servers.workers, place=worker)
        return Batches(self.source, self.options.batch_size, self.seed, share, self.options.shift)

    def work(
        self,
        worker: int,
        where: str,
        on_step: Callable[[int, float], None] = lambda *_: None,
        kind: type[Client] = Client,
    ) -> tuple[nn.Module, list[dict[str, Any]], int]:
        """Runs a worker to the last clock; returns the trained module, the servers' records, and number of failovers."""
        module = self.spec.build(self.seed).train()
        torch.manual_seed(self.seed + worker)  # dropout differs between workers, as rows do
        client = kind(worker, self.servers, split(module, self.servers.servers))
        with rpc_session(self.servers, worker, where):
            batches, objective, clock = self.batches(worker), objective_of(self.spec), 0
            while clock < self.steps:
                loss = contribute(module, batches[clock], objective, self.servers.workers)
                clock = client.push(clock, loss)
                on_step(clock, loss)
            client.final()
            records = client.records()
            client.leave()
        return module, records, client.failovers

    def serve(self, rank: int, where: str) -> dict[str, Any]:
        """Runs a server until all workers have left; returns its record."""
        own = self.replica(rank)
        replica.register(own)
        with rpc_session(self.servers, rank, where):
            own.all_left.wait()
        return own.record()

    def replica(self, rank: int) -> Replica:
        servers = self.servers
        shard, number = servers.place(rank)
        module = self.spec.build(self.seed)
        mine = split(module, servers.servers)[shard]
        undecayed = optimizers.without_decay(module, self.options)
        together = servers.mode in ("sync", "k-of-n")
        return Replica(
            Shard(mine, self.options, self.steps, 1 if together else servers.workers, undecayed),
            rules.from_settings(servers),
            servers.workers,
            servers.replicas_of(shard)[number + 1 :],
            leads=number == 0,
            timeout=servers.timeout,
        )


def contribute(module: nn.Module, batch: Batch, objective: Objective, workers: int) -> float:
    """Computes gradients and loss of one worker's share, scaled so that the mean over workers is the whole batch's."""
    module.zero_grad()
    router_losses([module])(workers / batch.global_rows)
    loss = objective(module(batch.x), batch.y) * workers / batch.counted
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


@contextmanager
def rpc_session(servers: Servers, rank: int, where: str) -> Iterator[None]:
    """Joins the processes that call each other.

    Leaves without waiting for the others, since some may have been killed.
    """
    for interface in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(interface, "lo")
    options = rpc.TensorPipeRpcBackendOptions(
        # a call that waits for a backup must not block others
        num_worker_threads=servers.workers + 4,
        rpc_timeout=servers.timeout,
        init_method=where,
        _transports=["uv"],
    )
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        servers.name(rank), rank=rank, world_size=servers.processes, rpc_backend_options=options
    )
    try:
        yield
    finally:
        rpc.shutdown(graceful=False)


if __name__ == "__main__":
    process.serve(run)
