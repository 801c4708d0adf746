"""One run from wherever it is to its end: prepare if that was not done, then the rounds that are missing.

`commit` is the moment a round counts: params and strategy state are durable blobs first, then one transaction names
them, closes the round and tells of it. Killed before, the round is taken up again with the updates accepted so far;
killed after, the next round begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection

from coordinator import adapting, admission, failpoints, finishing, planning, preparing
from coordinator.db import events
from coordinator.db import runs as rows
from coordinator.experiment import COHORT, Experiment
from coordinator.federated_evaluation import Devices, Federated, summed
from coordinator.fleets.deployments import Deployment, Selection
from coordinator.fleets.fleet import Stopped
from coordinator.json_values import finite
from coordinator.preparing import HeldOut, Prepared
from coordinator.rounds import engine
from coordinator.rounds.checkpoint import keep_in
from coordinator.rounds.engine import RoundRecord, RunState, Score
from coordinator.services import Services
from coordinator.simulation.pool import WorkerPool
from strategies.params import Params, Tensors
from strategies.state import State

_log = structlog.get_logger("fedloop.runs")

_RECORDED_BY_THE_DEVICE_API = ("update_accepted", "update_rejected")
"""Events that are written in the transaction that decides on the update."""


class LiveRun:
    """A run in the hands of the thread that calls it.

    `pool` makes the worker processes; it is called at most once, and only if they are needed.
    """

    def __init__(
        self,
        services: Services,
        run: str,
        folder: Path,
        monotonic: Callable[[], float],
        pool: Callable[[], WorkerPool],
    ) -> None:
        self._services = services
        self._run = run
        self._folder = folder
        self._monotonic = monotonic
        self._make_pool = pool
        self._row = self._read()
        self._experiment = Experiment.model_validate(self._row.experiment)
        self._held = ExitStack()
        self._moves_from: tuple[str, str] = ("", "")
        self._held_out: HeldOut | None = None
        self._scored: Federated | None = None
        self._per_site: Mapping[str, Any] = {}

    def known(self) -> Deployment | None:
        """The run as the fleet must know it, where an earlier process prepared it.

        Devices that come while data and model are opened again are then held, not sent away.
        """
        return (
            self._deployment(preparing.read(self._row.prepared)) if self._row.prepared is not None else None
        )

    def prepare(self) -> tuple[Deployment, float]:
        """The run as the fleet must know it, and how many seconds to wait for devices.

        Raises:
            UserError: the data or the model is wrong, changed since the run began, or is not allowed any more.
            BlobDamaged: the artifact that devices fetch is no longer what it was.
            Stopped: the run was cancelled meanwhile.
        """
        admission.require_code(self._experiment, self._services.settings)
        if self._row.prepared is None:
            prepared = self._prepare()
        else:
            prepared = preparing.read(self._row.prepared)
            for ref in (prepared.artifact, prepared.manifest):
                if ref is not None:
                    self._services.blobs.require_whole(ref.sha256)
            if prepared.data is not None:
                self._open(prepared, self._make_pool())
            self._emit("run_resumed", round=self._row.round)
        self._prepared = prepared
        self._row = self._read()
        return self._deployment(prepared), self._experiment.devices.patience_seconds

    def rounds(self, fleet: Devices) -> None:
        """Carries the run through to its last round and ends it.

        Raises:
            Stopped: it was cancelled, or the process is ending.
        """
        experiment = self._experiment
        cohort = experiment.federation.clients_per_round or COHORT
        run_plan = planning.run_plan(experiment, self._prepared.trainable, cohort)
        with self._held:
            engine.run(
                run_plan,
                fleet,
                self._start(),
                evaluate=partial(self._evaluate, fleet),
                commit=self._commit,
                finished=self._told,
                emit=self._emit,
                monotonic=self._monotonic,
                keep=self._keep,
            )
        with self._services.blobs.naming:
            finishing.finish(self._services, self._run, self._whole(), experiment.model.register_as)
        self._services.signals.notify("events")

    def _whole(self) -> str:
        """The blob of the model that the run came to, where it trained few of its params: merged with the others."""
        blobs, last = self._services.blobs, self._read().params
        if self._experiment.model.adapt is None:
            return str(last)
        params = adapting.whole(self._experiment, blobs.open_arrays(last), self._folder)
        return blobs.put_arrays(params).sha256

    def _read(self) -> Any:
        return self._services.database.read(partial(rows.find, run=self._run))

    def _prepare(self) -> Prepared:
        services, experiment = self._services, self._experiment
        experiment = admission.admit(experiment, services)
        init = admission.init_params(experiment, services)
        pool = self._make_pool()
        place = preparing.Place(self._folder, pool, services.blobs, services.settings)
        prepared, params, notices = preparing.prepare(experiment, place, init)
        self._open(prepared, pool)
        strategy = planning.run_plan(experiment, prepared.trainable, 1).strategy
        state = strategy.init(params, prepared.trainable)
        prepared = replace(prepared, start=self._start_figures(params))
        with self._services.blobs.naming:
            digests = self._store(RunState(0, params, state))
            begun = services.database.write(
                lambda connection: rows.begin(
                    connection,
                    self._run,
                    prepared.to_json(),
                    *digests,
                    [*self._row.notices, *notices],
                    services.clock(),
                    rounds=experiment.federation.rounds,
                    **prepared.start,
                )
            ).result()
        services.signals.notify("events")
        if not begun:
            raise Stopped
        return prepared

    def _start_figures(self, params: Params) -> dict[str, Any]:
        if self._held_out is None:
            return {"test_loss": None, "test_accuracy": None, "test_rows": None}
        scored = self._held_out.score(params)
        figures = {"test_loss": scored.loss, "test_accuracy": scored.accuracy}
        return {**finite(figures), "test_rows": self._held_out.rows}

    def _open(self, prepared: Prepared, pool: WorkerPool) -> None:
        self._held_out = preparing.open_held_out(
            self._experiment, prepared, self._folder, pool, self._services.settings.data_dir
        )
        if self._held_out is None:
            pool.close()  # nothing more to do for them

    def _deployment(self, prepared: Prepared) -> Deployment:
        devices = self._experiment.devices
        return Deployment(
            run=self._run,
            run_name=self._experiment.name,
            dataset=self._experiment.data.dataset,
            model=prepared.model,
            runtimes=prepared.runtimes,
            artifact=prepared.artifact,
            manifest=prepared.manifest,
            selection=Selection(
                groups=tuple(devices.groups),
                labels=dict(devices.labels),
                device_classes=tuple(devices.classes),
                memory_bytes=devices.memory_bytes,
            ),
            quorum=self._experiment.federation.min_updates,
        )

    def _start(self) -> RunState:
        blobs = self._services.blobs
        self._moves_from = (self._row.params, self._row.strategy_state)
        params, strategy = (blobs.open_arrays(digest) for digest in self._moves_from)
        return RunState(self._row.round, params, State(strategy, strategy.header.values))

    def _evaluate(self, fleet: Devices, number: int, params: Tensors) -> Score:
        """Scores the new params: on the coordinator's rows, and on the devices' where the round asks for it."""
        failpoints.reach("round.folded")
        self._scored = self._on_devices(fleet, number, params)
        self._per_site = self._scored.per_site if self._scored else {}
        clients = self._scored.clients if self._scored else {}
        if self._held_out is not None:
            scored = self._held_out.score(params)
            self._per_site = self._per_site or self._held_out.per_site(scored)
            return Score(scored.loss, scored.accuracy, clients)
        if self._scored is not None:
            return Score(self._scored.loss, self._scored.accuracy, clients)
        return Score(None, None, {})

    def _on_devices(self, fleet: Devices, number: int, params: Tensors) -> Federated | None:
        devices, last = self._experiment.devices, self._experiment.federation.rounds
        if not devices.evaluate_every or (number % devices.evaluate_every and number != last):
            return None
        model = fleet.model(params, {})
        return summed(fleet.evaluate(number, model, devices.evaluate_seconds))

    def _keep(self, state: RunState) -> RunState:
        """What the round came to, computed piece by piece as it is written to disk, and held there.

        Raises:
            BlobDamaged: what it moves from is no longer what it was; nothing is made of that.
        """
        blobs = self._services.blobs
        for digest in self._moves_from:
            blobs.require_whole(digest)
        with self._services.blobs.naming:
            kept = keep_in(blobs)(state)
            self._moves_from = self._store(kept)
            self._held.enter_context(blobs.held(*self._moves_from))
        return kept

    def _commit(
        self, state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]
    ) -> None:
        line = engine.as_row(record) | finite(self._evaluation())
        with self._services.blobs.naming:
            params, strategy = self._store(state)
            failpoints.reach("commit.blobs_stored")
            write = partial(self._write, number=state.round, params=params, strategy=strategy, line=line)
            done, unneeded = self._services.database.write(write).result()
            self._held.close()
            if not done:
                raise Stopped
            failpoints.reach("commit.done")
            self._services.blobs.remove(unneeded)
        self._services.signals.notify("events")

    def _write(
        self, connection: Connection, number: int, params: str, strategy: str, line: Mapping[str, Any]
    ) -> tuple[bool, set[str]]:
        """The transaction of a commit; whether it counts, and the blobs that nothing needs any more."""
        before = rows.find(connection, self._run)
        assert before is not None
        now = self._services.clock()
        done = rows.commit_round(connection, self._run, number, params, strategy, line, now)
        old = rows.blobs_of_round(connection, self._run, number)
        return done, (old | {before.params, before.strategy_state}) - rows.blobs_in_use(connection)

    def _told(self, record: RoundRecord) -> None:
        _log.info(
            "round",
            run=self._run,
            round=record.round,
            accepted=record.accepted,
            rejected=record.rejected,
            test_accuracy=record.test_accuracy,
            seconds=round(record.seconds, 3),
        )

    def _evaluation(self) -> dict[str, Any]:
        """What a round's record says beyond the engine's."""
        more: dict[str, Any] = {"per_site": dict(self._per_site)} if self._per_site else {}
        if self._scored is not None:
            more["on_devices"] = self._scored.to_json()
        return more

    def _store(self, state: RunState) -> tuple[str, str]:
        """Params and strategy state as durable blobs; what is one already costs nothing."""
        blobs, strategy = self._services.blobs, state.strategy
        return (
            blobs.put_arrays(state.params).sha256,
            blobs.put_arrays(strategy.arrays, strategy.values).sha256,
        )

    def _emit(self, event: str, **values: Any) -> None:
        if event in _RECORDED_BY_THE_DEVICE_API:
            return
        device = values.pop("client", None)
        now, signals = self._services.clock(), self._services.signals
        written = self._services.database.write(
            lambda connection: events.record(connection, now, event, run=self._run, device=device, **values)
        )
        written.add_done_callback(lambda done: signals.notify("events"))
