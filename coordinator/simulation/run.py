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
from typing import Any

import numpy as np

from coordinator import adapting, planning, report
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiment import COHORT, Experiment, read, resolve
from coordinator.fleets.simulated import SimulatedFleet
from coordinator.parts import problems_with
from coordinator.progress import Progress, Quiet
from coordinator.rounds import engine
from coordinator.rounds.checkpoint import Checkpoints, Committed
from coordinator.rounds.engine import RoundRecord, RunState, Score
from coordinator.rounds.events import Clock, EventLog
from coordinator.rounds.plan import RunPlan
from coordinator.simulation.evaluation import accuracy_by_group, evaluate
from coordinator.simulation.pool import TORCH, WorkerDied, WorkerPool
from coordinator.simulation.preparation import Prepared, prepare
from coordinator.simulation.virtual_time import virtual_time
from edge_client.files import write_durably
from strategies.params import Params, ShapeMismatch, Tensors, require_same_shapes


@dataclass(frozen=True)
class Surroundings:
    """What a run takes from outside its experiment. `data_dir`: where data files lie."""

    data_dir: Path | None = None
    progress: Progress = Quiet()  # noqa: RUF009 - holds no state
    clock: Clock = lambda: datetime.now(UTC)
    monotonic: Callable[[], float] = time.monotonic


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
        shutil.rmtree(out / "work", ignore_errors=True)  # it may have been killed in between
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
    work = out / "work"
    with _resumable(out), _locked(out), _pool(experiment, work) as pool:
        _sweep(out)
        checkpoints = Checkpoints(out / "checkpoint")
        committed = checkpoints.load()
        prepared = prepare(experiment, work, pool, surroundings.data_dir, surroundings.progress)
        if (wanted := experiment.model.register_as) is not None:
            surroundings.progress.note(
                f"model.register is ignored: a simulation has no registry; afterwards: fedloop model add {out} --name {wanted.model}"
            )
        identity = {"data": prepared.found["fingerprint"], "experiment": _identity(experiment)}
        identity |= adapting.fingerprint(experiment, work)
        if committed is not None:
            _require_same(committed, prepared, identity, out)
        state = _rounds(experiment, out, pool, prepared, checkpoints, committed, identity, surroundings)
        surroundings.progress.stage("writing the report")
        test_rows = np.load(work / "test_rows.npy", allow_pickle=False)
        sites = np.load(work / "sites.npy", allow_pickle=False)
        final = evaluate(pool, len(test_rows), state.params)
        of_rows = sites[test_rows] if sites.size else None
        model = adapting.whole(experiment, state.params, work)
        written = report.write(out, experiment, prepared.found, prepared.clients, model, final, of_rows)
    shutil.rmtree(work)
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
    run_plan = planning.run_plan(
        experiment, prepared.trainable, _cohort_size(experiment, len(prepared.clients))
    )
    fleet = _fleet(experiment, pool, prepared)
    lines = report.open_lines(out, committed)
    emit = EventLog(lines["events.jsonl"], surroundings.clock)
    owners = np.load(out / "work" / "owners.npy", allow_pickle=False)
    names = [client.name for client in prepared.clients]

    def score(number: int, params: Tensors) -> Score:
        scored = evaluate(pool, len(owners), params)
        clients = accuracy_by_group(scored, owners, names)
        return Score(
            scored.loss, scored.accuracy, {n: value for n, value in clients.items() if value is not None}
        )

    if committed is None:
        start = _begun(prepared, run_plan)
        told = {
            "clients": len(prepared.clients),
            "rounds": run_plan.rounds,
            **_figures(score(0, start.params)),
        }
        emit("run_started", experiment=experiment.name, **told)
    else:
        start = RunState(committed.round, committed.params, committed.state)
        fleet.restore(committed.client_states)
        if lines["events.jsonl"].size_bytes == committed.offsets["events.jsonl"]:
            engine.tell_committed(emit, committed.record)  # it was killed before it could
        emit("run_resumed", experiment=experiment.name, round=committed.round)

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
        engine.tell_committed(emit, engine.as_row(record))

    surroundings.progress.begin(run_plan.rounds, start.round)
    try:
        return engine.run(
            run_plan,
            fleet,
            start,
            evaluate=score,
            commit=commit,
            finished=finished,
            emit=emit,
            monotonic=surroundings.monotonic,
        )
    finally:
        for file in lines.values():
            file.close()


def _begun(prepared: Prepared, run_plan: RunPlan) -> RunState:
    params = prepared.params
    return RunState(0, params, run_plan.strategy.init(params, prepared.trainable))


def _figures(score: Score) -> dict[str, float | None]:
    return {"test_loss": score.loss, "test_accuracy": score.accuracy}


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


def _identity(experiment: Experiment) -> str:
    """Hash of what decides the outcome: all but the number of rounds and of workers, and what is for devices."""
    document = experiment.model_dump(mode="json", exclude_none=True)
    del document["federation"]["rounds"], document["simulation"]["workers"], document["devices"]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _require_same(committed: Committed, prepared: Prepared, identity: Mapping[str, str], out: Path) -> None:
    if committed.identity["experiment"] != identity["experiment"]:
        raise UserError(
            f"{out / 'experiment.toml'} was changed since the run began; only federation.rounds and "
            "simulation.workers may change on --resume"
        )
    if committed.identity["data"] != identity["data"]:
        raise UserError(f"--resume {out}: the data is not what the run began with (its fingerprint differs)")
    if committed.identity.get("backbone") != identity.get("backbone"):
        raise UserError(
            f"--resume {out}: the frozen backbone is not what the run began with; was model.init replaced?"
        )
    try:
        require_same_shapes(committed.params, prepared.params)
    except ShapeMismatch as error:
        raise UserError(
            f"--resume {out}: the model's code was changed since the run began: {error}"
        ) from None


def _pool(experiment: Experiment, work: Path) -> WorkerPool:
    work.mkdir(exist_ok=True)
    size = experiment.simulation.workers or len(os.sched_getaffinity(0))
    return WorkerPool(size, work / "workers.log", TORCH)


def _sweep(out: Path) -> None:
    """Removes half-written files that a kill in the middle of a write has left."""
    for leftover in [*out.glob(".*.tmp"), *out.glob("checkpoint/**/.*.tmp")]:
        leftover.unlink(missing_ok=True)


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
