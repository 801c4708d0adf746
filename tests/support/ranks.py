"""Several processes of one torch.distributed world, running a function of a test.

They are forked from a server that has imported torch once, so that a world of eight costs no eight imports, and
every world is fresh: no state is left from one to the next. They die with the server, and that with us.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing as mp
import os
import signal
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "models.pretrain.trainer",
]
HANGS_SECONDS = 300


class RankFailed(AssertionError):
    """A process raised, or was killed; the message has its traceback."""


@dataclass(frozen=True)
class _Place:
    rank: int
    processes: int
    folder: str


def run(processes: int, target: str, *args: Any, **kwargs: Any) -> list[Any]:
    """What `target`, "package.module:function", gave in each of `processes` processes, in order of rank.

    A function finds RANK, WORLD_SIZE and the like in its environment, as under torchrun, and joins by itself, for
    instance by `models.pretrain.world.join`. Arguments and results are pickled.

    Raises:
        RankFailed: with the first traceback; the others are then killed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(processes)]
        workers = [
            context.Process(
                target=_work,
                args=(_Place(rank, processes, folder), sending, target, args, kwargs),
                daemon=True,
            )
            for rank, (_, sending) in enumerate(pipes)
        ]
        for worker in workers:
            worker.start()
        for _, sending in pipes:
            sending.close()
        try:
            return _results([receiving for receiving, _ in pipes], workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _results(pipes: Sequence[Any], workers: Sequence[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = mp.connection.wait(list(waiting.values()), timeout=HANGS_SECONDS)
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting)} said nothing for {HANGS_SECONDS} s")
        for rank, pipe in list(waiting.items()):
            if pipe not in ready:
                continue
            del waiting[rank]
            try:
                fine, value = pipe.recv()
            except EOFError:
                workers[rank].join()
                raise RankFailed(f"rank {rank} ended with exit code {workers[rank].exitcode}") from None
            if not fine:
                raise RankFailed(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _work(place: _Place, pipe: Any, target: str, args: Any, kwargs: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()  # what was imported is not searched again and again for garbage
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.processes),
        LOCAL_WORLD_SIZE=str(place.processes),
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
    )
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        # what `env://` would read; a file instead of a port, which another test might take
        store = Path(place.folder) / "store"
        initialise = dist.init_process_group

        def joined(backend: str, **options: Any) -> None:
            initialise(
                backend,
                init_method=f"file://{store}",
                rank=place.rank,
                world_size=place.processes,
                **options,
            )

        dist.init_process_group = joined
        module, _, name = target.partition(":")
        pipe.send((True, getattr(importlib.import_module(module), name)(*args, **kwargs)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
