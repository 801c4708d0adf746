"""A compression as a process of its own: `python -P -m models.compress.worker JOB.json`.

The job file has `model`, `params`, `seed`, `steps` (the tables of the pipeline), `pipeline` (what messages call it), and `teachers`:
name -> `{"model": …, "params": …}`. Its arrays are `x_train`, `y_train`, `x_test`, `y_test` and, where there are unlabelled rows
for a teacher to label, `x_extra`. Says `checked` once all that was asked for makes sense and nothing slow has begun. Leaves the
folders of the steps, the last one's `model.safetensors` and `model.tflite`, `pareto.png` and `result.json`.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from edge_client import process
from edge_client.files import write_durably
from models import job as jobs
from models.compress import distil, pipeline, report, tiles
from models.compress.pipeline import PARAMS, TFLITE, Planned
from models.compress.step import Data, Model
from models.compress.structure import rebuilt


def compress(path: Path, say: process.Report) -> None:
    """The whole job, from its file."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    tiles.refuse()
    job = jobs.read(path)
    called = str(job.settings.get("pipeline", path))
    steps = pipeline.planned(job.value("steps"), called)
    source, data = model_in(job), data_in(job)
    teachers = {name: model_in(job, "teachers", name) for name in job.settings.get("teachers", {})}
    _require_students(steps, source, called)
    say(checked=True)

    done = pipeline.run(
        steps, source, data, job.out, job.seed, teachers=teachers, tell=lambda line: say(**line)
    )
    say(stage="measure")
    rows = pipeline.measured(done, data)
    last = done[-1]
    write_durably(job.out / PARAMS, (last.folder / PARAMS).read_bytes())
    if last.model.tflite is not None:
        write_durably(job.out / TFLITE, last.model.tflite)
    else:
        (job.out / TFLITE).unlink(missing_ok=True)
    report.plot(rows, job.out / "pareto.png")
    jobs.write_result(
        job.out,
        {
            "rows": rows,
            "model": pipeline.described(last.model.spec),
            "lineage": pipeline.lineage(done),
            "data_fingerprint": last.record["data_fingerprint"],
            "seconds": time.perf_counter() - started,
        },
    )


def model_in(job: jobs.Job, *where: str) -> Model:
    """The model described at `where`, with its params; its layers may be fewer or narrower than designed."""
    spec = job.spec(*where, "model")
    path = job.file(".".join([*where, "params"]), job.value(*where, "params"))
    params = pipeline.read_params(path)
    try:
        return Model(spec, rebuilt(spec, params))
    except ValueError as error:
        raise jobs.JobError(f"{path}: {error}") from error


def data_in(job: jobs.Job) -> Data:
    """Its arrays."""
    spec = job.spec()
    x, x_test = job.rows("x_train", spec), job.rows("x_test", spec)
    extra = job.rows("x_extra", spec) if job.has_array("x_extra") else None
    return Data(x, job.labels("y_train", spec, x), x_test, job.labels("y_test", spec, x_test), extra)


def _require_students(steps: list[Planned], source: Model, called: str) -> None:
    """Every model that a step is to distil into can be made."""
    for number, step in enumerate(steps, 1):
        if isinstance(step.options, distil.Options) and step.options.student:
            try:
                distil.named(step.options.student, source.spec)
            except ValueError as error:
                raise pipeline.PipelineError(f"{called}: step {number} ({step.kind}): {error}") from error


if __name__ == "__main__":
    process.serve(compress)
