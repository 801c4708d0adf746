"""From a device's budget to the pipeline that makes a model fit it.

    1. the source, as for a compression; half of its held-out rows choose the pipeline, the other half are for the report
    2. the search, in a worker process, into `search/` (`models.compress.search`)
    3. the chosen pipeline, as an ordinary compression of the same source with the same seed, scored on the rows for the report

Candidates depend on the source, the rows and the seed, not on the budget: a second budget in the same folder trains only
candidates that are not there yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator import option_parsers
from coordinator.datacenter import compression
from coordinator.datacenter.compression_request import CompressionRequest
from coordinator.datacenter.compression_sources import Source, SourceReader
from coordinator.datacenter.documents import LINEAGE, MODEL, PARAMS, PIPELINE, REPORT, TFLITE
from coordinator.datacenter.jobs import DatacenterJob, Environment
from coordinator.document_checks import to_user_error
from coordinator.errors import UserError
from coordinator.output_folders import require_new, undone_if_refused
from coordinator.storage.private_folders import private_folder

FOLDER = "search"

_MICROSECONDS = {"us": 1, "ms": 10**3, "s": 10**6}
_OUTPUTS = (PIPELINE, PARAMS, TFLITE, MODEL, LINEAGE, REPORT)


@dataclass(frozen=True)
class Budget:
    """Limits of a device; 0 means unlimited, and for `accuracy` two points below the source's."""

    memory_bytes: int = 0
    size_bytes: int = 0
    latency_us: float = 0.0
    accuracy: float = 0.0


def parse_budget(memory: str | None, size: str | None, latency: str | None, accuracy: float | None) -> Budget:
    """The budget in the options of a command.

    Raises:
        UserError: listing every problem, or that no option is given.
    """
    problems: list[str] = []

    def read(option: str, text: str | None, units: Mapping[str, int], example: str) -> float:
        if text is None:
            return 0
        try:
            return option_parsers.quantity(units, example)(text)
        except ValueError as error:
            problems.append(f"{option} {text}: {error}")
            return 0

    read_memory, read_size = (
        int(read(option, text, option_parsers.BYTES, example))
        for option, text, example in (("--memory", memory, "64KB"), ("--size", size, "100KB"))
    )
    read_latency = read("--latency", latency, _MICROSECONDS, "500us")
    if accuracy is not None and not 0 < accuracy <= 1:
        problems.append(f"--accuracy {accuracy}: expected a share above 0 and at most 1, such as 0.95")
    if memory is None and size is None and latency is None:
        problems.append("no budget is given; expected at least one of --memory, --size, --latency")
    if problems:
        raise to_user_error("compress-search", problems)
    return Budget(read_memory, read_size, read_latency, accuracy or 0.0)


def search(
    folder: Path,
    request: CompressionRequest,
    budget: Budget,
    out: Path,
    environment: Environment,
    *,
    first: bool = False,
) -> dict[str, Any]:
    """Searches for a pipeline for the model in `folder`, and returns the report of its compression in `out`, with `search`.

    `out` is new, empty, or from an earlier search. If nothing fits, the report holds the search alone.

    Args:
        request: rows, seed, student, and options for all steps of a kind.
        first: stops at the first candidate that fits.

    Raises:
        UserError: `folder` holds no trained model, the request is wrong, or `out` is something else.
        RunInterrupted: the worker failed; the message says where its log is.
    """
    started = (out / FOLDER).is_dir()
    require_new(out, may_continue=started)
    with undone_if_refused(out, lambda: started), private_folder() as scratch:
        pipeline = request.pipeline.model_copy(update={"test_rows": 2 * request.pipeline.test_rows})
        source = SourceReader(pipeline, scratch, environment, request.data_options).read(folder)
        choosing, scoring = _halves(source)
        result = _run_search(choosing, request, budget, out / FOLDER, environment, first)
        for name in _OUTPUTS:  # of an earlier choice
            (out / name).unlink(missing_ok=True)
        if result["chosen"] is None:
            return {"search": result}
        environment.progress.stage(f"chosen: {result['chosen']}")
        steps = result["steps"]
        chosen = request.pipeline.model_copy(update={"step": steps, "seed": source.seed})
        compression.write_pipeline(out, chosen)
        compressed = compression.run_steps(scoring, steps, out, environment, origin=result["chosen"])
    return compression.write_report(scoring, compressed, out, search=result)


def _halves(source: Source) -> tuple[Source, Source]:
    count = len(source.arrays["x_test"])
    if count < 2:
        raise UserError(f"{source.params.parent}: has {count} held-out rows; a search needs at least two")
    order = np.random.default_rng([source.seed, count]).permutation(count)
    return _with_test_rows(source, order[: count // 2]), _with_test_rows(source, order[count // 2 :])


def _with_test_rows(source: Source, rows: npt.NDArray[np.intp]) -> Source:
    chosen = {key: np.ascontiguousarray(source.arrays[key][np.sort(rows)]) for key in ("x_test", "y_test")}
    return replace(source, arrays={**source.arrays, **chosen})


def _run_search(
    source: Source,
    request: CompressionRequest,
    budget: Budget,
    out: Path,
    environment: Environment,
    first: bool,
) -> dict[str, Any]:
    student = compression.student_of(request.student, source.model)
    job = DatacenterJob(
        "search",
        source.model,
        source.arrays,
        seed=source.seed,
        params=source.params,
        more={
            "budget": asdict(budget),
            "first": first,
            "sets": {kind: dict(options) for kind, options in request.sets.items()},
            **({"student": student} if student else {}),
        },
    )

    def describe(line: Mapping[str, Any]) -> str | None:
        if "candidate" not in line:
            return None
        return str(line["candidate"]) + (" with few epochs" if line["rung"] == "short" else "")

    return compression.run_job(job, out, environment, describe)
