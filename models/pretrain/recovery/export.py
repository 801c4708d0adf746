"""A checkpoint of any plan as a plain params file, without the processes that wrote it.

    python -P -m models.pretrain.recovery.export CHECKPOINT JOB.json OUT.safetensors

`CHECKPOINT` is one `step-…` folder, or the folder of all of them, which means the newest. The file is what a finished
training writes, so `models.compress` takes it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from edge_client import process
from models import job as jobs
from models.pretrain import params
from models.pretrain.recovery import checkpoint as checkpoints
from models.pretrain.recovery.checkpoint import CheckpointError, State
from models.zoo import ModelSpec


def export(checkpoint: Path, spec: ModelSpec, path: Path) -> dict[str, Any]:
    """Writes the params of `spec`'s model in `checkpoint` to `path`, and tells what the file is and its `step`.

    Holds one model in memory.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of another model.
    """
    folder = checkpoint
    if not checkpoint.name.startswith("step-"):
        newest = checkpoints.latest(checkpoint)
        if newest is None:
            raise CheckpointError(f"{checkpoint} holds no checkpoint")
        folder = newest
    about = checkpoints.about(folder)
    module = spec.build(0)
    about["identity"].check_tensors(params.shapes_of(module), folder)
    checkpoints.load(State([module], []), folder)
    return {**params.save(module, path), "step": about["step"]}


def main() -> None:
    report = process.reporter(sys.stdout)
    if len(sys.argv) != 4:
        report(error=f"expected CHECKPOINT JOB.json OUT.safetensors, got {len(sys.argv) - 1} arguments")
        sys.exit(2)
    checkpoint, job, out = map(Path, sys.argv[1:])
    try:
        report(**export(checkpoint, jobs.read(job).spec(), out))
    except jobs.JobError as error:
        report(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
