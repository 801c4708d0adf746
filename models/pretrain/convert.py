"""Converts a model between a folder in Hugging Face's layout and ours: `python -P -m models.pretrain.convert JOB.json`.

    {"from": FOLDER}                                    -> model.safetensors, result.json with its description and data schema
    {"model": {…}, "params": FILE, "to": FOLDER}        -> FOLDER

A tensor that the model does not have, or that is missing, ends it before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from edge_client.files import make_durably
from edge_client.processes import process
from models import job as jobs
from models import zoo
from models.hugging_face import text
from models.hugging_face.checkpoint import open_checkpoint, write
from models.hugging_face.folder import open_file
from models.pretrain.initial import require_fit
from models.zoo.spec import ModelSpec

FILE_NAME = "model.safetensors"


def run(path: Path, report: process.Report) -> None:
    """Runs the job in the file `path`."""
    job = jobs.read(path)
    result = _read(job) if "from" in job.settings else _write(job)
    jobs.write_result(job.out, result)


def _read(job: jobs.JobFile) -> dict[str, Any]:
    folder = job.file("from", job.value("from"))
    checkpoint = open_checkpoint(folder)
    schema = text.data_schema(folder, checkpoint.description)
    described = checkpoint.description.described()
    spec = _spec(described)
    require_fit(checkpoint, spec, folder)
    tensors = {name: checkpoint.read(name).contiguous() for name in sorted(checkpoint.shapes)}
    make_durably(job.out / FILE_NAME, lambda place: safetensors.torch.save_file(tensors, place))
    return {
        "model": spec.described(),
        "parameters": _parameters(spec),
        "schema": None if schema is None else schema.to_document(),
    }


def _write(job: jobs.JobFile) -> dict[str, Any]:
    spec = job.spec()
    path = job.file("params", job.value("params"))
    file = open_file(path)
    require_fit(file, spec, path)
    to = job.file("to", job.value("to"))
    written = write(to, spec.described(), file.shapes, lambda name: file.read(name).numpy())
    return {**written, "parameters": _parameters(spec)}


def _spec(described: Mapping[str, Any]) -> ModelSpec:
    known = {**described, "input_shape": tuple(described["input_shape"])}
    return zoo.get(known.pop("name"), **known.pop("options"), **known)


def _parameters(spec: ModelSpec) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in spec.module().parameters())


if __name__ == "__main__":
    process.serve(run)
