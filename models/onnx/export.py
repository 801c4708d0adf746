"""Exports a model of the catalog to one ONNX file: `python -P -m models.onnx.export JOB.json`.

1. build     the module that `params` belong to
2. export    `torch.onnx.export` with opset `OPSET`; weights keep their names, the first axis accepts any number of rows
3. verify    `onnx.checker`, and the same logits as PyTorch for every row, in onnxruntime
4. write     `model.onnx`, and `result.json` that describes it

A file with other logits is not written.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import ModelProto
from torch import nn

from edge_client.files import write_durably
from edge_client.processes import process
from models import job as jobs
from models.compress.pruning.structure import rebuild
from models.onnx.files import LIMIT_BYTES, describe, messages
from models.onnx.parity import ROWS, require_same_logits
from models.zoo import ModelSpec

OPSET = 20
INPUT, OUTPUT, BATCH = "x", "logits", "batch"
FILE_NAME = "model.onnx"


class NotExportable(ValueError):
    """The model cannot become an ONNX file; the message says why."""


def run(path: Path, report: process.Report) -> None:
    """Runs the job in the file `path`."""
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec = job.spec()
    module = rebuild(spec, jobs.read_params(job.file("params", job.value("params"))))
    report(stage="export", step="convert")
    model = to_onnx(module, spec)
    content = model.SerializeToString()
    report(stage="export", step="verify")
    difference = require_same_logits(content, module, spec, job.seed)
    write_durably(job.out / FILE_NAME, content)
    result = {"rows": ROWS, "largest_difference": difference}
    about: dict[str, Any] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    jobs.write_result(job.out, {**about, **describe(model), "verified": result})


def to_onnx(module: nn.Module, spec: ModelSpec) -> ModelProto:
    """The module, in evaluation mode, as an ONNX model that passes the checker.

    Raises:
        NotExportable: torch cannot trace the module, or the file would have more than `LIMIT_BYTES`.
    """
    x, _ = spec.example_batch(2)
    try:
        program = torch.onnx.export(
            module,
            (x,),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: BATCH},),
            opset_version=OPSET,
            optimize=False,  # it folds weights and loses their names; runtimes fold anyway
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        raise NotExportable(f"torch.onnx cannot trace model {spec.name!r}: {_cause(error)}") from None
    assert program is not None
    model: ModelProto = program.model_proto
    for message in messages(model):  # remove stack traces, which hold paths of this machine
        for field in ("metadata_props", "doc_string"):
            if field in message.DESCRIPTOR.fields_by_name:
                message.ClearField(field)
    if model.ByteSize() > LIMIT_BYTES:
        raise NotExportable(
            f"the file would have {model.ByteSize()} bytes, expected at most {LIMIT_BYTES}, the limit of protobuf"
        )
    onnx.checker.check_model(model, full_check=True)
    return model


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    process.serve(run)
