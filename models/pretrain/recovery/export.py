"""Exports a checkpoint of any plan as a plain params file, without the processes that wrote it.

    python -P -m models.pretrain.recovery.export CHECKPOINT JOB.json OUT.safetensors

`CHECKPOINT` is one `step-…` folder, or the folder that contains them, which selects the newest. The file is the same
as a finished training writes, so `models.compress` accepts it.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edge_client.processes import process
from models import job as jobs
from models.pretrain import initial, params
from models.pretrain.recovery import fine_tuning, manifest
from models.pretrain.recovery.checkpoint import read_tensors
from models.pretrain.recovery.manifest import CheckpointError
from models.zoo.spec import ModelSpec


def export(checkpoint: Path, spec: ModelSpec, path: Path) -> dict[str, Any]:
    """Writes the params of `spec`'s model in `checkpoint` to `path`; returns the file's description and its `step`.

    Holds one tensor in memory.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of another model.
    """
    if not checkpoint.name.startswith("step-"):
        steps = manifest.steps_in(checkpoint)
        if not steps:
            raise CheckpointError(f"{checkpoint} holds no checkpoint")
        checkpoint = manifest.path_of(checkpoint, steps[-1])
    description = manifest.read_manifest(checkpoint)
    with torch.device("meta"):
        module = spec.module()
    description["identity"].check_tensors(params.shapes_of(module), checkpoint)
    manifest.verify_files(checkpoint, description)
    if spec.frozen:
        return {
            **fine_tuning.export(spec, path, partial(read_tensors, checkpoint)),
            "step": description["step"],
        }
    tensors = read_tensors(checkpoint, sorted(params.float_tensors(module)))
    return {**params.write(path, module, tensors), "step": description["step"]}


def main() -> None:
    report = process.reporter(sys.stdout)
    if len(sys.argv) != 4:
        report(error=f"expected CHECKPOINT JOB.json OUT.safetensors, got {len(sys.argv) - 1} arguments")
        sys.exit(2)
    checkpoint, job, out = map(Path, sys.argv[1:])
    try:
        described = jobs.read(job)
        report(**export(checkpoint, initial.with_init(described, described.spec()), out))
    except jobs.JobError as error:
        report(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
