"""The server's own rows at work, in worker processes (`coordinator.workers.server_jobs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from coordinator.workers.pool import PoolJob, WorkerPool
from edge_client.wire import arrays
from strategies.algorithms.server_data.server import Answers, Distillation
from strategies.params import Params, Tensors


@dataclass(frozen=True)
class PoolServer:
    """Implements `strategies.algorithms.server_data.server.Server` over workers that have the run's data and model open, and the round.

    `seed`: of the run; the numbers that are drawn follow from it, the round and the device class.
    """

    pool: WorkerPool
    seed: int

    def train(self) -> Params:
        return arrays.decode(self.pool.run_one(self._request("train")).blobs[0])

    def answer(self, models: Sequence[tuple[str, Tensors]]) -> list[Answers]:
        jobs = (
            PoolJob(index, self._request("answer", {"class": name}), (arrays.encode(delta),))
            for index, (name, delta) in enumerate(models)
        )
        answers = {
            job.key: np.asarray(arrays.decode(reply.blobs[0])["logits"], np.float32)
            for job, reply in self.pool.run(jobs)
        }
        return [answers[index] for index in range(len(models))]

    def distil(
        self, starts: Mapping[str, Tensors], answers: Answers, how: Distillation
    ) -> dict[str, Tensors]:
        logits = arrays.encode({"logits": answers})
        jobs = (
            PoolJob(
                name,
                self._request("distil", {"class": name, "how": asdict(how)}),
                (arrays.encode(delta), logits),
            )
            for name, delta in starts.items()
        )
        moved = {job.key: arrays.decode(reply.blobs[0]) for job, reply in self.pool.run(jobs)}
        return {name: moved[name] for name in starts}

    def _request(self, work: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {"kind": "server", "work": work, "seed": self.seed, **(more or {})}
