"""A whole federation on one machine, from the experiment to the report.

    1. the folder: write the resolved experiment down, take the lock
    2. the data: load and partition it in a worker
    3. the model: initial params, and its artifact when LiteRT clients take part
    4. the rounds: the same engine as on a real fleet, over a simulated one
    5. the report

Everything that imports a framework or runs a user's code happens in worker processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from coordinator import report
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiment import COHORT, Experiment, Runtime, read, resolve
from coordinator.fleets.simulated import SimulatedClient, SimulatedFleet
from coordinator.parts import problems_with
from coordinator.rounds import engine
from coordinator.rounds.checkpoint import Checkpoints, Committed
from coordinator.rounds.engine import RoundRecord, RunState, Score
from coordinator.rounds.events import Clock, EventLog
from coordinator.rounds.plan import LocalWork, RunPlan, generator
from coordinator.simulation import faults
from coordinator.simulation.frames import Frame
from coordinator.simulation.pool import Job, WorkerDied, WorkerPool
from coordinator.simulation.virtual_time import virtual_time
from edge_client.train.trainer import EVALUATION_ROWS, Evaluation, merged
from edge_client.wire import arrays
from models.export import request as export_request
from models.files import write_durably
from strategies import presets
from strategies.params import Params, ShapeMismatch, require_same_shapes

_CHUNK_ROWS = 4 * EVALUATION_ROWS
"""Test rows in one evaluation job; fixed, so that sums do not depend on the number of workers."""


class Progress(Protocol):
    """Hears how a run goes on."""

    def stage(self, words: str) -> None: ...

    def note(self, words: str) -> None: ...

    def begin(self, rounds: int, done: int) -> None: ...

    def round(self, record: RoundRecord) -> None: ...


class Quiet:
    """Progress that nobody watches."""

    def stage(self, words: str) -> None: ...

    def note(self, words: str) -> None: ...

    def begin(self, rounds: int, done: int) -> None: ...

    def round(self, record: RoundRecord) -> None: ...


@dataclass(frozen=True)
class Surroundings:
    """What a run takes from outside its experiment. `data_dir`: where data files lie."""

    data_dir: Path | None = None
    progress: Progress = Quiet()  # noqa: RUF009 - holds no state
    clock: Clock = lambda: datetime.now(UTC)
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Prepared:
    """Data and model of a run, ready in the pool."""

    found: Mapping[str, Any]
    clients: tuple[SimulatedClient, ...]
    params: Params
    trainable: tuple[str, ...]


def simulate(experiment: Experiment, out: Path, surroundings: Surroundings) -> dict[str, Any]:
    """Runs an experiment into the empty or new folder `out` and returns its report.

    Raises:
        UserError: something in the experiment or its data is wrong, or `out` is not empty.
        RunInterrupted: the run stopped for another reason; what was committed can be resumed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"--out {out}: the folder is not empty; name another one, or go on with: fedloop simulate --resume {out}"
        )
    if lacking := problems_with(experiment.federation.runtimes):
        raise UserError("\n".join(lacking))
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_durably(out / "experiment.toml", experiment.to_toml().encode())
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    try:
        return _run(experiment, out, surroundings)
    except UserError:
        if not (out / "checkpoint" / "checkpoint.json").exists():
            _empty(out)  # so that the command can be given again once the mistake is mended
        raise


def resume(out: Path, surroundings: Surroundings) -> dict[str, Any]:
    """Goes on with the run in `out` from its last committed round; a finished run only returns its report.

    Raises:
        UserError: `out` holds no run, or its experiment or data were changed since.
        RunInterrupted: as `simulate`.
    """
    path = out / "experiment.toml"
    if not path.exists():
        raise UserError(f"--resume {out}: there is no run here (no experiment.toml)")
    if is_finished(out):
        finished: dict[str, Any] = json.loads((out / "report.json").read_text("utf-8"))
        return finished
    return _run(resolve(read(path), str(path)), out, surroundings)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_finished(out: Path) -> bool:
    """Whether the run in `out` has its report."""
    return (out / "report.json").exists()


def _run(experiment: Experiment, out: Path, surroundings: Surroundings) -> dict[str, Any]:
    with _resumable(out), _locked(out), _pool(experiment, out) as pool:
        checkpoints = Checkpoints(out / "checkpoint")
        committed = checkpoints.load()
        prepared = _prepare(experiment, out, pool, surroundings)
        identity = {"data": prepared.found["fingerprint"], "experiment": _identity(experiment)}
        if committed is not None:
            _require_same(committed.identity, identity, out)
        state = _rounds(experiment, out, pool, prepared, checkpoints, committed, identity, surroundings)
        surroundings.progress.stage("writing the report")
        final = _evaluate(pool, len(_test_rows(out)), state.params)
        written = report.write(
            out, experiment, prepared.found, prepared.clients, state.params, final, _sites(out)
        )
    shutil.rmtree(out / "work")
    return written


def _rounds(
    experiment: Experiment,
    out: Path,
    pool: WorkerPool,
    prepared: Prepared,
    checkpoints: Checkpoints,
    committed: Committed | None,
    identity: Mapping[str, str],
    surroundings: Surroundings,
) -> RunState:
    run_plan = _plan(experiment, prepared)
    fleet = _fleet(experiment, pool, prepared)
    lines = report.open_lines(out, committed)
    emit = EventLog(lines["events.jsonl"], surroundings.clock)
    if committed is None:
        start = RunState(0, prepared.params, run_plan.strategy.init(prepared.params, prepared.trainable))
        emit("run_started", experiment=experiment.name, clients=len(prepared.clients), rounds=run_plan.rounds)
    else:
        start = RunState(committed.round, committed.params, committed.state)
        fleet.restore(committed.client_states)
        if lines["events.jsonl"].size_bytes == committed.offsets["events.jsonl"]:
            engine.tell_committed(emit, committed.record)  # it was killed before it could
        emit("run_resumed", experiment=experiment.name, round=committed.round)
    owners = np.load(out / "work" / "owners.npy", allow_pickle=False)
    names = [client.name for client in prepared.clients]

    def evaluate(params: Params) -> Score:
        scored = _evaluate(pool, len(owners), params)
        return Score(scored.loss, scored.accuracy, _by_group(scored, owners, names))

    def commit(state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]) -> None:
        for file in lines.values():
            file.sync()
        offsets = {name: file.size_bytes for name, file in lines.items()}
        now = Committed(
            state.round, state.params, state.strategy, engine.as_row(record), offsets, identity, clients
        )
        checkpoints.commit(now)

    def finished(record: RoundRecord) -> None:
        report.append_round(lines["rounds.csv"], record)
        surroundings.progress.round(record)

    surroundings.progress.begin(run_plan.rounds, start.round)
    try:
        return engine.run(
            run_plan,
            fleet,
            start,
            evaluate=evaluate,
            commit=commit,
            finished=finished,
            emit=emit,
            monotonic=surroundings.monotonic,
        )
    finally:
        for file in lines.values():
            file.close()


def _prepare(experiment: Experiment, out: Path, pool: WorkerPool, surroundings: Surroundings) -> Prepared:
    pool.tell({"kind": "warm"})
    surroundings.progress.stage("loading and partitioning the data")
    found = _prepare_data(experiment, out, pool, surroundings.data_dir)
    for line in found["preview"]:
        surroundings.progress.note(line)
    clients = _clients(experiment, found)
    model = {
        "name": experiment.model.name,
        "options": experiment.model.options,
        "input_shape": found["input_shape"],
        "classes": found["classes"],
        "input_dtype": found["input_dtype"],
        "task": found["task"],
    }
    surroundings.progress.stage("building the model")
    made = pool.one({"kind": "initial", "model": model, "seed": experiment.seed})
    params = arrays.decode(made.blobs[0])
    if "tensorflow" in experiment.federation.runtimes and not made.values["twin"]:
        raise UserError(
            f"federation.runtimes asks for tensorflow, but model.name = {experiment.model.name!r} has no TensorFlow "
            "twin; its builder may return a ModelSpec with tensorflow_twin, or leave tensorflow out"
        )
    if experiment.model.init is not None:
        params = _starting_params(Path(experiment.model.init), params)
    if any(client.runtime == "litert" for client in clients):
        surroundings.progress.stage("exporting the model to LiteRT")
        exported = _export(experiment, found)
        model |= {"tflite": str(exported.tflite), "manifest": str(exported.manifest)}
    pool.tell({"kind": "open", "folder": str(out / "work"), "model": model})
    return Prepared(found, clients, params, tuple(made.values["trainable"]))


def _prepare_data(
    experiment: Experiment, out: Path, pool: WorkerPool, data_dir: Path | None
) -> dict[str, Any]:
    done = out / "work" / "found.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text("utf-8"))
        return found
    request = {
        "kind": "prepare",
        "folder": str(out / "work"),
        "seed": experiment.seed,
        "data": experiment.data.model_dump(),
        "clients": experiment.federation.clients,
        "data_dir": str(data_dir) if data_dir else None,
    }
    return pool.one(request).values


def _clients(experiment: Experiment, found: Mapping[str, Any]) -> tuple[SimulatedClient, ...]:
    names: list[str] = found["clients"]
    faulty = faults.assign(experiment.simulation.faults, names, experiment.seed)
    runtimes = assign_runtimes(experiment.federation.runtimes, len(names), experiment.seed)
    return tuple(
        SimulatedClient(name, index, found["examples"][index], runtimes[index], faulty.get(name))
        for index, name in enumerate(names)
    )


def assign_runtimes(shares: Mapping[Runtime, float], count: int, seed: int) -> list[str]:
    """A runtime for each of `count` clients: shares by largest remainder, dealt out in an order drawn by `seed`."""
    total = sum(shares.values())
    exact = {name: share / total * count for name, share in sorted(shares.items())}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: count - sum(counts.values())]:
        counts[name] += 1
    dealt = [name for name in counts for _ in range(counts[name])]
    return [dealt[index] for index in generator(seed, "runtimes").permutation(count)]


def _starting_params(path: Path, built: Params) -> Params:
    """The params of a safetensors file, checked against the model's."""
    try:
        given = arrays.decode(path.read_bytes())
        require_same_shapes(given, built)
    except OSError as error:
        raise UserError(f"model.init = {str(path)!r}: {error.strerror}") from None
    except (arrays.Malformed, ShapeMismatch) as error:
        raise UserError(f"model.init = {str(path)!r} does not fit the model: {error}") from None
    return {name: value.astype(np.float32) for name, value in given.items()}


def _export(experiment: Experiment, found: Mapping[str, Any]) -> export_request.Exported:
    asked = export_request.ExportRequest(
        model=experiment.model.name or "",
        options=experiment.model.options,
        input_shape=tuple(found["input_shape"]),
        classes=found["classes"],
        input_dtype=found["input_dtype"],
        task=found["task"],
        batch_size=experiment.local.batch_size,
    )
    try:
        return export_request.export(asked, export_request.default_cache_dir(), code_folder=Path.cwd())
    except export_request.ExportError as error:
        raise UserError(
            f"model {experiment.model.name!r} cannot be exported for LiteRT clients: {error}; "
            "without them: --set 'federation.runtimes={torch=1}'"
        ) from None


def _plan(experiment: Experiment, prepared: Prepared) -> RunPlan:
    federation, local = experiment.federation, experiment.local
    return RunPlan(
        seed=experiment.seed,
        rounds=federation.rounds,
        strategy=presets.get(experiment.strategy.name, **experiment.strategy.options),
        local=LocalWork(local.batch_size, local.lr, local.epochs, local.steps),
        trainable=prepared.trainable,
        clients_per_round=_cohort_size(experiment, len(prepared.clients)),
        over_select=federation.over_select,
        deadline_seconds=federation.deadline_seconds,
        min_updates=federation.min_updates,
    )


def _cohort_size(experiment: Experiment, clients: int) -> int:
    """Clients per round; known only now where the clients are the sites of the data."""
    asked = experiment.federation.clients_per_round or min(COHORT, clients)
    if asked > clients:
        raise UserError(
            f"federation.clients_per_round = {asked} is more than the {clients} sites that data.partition = "
            f'"natural" gives; expected 1 to {clients}'
        )
    return asked


def _fleet(experiment: Experiment, pool: WorkerPool, prepared: Prepared) -> SimulatedFleet:
    simulation = experiment.simulation
    clock = virtual_time(
        [client.name for client in prepared.clients],
        experiment.seed,
        seconds_per_step=simulation.seconds_per_step,
        spread=simulation.speed_spread,
        dropout=simulation.dropout,
    )
    return SimulatedFleet(pool, prepared.clients, clock)


def _evaluate(pool: WorkerPool, test_rows: int, params: Params) -> Evaluation:
    """The params on all test rows, by chunks in worker processes, put together in row order."""
    encoded = arrays.encode(params)
    starts = range(0, test_rows, _CHUNK_ROWS)
    jobs = [
        Job(start, {"kind": "evaluate", "start": start, "stop": start + _CHUNK_ROWS}, (encoded,))
        for start in starts
    ]
    parts = {job.key: _scored(reply) for job, reply in pool.run(jobs)}
    return merged(parts[start] for start in starts)


def _scored(reply: Frame) -> Evaluation:
    counts = arrays.decode(reply.blobs[0])
    correct, labels = (counts[name].astype(np.int64) for name in ("correct", "labels"))
    return Evaluation(reply.values["loss_sum"], correct, labels)


def _by_group(scored: Evaluation, group: Any, names: list[str]) -> dict[str, float]:
    """Accuracy per group of test rows, for groups that have any."""
    correct = np.bincount(group, weights=scored.correct, minlength=len(names))
    labels = np.bincount(group, weights=scored.labels, minlength=len(names))
    return {name: float(correct[i] / labels[i]) for i, name in enumerate(names) if labels[i]}


def _test_rows(out: Path) -> Any:
    return np.load(out / "work" / "test_rows.npy", allow_pickle=False)


def _sites(out: Path) -> Any:
    return (
        np.load(out / "work" / "sites.npy", allow_pickle=False)[_test_rows(out)] if _has_sites(out) else None
    )


def _has_sites(out: Path) -> bool:
    return bool(np.load(out / "work" / "sites.npy", allow_pickle=False).size)


def _identity(experiment: Experiment) -> str:
    """Hash of what decides the outcome: all but the number of rounds and of workers."""
    document = experiment.model_dump(mode="json")
    del document["federation"]["rounds"], document["simulation"]["workers"]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _require_same(committed: Mapping[str, str], now: Mapping[str, str], out: Path) -> None:
    if committed["experiment"] != now["experiment"]:
        raise UserError(
            f"{out / 'experiment.toml'} was changed since the run began; only federation.rounds and "
            "simulation.workers may change on --resume"
        )
    if committed["data"] != now["data"]:
        raise UserError(f"--resume {out}: the data is not what the run began with (its fingerprint differs)")


def _pool(experiment: Experiment, out: Path) -> WorkerPool:
    size = experiment.simulation.workers or len(os.sched_getaffinity(0))
    (out / "work").mkdir(exist_ok=True)
    return WorkerPool(size, out / "work" / "workers.log")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keeps a second process out of the folder; the kernel lets go of the lock when this one ends."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out}: another process is running this experiment") from None
        yield


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    """Turns what stops a run from outside into words that say how to go on."""
    how = f"nothing committed is lost; go on with: fedloop simulate --resume {out}"
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterrupted(f"interrupted; {how}") from None
    except WorkerDied as error:
        raise RunInterrupted(f"{error}\n{how}") from None
    except OSError as error:
        raise RunInterrupted(f"{error}; {how}") from None
