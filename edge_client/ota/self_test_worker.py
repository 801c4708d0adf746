"""The process of a self-test: tests one release, and compares it with the active one on this device's rows.

    python -P -m edge_client.ota.self_test_worker JOB.json

writes one JSON object per line: `{"passed": …}` once the golden answers are right on this runtime, or what is wrong; then,
if the device has held-out rows of the manifest's data set, how the new model and the active one perform on them.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data import DataConfig, open_data
from edge_client.data.examples import PADDING
from edge_client.infer import golden_check, runtime
from edge_client.infer.runtime import LoadedRelease, check_rows
from edge_client.ota.self_test import SECONDS, SelfTestJob
from edge_client.processes.process import Report, limit_memory, lower_priority, serve, set_soft_limit
from edge_client.train.evaluation import merge, score
from edge_client.train.golden import SelfTestFailed
from edge_client.train.interpreter import NoRuntime
from edge_client.wire.manifest import ManifestError
from edge_client.wire.strict import parse

BASE_BYTES = 512 * 1024 * 1024
"""Memory for Python, numpy, the runtime and the rows, in addition to the model's as its manifest states it."""

EVALUATED_ROWS = 10_000
_BATCH = 64
_LARGEST_LOSS = 1e30


def _work(file: Path, report: Report) -> None:
    job = parse(SelfTestJob, json.loads(file.read_bytes()), "job")
    lower_priority()
    limit_memory(job.memory_bytes + BASE_BYTES)
    set_soft_limit(resource.RLIMIT_CPU, int(SECONDS))
    candidate = _load_and_test(job.folder, report)
    if candidate is None or job.data is None:
        return
    report(at="data")
    try:
        examples = _examples(job.data, candidate)
    except ValueError as error:
        report(note=f"not evaluated: {error}")
        return
    if examples is None:
        return
    report(at="candidate")
    own = _evaluate(candidate, *examples)
    if not own["labels"]:
        report(note="not evaluated: no label of its rows is one of the model's classes", at="done")
        return
    report(evaluation=own, at="champion")
    champion = _champion(job.champion, report)
    if champion is not None and _is_comparable(champion, candidate):
        theirs = _evaluate(champion, *examples, scale=candidate.manifest.data_schema.label_scale)
        report(
            evaluation={**own, "champion_correct": theirs["correct"], "champion_loss_sum": theirs["loss_sum"]}
        )


def _load_and_test(folder: Path, report: Report) -> LoadedRelease | None:
    """The loaded release, once its answers are right; None after reporting a failure."""
    loaded = None
    try:
        loaded = runtime.load(folder)
        report(passed={"golden_accuracy": golden_check.require(loaded)})
        return loaded
    except (NoRuntime, golden_check.NotEnoughMemory) as error:
        # A problem of this machine, or of its free memory now; what ran here before will run again.
        report(later=str(error))
    except SelfTestFailed as error:
        report(code="self_test", message=str(error))
    except ManifestError as error:
        report(code="bad_artifact" if loaded is None else "wrong_runtime", message=str(error))
    except (RuntimeError, ValueError) as error:
        # The interpreter opens the file and cannot run it.
        report(code="bad_artifact", message=f"this runtime cannot run it: {error}")
    return None


def _examples(data: DataConfig, candidate: LoadedRelease) -> tuple[Any, Any] | None:
    """Held-out rows and labels as the model takes them; None if there are none.

    Raises:
        ValueError: the data does not match its description or the model.
    """
    held_out = open_data(data, candidate.manifest.schema).held_out()
    if not len(held_out):
        return None
    if (held_out.y.dtype.kind == "f") != (candidate.manifest.task == "regression"):
        raise ValueError("its labels are of another kind than the model's answers")
    return check_rows(held_out.x[:EVALUATED_ROWS], candidate.manifest), held_out.y[:EVALUATED_ROWS]


def _champion(folder: Path | None, report: Report) -> LoadedRelease | None:
    if folder is None:
        return None
    try:
        return runtime.load(folder)
    except ManifestError as error:
        report(note=f"the active model cannot be loaded: {error}")
        return None


def _is_comparable(champion: LoadedRelease, candidate: LoadedRelease) -> bool:
    """Whether both take the same rows, and both predict classes or both a quantity."""
    tasks = {each.manifest.task == "regression" for each in (champion, candidate)}
    return champion.manifest.input == candidate.manifest.input and len(tasks) == 1


def _evaluate(loaded: LoadedRelease, x: Any, y: Any, scale: Sequence[float] | None = None) -> dict[str, Any]:
    """Counts of labels and correct ones, and cross-entropy, over all rows; labels that are no class do not count.

    Of quantities the squared error. `scale`: mean and deviation that `y` is scaled by, if not the model's own.
    """
    is_quantity = loaded.manifest.task == "regression"
    known = y if is_quantity else np.where((y >= 0) & (y < loaded.manifest.classes), y, PADDING)
    own = loaded.manifest.data_schema.label_scale

    def outputs(rows: Any) -> Any:
        found = loaded.predict(rows)
        if not own or not scale or own == scale:
            return found
        return ((found.astype(np.float64) * own[1] + own[0]) - scale[0]) / scale[1]

    total = merge(
        score(outputs(x[start : start + _BATCH]), known[start : start + _BATCH])
        for start in range(0, len(x), _BATCH)
    )
    # JSON has no infinity, so an infinite or NaN loss becomes the largest.
    loss = total.loss_sum if total.loss_sum < _LARGEST_LOSS else _LARGEST_LOSS
    return {"labels": int(total.labels.sum()), "correct": int(total.correct.sum()), "loss_sum": loss}


if __name__ == "__main__":
    serve(_work)
