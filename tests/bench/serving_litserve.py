"""LitServe with the model of `tests.bench.serving_rates`, the peer that is measured beside ours.

    python -m tests.bench.serving_litserve PORT MODEL OPTIONS ROWS SECONDS WORKERS

OPTIONS: of the zoo's model, as JSON. ROWS, SECONDS: its largest batch, and how long it waits for more rows. Runs in `.venv-peers`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

import litserve
import numpy as np
import torch


class Api(litserve.LitAPI):
    """Takes the same JSON as ours: `inputs`, the first of which has the values of one row."""

    def setup(self, device):
        torch.set_num_threads(1)
        name, options = sys.argv[2], json.loads(sys.argv[3])
        self.model = import_module(f"models.zoo.{name}").spec((28, 28), 10, **options).build(0).eval()

    def decode_request(self, request):
        return np.asarray(request["inputs"][0]["data"], np.float32).reshape(28, 28)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, x):
        with torch.inference_mode():
            return self.model(torch.from_numpy(x)).numpy()

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return {
            "outputs": [{"name": "logits", "shape": [1, 10], "datatype": "FP32", "data": output.tolist()}]
        }


if __name__ == "__main__":
    port, rows, seconds, workers = int(sys.argv[1]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])
    api = Api(max_batch_size=rows, batch_timeout=seconds)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=port,
        num_api_servers=1,
        log_level="error",
        access_log=False,
        generate_client_file=False,
    )
