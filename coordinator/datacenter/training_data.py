"""Data sets for datacenter jobs: loaded by a worker into `FOLDER/arrays`, read back mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.datacenter import jobs
from coordinator.datacenter.job_worker import JobFailed
from coordinator.datacenter.jobs import Environment, Job
from coordinator.errors import UserError

Arrays = Mapping[str, npt.NDArray[Any]]


def load_data(
    settings: Mapping[str, Any], seed: int, folder: Path, environment: Environment
) -> dict[str, Any]:
    """Loads the data set that `settings` describe (see `models.datasets.worker`) into `folder`/arrays.

    Returns:
        The worker's result: `fingerprint`, `rows`, `preview` and the keys of a model that follow from the data.

    Raises:
        UserError: the data or its description is wrong.
    """
    data_dir = {"data_dir": str(environment.data_dir.absolute())} if environment.data_dir else {}
    described = {key: value for key, value in settings.items() if key != "public"}
    job = Job("load", {}, {}, seed=seed, more={"data": {**described, **data_dir}})
    with as_user_errors():
        return jobs.run(job, folder, clock=environment.clock)


def read_arrays(out: Path) -> dict[str, npt.NDArray[Any]]:
    """The training and test rows loaded into `out`/data, mapped into memory.

    Raises:
        UserError: the files were removed.
    """
    folder = out / "data" / "arrays"
    try:
        if (folder / "tokens_train.npy").exists():
            return _windows(folder, jobs.resume(out / "data")["input_shape"][0])
        return {
            f"{key}_{part}": np.load(folder / f"{key}_{part}.npy", mmap_mode="r", allow_pickle=False)
            for part in ("train", "test")
            for key in "xy"
        }
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; the pretraining's data was removed") from None


def _windows(folder: Path, length: int) -> dict[str, npt.NDArray[Any]]:
    arrays = {}
    for part in ("train", "test"):
        tokens = np.load(folder / f"tokens_{part}.npy", mmap_mode="r", allow_pickle=False)
        rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
        arrays[f"x_{part}"] = rows[:, :-1].astype(np.int32)
        arrays[f"y_{part}"] = rows[:, 1:].astype(np.int32)
    return arrays


def sample_rows(
    arrays: Arrays, limits: Mapping[str, int], rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """At most `limits[part]` rows of each part, drawn at random."""
    sampled: dict[str, npt.NDArray[Any]] = {}
    for part, count in limits.items():
        rows = np.sort(rng.permutation(len(arrays[f"x_{part}"]))[:count])
        sampled |= {f"{key}_{part}": np.ascontiguousarray(arrays[f"{key}_{part}"][rows]) for key in "xy"}
    return sampled


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Raises `UserError` for what a worker finds wrong before the training starts."""
    try:
        yield
    except JobFailed as error:
        raise UserError(error.reason) from None
