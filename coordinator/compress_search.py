"""From a device's budget to the pipeline that takes a model into it.

    1. the source, as `coordinator.compressing` reads it; half of its held-out rows choose, the other half are for the report
    2. the search, in a worker process, into `search/` (`models.compress.search`)
    3. the chosen pipeline, as an ordinary compression of the same source with the same seed, scored on the rows for the report

Candidates depend on the source, the rows and the seed, not on the budget: another budget in the same folder trains only what
was not trained before.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomlkit

from coordinator import compressing, jobs
from coordinator.compressing import Asked, Source
from coordinator.errors import UserError
from coordinator.jobs import Job, JobFailed
from coordinator.pretraining import LINEAGE, MODEL, REPORT, Surroundings
from coordinator.sections import wrong
from edge_client.files import write_durably

FOLDER = "search"

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MICROSECONDS = {"US": 1, "MS": 10**3, "S": 10**6}
_LEFT = (compressing.PIPELINE, compressing.PARAMS, compressing.TFLITE, MODEL, LINEAGE, REPORT)


@dataclass(frozen=True)
class Budget:
    """What a device has; 0: not bounded, and for `accuracy` two points below the source's."""

    memory_bytes: int = 0
    size_bytes: int = 0
    latency_us: float = 0.0
    accuracy: float = 0.0


def budget(memory: str | None, size: str | None, latency: str | None, accuracy: float | None) -> Budget:
    """The budget that the options of a command name.

    Raises:
        UserError: listing all that is wrong with them, or that none is given.
    """
    problems: list[str] = []

    def read(option: str, text: str | None, units: Mapping[str, int], example: str) -> float:
        if text is None:
            return 0
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
        unit = None if found is None else units.get(found[2].upper())
        if found is None or unit is None or not 1 <= float(found[1]) * unit <= 2**40:
            names = ", ".join(
                unit.replace("IB", "iB") if units is _BYTES else unit.lower() for unit in units if unit
            )
            problems.append(
                f"{option} {text}: expected a number above 0 and a unit ({names}), such as {example}"
            )
            return 0
        return float(found[1]) * unit

    read_memory, read_size = (
        int(read(option, text, _BYTES, example))
        for option, text, example in (("--memory", memory, "64KB"), ("--size", size, "100KB"))
    )
    read_latency = read("--latency", latency, _MICROSECONDS, "500us")
    if accuracy is not None and not 0 < accuracy <= 1:
        problems.append(f"--accuracy {accuracy}: expected a share above 0 and at most 1, such as 0.95")
    if memory is None and size is None and latency is None:
        problems.append("no budget is given; expected at least one of --memory, --size, --latency")
    if problems:
        raise wrong("compress-search", problems)
    return Budget(read_memory, read_size, read_latency, accuracy or 0.0)


def search(
    folder: Path, asked: Asked, budget: Budget, out: Path, surroundings: Surroundings, *, first: bool = False
) -> dict[str, Any]:
    """Searches for a pipeline for the model in `folder`, and gives the report of its compression in `out`, with `search`.

    `out` is new, empty, or what an earlier search has left. Where nothing fits, the report is of the search alone.

    Args:
        asked: rows, seed, student, and options that all steps of a kind have.
        first: ends with the first candidate that fits.

    Raises:
        UserError: `folder` holds no trained model, what is asked for is wrong, or `out` is something else.
        RunInterrupted: the worker failed; the message says where its log is.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / FOLDER).is_dir())):
        raise UserError(f"--out {out}: the folder is not empty; name another one")
    with tempfile.TemporaryDirectory(prefix="fedloop-") as scratch:
        pipeline = asked.pipeline.model_copy(update={"test_rows": 2 * asked.pipeline.test_rows})
        source = compressing.source_in(folder, pipeline, Path(scratch), surroundings)
        choosing, scoring = _halves(source)
        result = _searched(choosing, asked, budget, out / FOLDER, surroundings, first)
        for name in _LEFT:  # of an earlier choice
            (out / name).unlink(missing_ok=True)
        if result["chosen"] is None:
            return {"search": result}
        surroundings.watcher.stage(f"chosen: {result['chosen']}")
        steps = result["steps"]
        chosen = asked.pipeline.model_copy(update={"step": steps, "seed": source.seed})
        write_durably(
            out / compressing.PIPELINE,
            tomlkit.dumps(chosen.model_dump(mode="json", exclude_none=True)).encode(),
        )
        done = compressing.run_steps(scoring, steps, out, surroundings, named=result["chosen"])
    return compressing.write_report(scoring, done, out, search=result)


def _halves(source: Source) -> tuple[Source, Source]:
    """The source with one half of its held-out rows, and with the other."""
    count = len(source.arrays["x_test"])
    if count < 2:
        raise UserError(f"{source.params.parent}: has {count} held-out rows; a search needs two at least")
    order = np.random.default_rng([source.seed, count]).permutation(count)
    parts = (np.sort(order[: count // 2]), np.sort(order[count // 2 :]))
    return tuple(  # type: ignore[return-value]
        replace(
            source,
            arrays={
                **source.arrays,
                **{key: np.ascontiguousarray(source.arrays[key][rows]) for key in ("x_test", "y_test")},
            },
        )
        for rows in parts
    )


def _searched(
    source: Source, asked: Asked, budget: Budget, out: Path, surroundings: Surroundings, first: bool
) -> dict[str, Any]:
    student = compressing.student_of(asked.student, source.model)
    job = Job(
        "search",
        source.model,
        source.arrays,
        seed=source.seed,
        params=source.params,
        more={
            "budget": asdict(budget),
            "first": first,
            "sets": {kind: dict(options) for kind, options in asked.sets.items()},
            **({"student": student} if student else {}),
        },
    )
    heard = _Heard(surroundings.watcher.stage, surroundings.watcher.trained)
    try:
        return jobs.run(job, out, heard, surroundings.clock)
    except JobFailed as error:
        raise compressing.failed(error, heard.checked) from None


class _Heard:
    """Tells a person of each candidate once."""

    def __init__(self, stage: Callable[[str], None], trained: Callable[[Mapping[str, Any]], None]) -> None:
        self.checked = False
        self._stage, self._trained = stage, trained

    def __call__(self, line: Mapping[str, Any]) -> None:
        self.checked = self.checked or bool(line.get("checked"))
        if "candidate" in line:
            self._stage(line["candidate"] + (" with few epochs" if line["rung"] == "short" else ""))
        self._trained(line)
