"""The worker process of a compression: `python -P -m models.compress.compression_process JOB.json`.

The job file has `model`, `params`, `seed`, `steps` (the tables of the pipeline), `pipeline` (its name in messages), and `teachers`:
name -> `{"model": …, "params": …}`. Its arrays are `x_train`, `y_train`, `x_test`, `y_test` and, if there are unlabelled rows
for a teacher to label, `x_extra`. Emits `checked` once the request is known to be valid, before anything slow starts. Leaves the
folders of the steps, the last one's `model.safetensors`, `model.tflite` and `packed.safetensors`, `pareto.png` and `result.json`.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from edge_client.files import write_durably
from edge_client.processes import process
from models import job as jobs
from models.compress import amx, distil, pipeline, report
from models.compress.pipeline import PACKED, PARAMS, TFLITE, PlannedStep
from models.compress.pruning.structure import rebuild
from models.compress.step import Data, StepModel


def compress(path: Path, emit: process.Report) -> None:
    """Runs the job in the file `path`."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    amx.disable()
    job = jobs.read(path)
    name = str(job.settings.get("pipeline", path))
    steps = pipeline.plan_steps(job.value("steps"), name)
    source, data = model_in(job), data_in(job)
    teachers = {name: model_in(job, "teachers", name) for name in job.settings.get("teachers", {})}
    _require_students(steps, source, name)
    emit(checked=True)

    done = pipeline.run(
        steps, source, data, job.out, job.seed, teachers=teachers, on_progress=lambda line: emit(**line)
    )
    emit(stage="measure")
    rows = pipeline.measure(done, data)
    last = done[-1]
    write_durably(job.out / PARAMS, (last.folder / PARAMS).read_bytes())
    for file, content in ((TFLITE, last.model.tflite), (PACKED, last.model.packed)):
        if content is not None:
            write_durably(job.out / file, content)
        else:
            (job.out / file).unlink(missing_ok=True)
    report.plot(rows, job.out / "pareto.png", len(data.x_test))
    jobs.write_result(
        job.out,
        {
            "rows": rows,
            "model": last.model.spec.described(),
            "lineage": pipeline.lineage(done),
            "data_fingerprint": last.record["data_fingerprint"],
            "seconds": time.perf_counter() - started,
        },
    )


def model_in(job: jobs.JobFile, *keys: str) -> StepModel:
    """The model described under `keys`, with its params, which compression may have changed in number and size."""
    spec = job.spec(*keys, "model")
    path = job.file(".".join([*keys, "params"]), job.value(*keys, "params"))
    params = jobs.read_params(path)
    try:
        return StepModel(spec, rebuild(spec, params))
    except ValueError as error:
        raise jobs.JobError(f"{path}: {error}") from error


def data_in(job: jobs.JobFile) -> Data:
    """The arrays of the job."""
    spec = job.spec()
    x, x_test = job.rows("x_train", spec), job.rows("x_test", spec)
    extra = job.rows("x_extra", spec) if job.has_array("x_extra") else None
    return Data(x, job.labels("y_train", spec, x), x_test, job.labels("y_test", spec, x_test), extra)


def _require_students(steps: list[PlannedStep], source: StepModel, name: str) -> None:
    for number, step in enumerate(steps, 1):
        if isinstance(step.options, distil.DistilOptions) and step.options.student:
            try:
                distil.parse_model(step.options.student, source.spec)
            except ValueError as error:
                raise pipeline.PipelineError(f"{name}: step {number} ({step.kind}): {error}") from error


if __name__ == "__main__":
    process.serve(compress)
