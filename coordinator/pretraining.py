"""A pretraining from its configuration to its report.

    1. the folder: write the resolved configuration down
    2. the data: loaded in a worker, as arrays in `data/`
    3. the plan: whether model and batch can follow it, before anything is started
    4. the training: as a job, which is resumed from its last checkpoint if it was interrupted
    5. the report: curves, what the model is (`model.json`), where it comes from (`lineage.json`)

Everything that imports a framework or runs a user's code happens in worker processes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from coordinator import jobs, pretrain_report, profile_report
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiment import read
from coordinator.jobs import Job, JobFailed
from coordinator.pretrain_config import Pretraining, resolve
from coordinator.pretrain_queue import Queue
from coordinator.rounds.events import Clock
from edge_client.files import write_durably
from models import options
from models.pretrain.server.settings import Servers

CONFIG, REPORT, LINEAGE, MODEL = "config.toml", "report.json", "lineage.json", "model.json"
MODEL_KEYS = ("input_shape", "classes", "input_dtype", "task")


class Watcher(Protocol):
    """Who watches a training."""

    def stage(self, words: str) -> None: ...

    def note(self, words: str) -> None: ...

    def trained(self, line: Mapping[str, Any]) -> None:
        """A worker's progress: `step` of `steps`, `loss`, `lr`, `seconds`."""


class Nobody:
    """A watcher that does not look."""

    def stage(self, words: str) -> None: ...

    def note(self, words: str) -> None: ...

    def trained(self, line: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Surroundings:
    """What a pretraining takes from outside its configuration.

    Attributes:
        queue: where it waits for processes; without one it starts as many as it needs, at once.
    """

    data_dir: Path | None = None
    watcher: Watcher = Nobody()  # noqa: RUF009 - holds no state
    clock: Clock = lambda: datetime.now(UTC)
    queue: Queue | None = None


def pretrain(config: Pretraining, out: Path, surroundings: Surroundings) -> dict[str, Any]:
    """Trains into the empty or new folder `out` and returns the report.

    Raises:
        UserError: something in the configuration or its data is wrong, or `out` is not empty.
        RunInterrupted: the training stopped for another reason; it can be resumed.
    """
    _check_turn(config, surroundings)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"--out {out}: the folder is not empty; name another one, or go on with: fedloop pretrain --resume {out}"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_durably(out / CONFIG, config.to_toml().encode())
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    return _run(config, out, surroundings)


def resume(out: Path, surroundings: Surroundings) -> dict[str, Any]:
    """Goes on with the pretraining in `out` from its last checkpoint; a finished one only returns its report.

    Raises:
        UserError: `out` holds no pretraining.
        RunInterrupted: as `pretrain`.
    """
    path = out / CONFIG
    if not path.exists():
        raise UserError(f"--resume {out}: there is no pretraining here (no {CONFIG})")
    if is_finished(out):
        report: dict[str, Any] = json.loads((out / REPORT).read_text("utf-8"))
        return report
    config = resolve(read(path), str(path))
    _check_turn(config, surroundings)
    return _run(config, out, surroundings)


def is_finished(out: Path) -> bool:
    """Whether the pretraining in `out` has its report."""
    return (out / REPORT).exists()


def check(config: Pretraining, data: Mapping[str, Any]) -> dict[str, Any]:
    """The model's sizes, if it can follow the plan.

    Raises:
        UserError: it cannot, with every reason.
    """
    with tempfile.TemporaryDirectory(prefix="fedloop-") as folder, _refusals():
        return jobs.run(_job("check", config, data, Path(folder)), Path(folder))


def plan(config: Pretraining, planner: Mapping[str, Any], surroundings: Surroundings) -> dict[str, Any]:
    """The plans that `planner["processes"]` processes could follow, fastest first, from a profile of a few steps.

    `planner` are keys of the planner's settings; the configuration's own `[plan]` fixes what it names.

    Raises:
        UserError: the model, the data or what is fixed leaves no plan.
    """
    watcher = surroundings.watcher
    with tempfile.TemporaryDirectory(prefix="fedloop-") as name:
        folder = Path(name)
        watcher.stage(f"loading {config.data.dataset}")
        data = load_data(config, folder / "data", surroundings)
        watcher.stage(f"profiling {config.model.name} on this machine")
        job = _job("plan", config, data, folder / "data" / "arrays")
        job = replace(job, plan=fixed_by(config), more={**job.more, "planner": dict(planner)})
        with _refusals():
            return jobs.run(job, folder, watcher.trained, surroundings.clock)


def tune(config: Pretraining, tuner: Mapping[str, Any], surroundings: Surroundings) -> dict[str, Any]:
    """Learning rate, warm-up and batch size found by short trainings (`models.pretrain.planner.tune`).

    `tuner` are keys of its settings.

    Raises:
        UserError: the model, the data or the settings are wrong.
    """
    watcher = surroundings.watcher
    with tempfile.TemporaryDirectory(prefix="fedloop-") as name:
        folder = Path(name)
        watcher.stage(f"loading {config.data.dataset}")
        data = load_data(config, folder / "data", surroundings)
        watcher.stage(f"trying options of {config.model.name}")
        job = _job("tune", config, data, folder / "data" / "arrays")
        job = replace(job, plan={}, processes=1, more={**job.more, "tune": dict(tuner)})
        with _refusals():
            return jobs.run(job, folder, watcher.trained, surroundings.clock)


def fixed_by(config: Pretraining) -> dict[str, Any]:
    """What of its plan a configuration has chosen: everything but the degrees of one."""
    return {key: value for key, value in config.plan.items() if value != 1}


def load_data(config: Pretraining, folder: Path, surroundings: Surroundings) -> dict[str, Any]:
    """The data of a pretraining as arrays in `folder`, and what was found; one that is complete is taken up.

    Raises:
        UserError: the data or its description is wrong.
    """
    done = jobs.read(folder)
    if done is not None and done.state == "finished":
        return jobs.resume(folder)
    return load_arrays(config.data.model_dump(exclude_none=True), config.seed, folder, surroundings)


def load_arrays(
    asked: Mapping[str, Any], seed: int, folder: Path, surroundings: Surroundings
) -> dict[str, Any]:
    """A data set (see `models.datasets.worker`) as `folder`/arrays, and what was found.

    Raises:
        UserError: the data or its description is wrong.
    """
    where = {"data_dir": str(surroundings.data_dir.absolute())} if surroundings.data_dir else {}
    job = Job("load", {}, {}, seed=seed, more={"data": {**asked, **where}})
    with _refusals():
        return jobs.run(job, folder, clock=surroundings.clock)


def read_arrays(out: Path) -> dict[str, npt.NDArray[Any]]:
    """What the pretraining in `out` was trained and tested on, mapped into memory.

    Raises:
        UserError: it is gone.
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
    """Token files as the rows that a training takes from them."""
    found = {}
    for part in ("train", "test"):
        tokens = np.load(folder / f"tokens_{part}.npy", mmap_mode="r", allow_pickle=False)
        rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
        found[f"x_{part}"] = rows[:, :-1].astype(np.int32)
        found[f"y_{part}"] = rows[:, 1:].astype(np.int32)
    return found


def _run(config: Pretraining, out: Path, surroundings: Surroundings) -> dict[str, Any]:
    watcher = surroundings.watcher
    with _resumable(out):
        try:
            watcher.stage(f"loading {config.data.dataset}")
            data = load_data(config, out / "data", surroundings)
            for line in data["preview"]:
                watcher.note(line)
            begun = jobs.read(out) is not None
            if not begun:
                watcher.stage("checking the plan")
                checked = check(config, data)
                write_durably(out / "checked.json", json.dumps(checked).encode())
        except UserError:
            if jobs.read(out) is None:
                _empty(out)  # so that the command can be given again once the mistake is mended
            raise
        checked = json.loads((out / "checked.json").read_text("utf-8"))
        for line in _scaled(config, data):
            watcher.note(line)
        watcher.stage(
            f"training {config.model.name}, {checked['parameters']:,} parameters, {_processes(config)}"
        )
        result = _in_turn(
            config,
            _job("pretrain" if config.server is None else "serve", config, data, out / "data" / "arrays"),
            out,
            surroundings,
        )
        watcher.stage("writing the report")
        return _report(config, data, result, out)


def _scaled(config: Pretraining, data: Mapping[str, Any]) -> list[str]:
    """What `[scaling]` makes of the options of the training, in words."""
    if config.scaling is None:
        return []
    after = asdict(config.options(data["rows"]["train"]))
    return [
        f"train.{key}: {config.train[key]:g} -> {value:g}, for {config.train['batch_size']} rows a batch, not "
        f"{config.scaling.base_batch_size}"
        for key, value in after.items()
        if value != config.train[key]
    ]


def _check_turn(config: Pretraining, surroundings: Surroundings) -> None:
    """Refuses what would wait in the queue for ever."""
    if surroundings.queue is not None:
        saves = config.checkpoint.every > 0 and config.server is None
        surroundings.queue.check(config.parallel_plan.processes, saves=saves)


def _in_turn(config: Pretraining, job: Job, out: Path, surroundings: Surroundings) -> dict[str, Any]:
    """The result of the training, begun or gone on with in `out`, as often as the queue has it make room."""
    watcher = surroundings.watcher

    def attempt(beside: jobs.Beside) -> dict[str, Any]:
        if jobs.read(out) is None:
            return jobs.run(job, out, watcher.trained, surroundings.clock, beside)
        return jobs.resume(out, watcher.trained, surroundings.clock, beside)

    if surroundings.queue is None:
        return attempt(lambda stop: nullcontext())
    return surroundings.queue.run(str(out), job.processes, attempt, watcher.stage)


def _processes(config: Pretraining) -> str:
    if config.server is not None:
        return f"with a parameter server: {options.read(Servers, config.server, 'server')}"
    plan = config.parallel_plan
    return f"on {plan.processes} process{'es' * (plan.processes > 1)}: {plan}"


def _job(stage: jobs.Stage, config: Pretraining, data: Mapping[str, Any], arrays: Path) -> Job:
    more: dict[str, Any] = {}
    if config.checkpoint.every and config.server is None:
        more["checkpoint"] = config.checkpoint.model_dump()
    if config.server is None:
        more["hang_seconds"] = config.hang_seconds
    if config.profile is not None:
        more["profile"] = config.profile
    if config.model.init is not None:
        more["init"] = {"params": config.model.init, "head": config.model.head or "same"}
    if "tokens" in data:
        more["tokens"] = {part: str((arrays / name).absolute()) for part, name in data["tokens"].items()}
    if config.server is not None:
        more["server"] = config.server
    plan = config.parallel_plan
    return Job(
        stage,
        model_of(config, data),
        arrays,
        options=asdict(config.options(data["rows"]["train"])),
        seed=config.seed,
        processes=plan.processes,
        plan=config.plan,
        more=more,
    )


def model_of(config: Pretraining, data: Mapping[str, Any]) -> dict[str, Any]:
    """The model as job files describe it."""
    shape = {key: data[key] for key in MODEL_KEYS}
    return {"name": config.model.name, "options": config.model.options, **shape}


def _report(
    config: Pretraining, data: Mapping[str, Any], result: Mapping[str, Any], out: Path
) -> dict[str, Any]:
    """Writes everything that is told of a training, the report last: where it is, the training is finished."""
    model = {**model_of(config, data), "class_names": data["class_names"], "sha256": result["model_sha256"]}
    _write(out / MODEL, model)
    lineage = _lineage(config, data, result)
    _write(out / LINEAGE, lineage)
    losses = result["losses"]
    pretrain_report.draw_curve(out / "curves.png", config.name, pretrain_report.read_curve(out, losses))
    record = jobs.read(out)
    document = {
        "config": config.model_dump(mode="json", exclude_none=True),
        "data": {key: data[key] for key in ("fingerprint", "rows", *MODEL_KEYS, "preview")},
        "plan": result["plan"],
        "processes": result["world_size"],
        "steps": len(losses),
        "attempts": record.attempts if record else 1,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "final": {key: result[key] for key in ("test_accuracy", "test_loss", "parameters", "bytes", "model_sha256")},
        "about": {key: value for key, value in result.items() if key in _ABOUT},
        "lineage": lineage,
    }  # fmt: skip
    if config.profile is not None:
        document["profile"] = _profile(out / config.profile.get("folder", "profile"))
    _write(out / REPORT, document)
    return document


def _profile(folder: Path) -> dict[str, Any] | None:
    """Where the page of a profile is and what it says; None where a resumed training was too short for one."""
    if not (folder / "profile.json").exists():
        return None
    found = json.loads((folder / "profile.json").read_text("utf-8"))
    return {"page": str(profile_report.write_page(folder)), **profile_report.figures(found)}


_ABOUT = ("device", "backend", "seconds", "restarts", "stall_seconds")


def _lineage(config: Pretraining, data: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Where a model comes from: all that decides its numbers, by hash."""
    document = config.model_dump(mode="json", exclude_none=True)
    parent = config.model.init
    return {
        "model_sha256": result["model_sha256"],
        "parent": {"path": parent, "sha256": sha256_of(Path(parent))} if parent else None,
        "data_fingerprint": data["fingerprint"],
        "config_sha256": hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest(),
        "code_version": version("fedloop"),
        "plan": result["plan"],
        "seed": config.seed,
    }


def sha256_of(path: Path) -> str:
    """Of a file's bytes, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_durably(path, (json.dumps(document, indent=2) + "\n").encode())


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _refusals() -> Iterator[None]:
    """What a worker finds wrong before the training begins is the user's to mend."""
    try:
        yield
    except JobFailed as error:
        raise UserError(error.reason) from None


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    """Turns what stops a training from outside into words that say how to go on."""
    how = f"go on with: fedloop pretrain --resume {out}"
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterrupted(f"interrupted; {how}") from None
    except JobFailed as error:
        raise RunInterrupted(f"{error}; {how}") from None
    except OSError as error:
        raise RunInterrupted(f"{error}; {how}") from None
