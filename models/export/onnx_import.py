"""An ONNX file from elsewhere, checked, and its weights as params where it is a model of the catalog:
`python -P -m models.export.onnx_import JOB.json`.

The job file has `onnx`, the file, and `model`, with `name` and `options` or nothing. Leaves `result.json`: what the file takes
and gives, its hash and those of the files beside it; with a model `model.safetensors` too. A file may be made to take all
memory or time of whoever opens it, so this process has bounds on both.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from edge_client import process
from edge_client.wire.arrays import sha256_of
from models import job as jobs
from models.export.onnx_files import described, opened

MEMORY_BYTES, MEMORY_SHARE = 4 * 2**30, 8
"""Of this process: so much, and so many times the file."""
SECONDS = 600
"""Of processor time."""


def run(path: Path, report: process.Report) -> None:
    """The whole job, from its file."""
    job = jobs.read(path)
    place = job.file("onnx", job.value("onnx"))
    size = place.stat().st_size
    process.soften(resource.RLIMIT_CPU, SECONDS)
    process.limit_memory(MEMORY_BYTES + MEMORY_SHARE * size)
    report(stage="import", step="check")
    found = opened(place)
    result: dict[str, Any] = {
        "sha256": found.sha256,
        "bytes": size,
        **described(found.model),
        "external": {location: sha256_of(file) for location, file in found.external.items()},
    }
    wanted = job.value("model")
    if wanted:
        report(stage="import", step="match")
        import torch

        from models.export.onnx_match import matched

        torch.set_num_threads(1)
        result |= matched(found, wanted["name"], wanted["options"], job.out / "model.safetensors")
    jobs.write_result(job.out, result)


if __name__ == "__main__":
    process.serve(run)
