"""Pretraining by data parallelism: `python -P -m models.pretrain.ddp JOB.json`, alone or under torchrun.

Every rank holds the model, computes its share of each global batch and averages gradients with the others
(DistributedDataParallel; NCCL where every rank has a GPU of its own, else gloo on the CPU). The result does
not depend on the number of ranks, except for what floating-point addition in another order does, and for
BatchNorm, whose batch statistics are each rank's own. Rank 0 writes `model.safetensors` and `result.json`.
See `models.job` for the job file; options are `models.pretrain.loop.Options`, arrays `x_train`, `y_train`,
`x_test`, `y_test`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from edge_client import process
from models import job as jobs
from models.pretrain import checkpoint, loop
from models.pretrain.batches import Share


def pretrain(path: Path, report: process.Report) -> None:
    """The whole job of one rank."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, options = job.spec(), job.options(loop.Options)
    x, x_test = job.rows("x_train", spec), job.rows("x_test", spec)
    y, y_test = job.labels("y_train", spec, x), job.labels("y_test", spec, x_test)
    loop.require_images(x, options.shift, path)

    share, device = _join()
    module = spec.build(job.seed).to(device)
    torch.manual_seed(job.seed + share.rank)  # dropout differs between ranks, as it does between rows
    on_epoch = _progress(report, options.epochs) if share.rank == 0 else lambda epoch, loss: None
    losses = loop.train(
        _synchronised(module, share),
        spec.loss,
        x,
        y,
        options,
        np.random.default_rng(job.seed),
        share=share,
        device=device,
        on_epoch=on_epoch,
    )
    if share.rank == 0:
        figures = loop.evaluate(module, spec, x_test, y_test, device)
        saved = checkpoint.save(module, job.out / "model.safetensors")
        run = {"world_size": share.world_size, "device": device.type, "backend": _backend()}
        seconds = time.perf_counter() - started
        jobs.write_result(job.out, {**figures, **saved, **run, "seconds": seconds, "losses": losses})
    if dist.is_initialized():
        dist.destroy_process_group()


def _join() -> tuple[Share, torch.device]:
    """This process among the ranks torchrun started, or alone, and the device it computes on."""
    alone = "WORLD_SIZE" not in os.environ
    local_rank, local_ranks = (
        (0, 1) if alone else (int(os.environ[f"LOCAL_{key}"]) for key in ("RANK", "WORLD_SIZE"))
    )
    own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if own_gpu else torch.device("cpu")
    if alone:
        return Share(), device
    if own_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if own_gpu else "gloo")
    return Share(dist.get_rank(), dist.get_world_size()), device


def _synchronised(module: nn.Module, share: Share) -> nn.Module:
    return DistributedDataParallel(module) if share.world_size > 1 else module


def _backend() -> str:
    return dist.get_backend() if dist.is_initialized() else "none"


def _progress(report: process.Report, epochs: int) -> loop.OnEpoch:
    report(stage="pretrain", epoch=0, epochs=epochs)
    return lambda epoch, loss: report(stage="pretrain", epoch=epoch, epochs=epochs, loss=loss)


if __name__ == "__main__":
    process.serve(pretrain)
