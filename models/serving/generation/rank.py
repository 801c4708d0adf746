"""One of the processes that generate together (`models.serving.generation.parallel`): a part of the model and of the cache.

Every rank receives every batch. Along `tp` the ranks exchange partial sums, along `pp` a stage sends its output to the next
one, and the first rank of the last stage answers with the logits.

Run as `python -P -m models.serving.generation.rank FD`: a process that forks a rank for each socket that it receives on FD
(`edge_client.processes.process.serve_forks`).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from edge_client.processes.channel import Closed, Frame, receive_frame, send_frame
from edge_client.processes.process import die_with_parent, serve_forks
from models import zoo
from models.pretrain import initial, world
from models.pretrain import plan as plans
from models.pretrain.parallel.model import tensor
from models.pretrain.parallelize import parallelize, require_composition
from models.serving.generation.batch import Batch
from models.serving.generation.batch_frames import from_frame
from models.serving.generation.cached_model import CachedModel
from models.serving.generation.support import CannotGenerate, require_layout
from models.zoo.spec import ModelSpec

__all__ = ["tensor"]  # imported before ranks are forked


class Rank:
    """A part of a model with its cache.

    Args:
        settings: the first frame of the parent.

    Raises:
        CannotGenerate: the model, or the plan, is none that generates.
    """

    def __init__(self, settings: Mapping[str, Any], here: world.World) -> None:
        spec = _spec(settings)
        module = spec.build(0)
        layout = require_layout(spec, module, deterministic=False)
        if here.plan.pp > 1:
            require_composition(module, layout, spec.example_batch(1)[0])

        def part(whole: nn.Module) -> nn.Module:
            (mine,) = parallelize(whole, layout, here).parts
            return mine

        module = module.to(here.device)
        self.cached = CachedModel(module, layout, settings["blocks"], settings["block_tokens"], part)
        self._saved: dict[int, Any] = {}
        self._here, self._width = here, layout.width
        self._dtype = next(module.parameters()).dtype
        group = here.group("pp")
        stage, last = here.coordinate("pp"), here.size("pp") - 1
        self._before = dist.get_global_rank(group, stage - 1) if stage else None
        self._after = dist.get_global_rank(group, stage + 1) if stage < last else None
        self._reports = stage == last and not here.coordinate("tp")

    def handle(self, frame: Frame) -> tuple[dict[str, Any], list[bytes]] | None:
        """The answer to a frame; None: there is none."""
        values = frame.values
        match values["kind"]:
            case "run":
                for key in values["dropped"]:
                    self._saved.pop(key, None)
                return self._run(from_frame(values, frame.blobs))
            case "save":
                self._saved[values["key"]] = self.cached.read(values["held"])
                return None
            case "restore":
                self.cached.write(values["held"], self._saved.pop(values["key"]))
                return None
            case "measure":
                return {"cache_bytes": self.cached.cache_bytes}, []
        raise AssertionError(values["kind"])

    def _run(self, batch: Batch) -> tuple[dict[str, Any], list[bytes]] | None:
        if self._before is None:
            x = self.cached.tensor(batch.tokens)[None]
        else:
            x = torch.empty(1, len(batch.tokens), self._width, dtype=self._dtype, device=self._here.device)
            dist.recv(x, self._before)
        output = self.cached.compute(batch, x)
        if self._after is not None:
            dist.send(output.contiguous(), self._after)
        if not self._reports:
            return None
        logits = np.ascontiguousarray(self.cached.select(output).float().cpu().numpy())
        return {"shape": list(logits.shape)}, [logits.tobytes()]


def _spec(settings: Mapping[str, Any]) -> ModelSpec:
    described = dict(settings["model"])
    described["input_shape"] = tuple(described["input_shape"])
    spec = zoo.get(described.pop("name"), **described.pop("options"), **described)
    return initial.with_params(spec, Path(settings["params"]), new_head=False)


@torch.no_grad()
def serve(channel: socket.socket) -> None:
    """Opens the model that the first frame names, and answers the others until the channel closes."""
    settings = receive_frame(channel).values
    plan, rank = plans.parse(settings["plan"]), settings["rank"]
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(plan.processes))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = world.select_device(plan)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{settings['store']}",
        rank=rank,
        world_size=plan.processes,
        timeout=timedelta(seconds=settings["seconds"]),
    )
    try:
        mine = Rank(settings, world.build(plan, device))
    except (CannotGenerate, ValueError) as error:
        send_frame(channel, {"error": str(error)})
        return
    send_frame(channel, {"ready": True})
    while True:
        answer = mine.handle(receive_frame(channel))
        if answer is not None:
            send_frame(channel, *answer)


def main() -> None:
    die_with_parent()
    descriptor = int(sys.argv[1])
    with (
        socket.socket(fileno=descriptor) as control,
        socket.socket(fileno=serve_forks(control)) as channel,
        suppress(Closed),
    ):
        serve(channel)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
