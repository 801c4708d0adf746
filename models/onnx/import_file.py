"""Imports an ONNX file: checks it, and extracts the params if it holds a model of the catalog:
`python -P -m models.onnx.import_file JOB.json`.

The job file has `onnx`, the file, and `model`, with `name` and `options` or empty. Writes `result.json`: the inputs and
outputs of the file, its hash and those of its external files; with a model `model.safetensors` too. A malicious file may try to
use up memory or time, so this process limits both.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from edge_client.files import file_sha256
from edge_client.processes import process
from models import job as jobs
from models.onnx.files import describe, open_file

MEMORY_BYTES, MEMORY_SHARE = 4 * 2**30, 8
"""Memory limit of this process: a constant, plus a multiple of the file's size."""
SECONDS = 600
"""Limit of processor time."""


def run(path: Path, report: process.Report) -> None:
    """Runs the job in the file `path`."""
    job = jobs.read(path)
    file = job.file("onnx", job.value("onnx"))
    size = file.stat().st_size
    process.set_soft_limit(resource.RLIMIT_CPU, SECONDS)
    process.limit_memory(MEMORY_BYTES + MEMORY_SHARE * size)
    report(stage="import", step="check")
    onnx_file = open_file(file)
    result: dict[str, Any] = {
        "sha256": onnx_file.sha256,
        "bytes": size,
        **describe(onnx_file.model),
        "external": {location: file_sha256(path) for location, path in onnx_file.external.items()},
    }
    model = job.value("model")
    if model:
        report(stage="import", step="match")
        import torch

        from models.onnx.weight_matching import import_params

        torch.set_num_threads(1)
        result |= import_params(onnx_file, model["name"], model["options"], job.out / "model.safetensors")
    jobs.write_result(job.out, result)


if __name__ == "__main__":
    process.serve(run)
