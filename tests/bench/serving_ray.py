"""Ray Serve with the model of `tests.bench.serving_rates`, the peer that is measured beside ours.

    python -m tests.bench.serving_ray PORT MODEL OPTIONS ROWS SECONDS WORKERS

As `tests.bench.serving_litserve`. Runs in `.venv-peers`.
"""

from __future__ import annotations

import json
import signal
import sys
from importlib import import_module

import numpy as np
import ray
import torch
from ray import serve
from starlette.requests import Request

_PORT, _NAME, _OPTIONS, _ROWS, _SECONDS, _WORKERS = sys.argv[1:]


@serve.deployment(
    num_replicas=int(_WORKERS),
    ray_actor_options={"num_cpus": 1},
    max_ongoing_requests=256,
    logging_config={"enable_access_log": False},
)
class Model:
    def __init__(self, name: str, options: dict[str, object], rows: int, seconds: float) -> None:
        torch.set_num_threads(1)
        self.model = import_module(f"models.zoo.{name}").spec((28, 28), 10, **options).build(0).eval()
        self.predict.set_max_batch_size(rows)
        self.predict.set_batch_wait_timeout_s(seconds)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.01)
    async def predict(self, rows: list[np.ndarray]) -> list[list[float]]:
        with torch.inference_mode():
            return self.model(torch.from_numpy(np.stack(rows))).tolist()

    async def __call__(self, request: Request) -> dict[str, object]:
        document = await request.json()
        x = np.asarray(document["inputs"][0]["data"], np.float32).reshape(28, 28)
        logits = await self.predict(x)
        return {"outputs": [{"name": "logits", "shape": [1, 10], "datatype": "FP32", "data": logits}]}


if __name__ == "__main__":
    ray.init(num_cpus=1 + int(_WORKERS), include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(_PORT)}, logging_config={"enable_access_log": False}
    )
    serve.run(Model.bind(_NAME, json.loads(_OPTIONS), int(_ROWS), float(_SECONDS)), route_prefix="/predict")
    print("ready", flush=True)
    signal.pause()
