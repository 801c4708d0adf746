"""One run on devices, from its current state to its end: prepare it unless that is done, then run the missing rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.context.services import Services
from coordinator.db import runs as rows
from coordinator.experiments import adapters, personalisation
from coordinator.experiments.defaults import COHORT
from coordinator.experiments.privacy import secure_aggregation
from coordinator.experiments.schema import Experiment
from coordinator.experiments.strategy_choice import is_own_strategy
from coordinator.experiments.validation import UNSCORED
from coordinator.fleets import federated_scale
from coordinator.reports import figures
from coordinator.rounds import asynchronous, engine
from coordinator.rounds.fleet import Stopped
from coordinator.rounds.plan import RunPlan
from coordinator.rounds.records import RunState
from coordinator.runs import admission, live_preparation
from coordinator.runs.live_evaluation import (
    AsynchronousEvaluatingFleet,
    Evaluating,
    EvaluatingFleet,
    Labels,
    LiveEvaluation,
    start_figures,
)
from coordinator.runs.live_preparation import HeldOut, Prepared
from coordinator.runs.live_store import LiveStore, finish
from coordinator.runs.model_setup import make_run_plan, positive_class, require_scores
from coordinator.runs.own_model import OwnModel
from coordinator.runs.own_strategy import make_strategy
from coordinator.runs.privacy import devices as privacy
from coordinator.scheduling.deployments import Deployment, Relaying
from coordinator.workers.pool import LITERT, TORCH, WorkerPool
from edge_client.wire import scores
from edge_client.wire.device import ModelRef
from strategies import presets
from strategies.params import Params


class LiveRun:
    """A run in the thread that calls it.

    `make_pool` starts the worker processes, which import the modules it is called with; it is called at most once, and only
    if they are needed.
    """

    def __init__(
        self,
        services: Services,
        run: str,
        folder: Path,
        monotonic: Callable[[], float],
        make_pool: Callable[[Sequence[str]], WorkerPool],
    ) -> None:
        self._services = services
        self._run = run
        self._folder = folder
        self._monotonic = monotonic
        self._make_pool = make_pool
        self._row = self._read()
        self._experiment = Experiment.model_validate(self._row.experiment)
        self._own = OwnModel.read(self._row.own_model)
        self._held_out: HeldOut | None = None
        self._pool: WorkerPool | None = None

    def known_deployment(self) -> Deployment | None:
        """The run's deployment if an earlier process prepared it.

        Devices that check in while data and model are opened again are then held, not sent away.
        """
        if self._row.prepared is None:
            return None
        return self._deployment(live_preparation.read(self._row.prepared))

    def prepare(self) -> tuple[Deployment, float]:
        """The run's deployment, and how many seconds to wait for devices.

        Raises:
            UserError: the data or the model is wrong, has changed since the run began, or is no longer allowed.
            BlobDamaged: the artifact that devices download is damaged.
            Stopped: the run was cancelled meanwhile.
        """
        admission.require_code(
            self._experiment, self._services.settings, comes_with_model=self._own is not None
        )
        self._strategy = make_strategy(self._experiment, self._workers, self._folder.parent)
        if self._row.prepared is None:
            prepared = self._prepare()
        else:
            prepared = live_preparation.read(self._row.prepared)
            of_classes = (ref for each in prepared.classes for ref in (each.artifact, each.manifest))
            for ref in (prepared.artifact, prepared.manifest, *of_classes):
                if ref is not None:
                    self._services.blobs.require_intact(ref.sha256)
            if prepared.has_rows:
                self._open_held_out(prepared, self._workers())
            LiveStore(self._services, self._run).emit("run_resumed", round=self._row.round)
        self._prepared = prepared
        self._row = self._read()
        return self._deployment(prepared), self._experiment.devices.patience_seconds

    @property
    def is_asynchronous(self) -> bool:
        """Whether its devices do not wait for each other."""
        return self._experiment.federation.mode == "async"

    def run_rounds(self, fleet: EvaluatingFleet) -> None:
        """Runs the missing rounds of a synchronous run and ends it.

        Raises:
            Stopped: the run was cancelled, or the process is ending.
        """
        self._run_with(fleet, partial(engine.run, self._plan(self._prepared), fleet))

    def run_asynchronous_rounds(self, fleet: AsynchronousEvaluatingFleet) -> None:
        """Runs the missing rounds of an asynchronous run and ends it.

        Raises:
            Stopped: as `run_rounds`.
        """
        self._run_with(fleet, partial(asynchronous.run, self._plan(self._prepared), fleet))

    def _plan(self, prepared: Prepared, params: Params | None = None) -> RunPlan:
        """`params`: the model's, before its first round."""
        cohort = self._experiment.federation.clients_per_round or COHORT
        run_plan = make_run_plan(self._experiment, self._strategy, prepared.trainable, cohort)
        values = 0 if params is None else sum(params[name].size for name in prepared.trainable)
        project = self._row.project
        return privacy.with_privacy(run_plan, self._experiment, self._services, self._run, project, values)

    def _run_with(self, fleet: Evaluating, run_rounds: Callable[..., RunState]) -> None:
        experiment = self._experiment
        evaluation = LiveEvaluation(experiment, fleet, self._held_out, self._labels())
        store = LiveStore(self._services, self._run, evaluation.more_figures)
        try:
            run_rounds(
                store.load(self._row),
                store,
                evaluate=evaluation.score,
                emit=store.emit,
                monotonic=self._monotonic,
            )
        finally:
            store.release()
        self._judge()
        with self._services.blobs.reference_lock:
            trained = {self._read().params, self._kept_params()}
            finish(self._services, self._run, self._final_model(), experiment.model.register_as)
            self._services.blobs.remove(trained - self._services.database.read(rows.blobs_in_use))
        privacy.remove_key(self._services, self._run)
        self._services.signals.notify("events")

    def _labels(self) -> Labels:
        """What the labels are, as far as the coordinator knows."""
        schema = (self._prepared.data or {}).get("schema") or {}
        names, model = schema.get("classes") or (), self._prepared.model
        positive = positive_class(self._experiment, names, model.classes, model.task)
        return Labels(names, positive, schema.get("label_scale"))

    def _judge(self) -> None:
        """Stores figures of the final model if the coordinator has rows to compute them on."""
        if self._held_out is None:
            return
        found = self._held_out.judge(self._services.blobs.open_arrays(self._kept_params()))
        work = partial(rows.judge, run=self._run, figures=found)
        self._services.database.write(work).result()

    def _kept_params(self) -> str:
        """The blob of the last round's params, or of the best one's if the run keeps these."""
        row = self._read()
        return str((row.best or {}).get("params") or row.params)

    def _final_model(self) -> str:
        """The blob of the final model; if the run trained few of its params, they are merged with the others."""
        blobs, kept = self._services.blobs, self._kept_params()
        if self._experiment.model.adapt is None:
            return kept
        params = adapters.merge(self._experiment, blobs.open_arrays(kept), self._folder)
        return blobs.put_arrays(params).sha256

    def _read(self) -> Any:
        return self._services.database.read(partial(rows.find, run=self._run))

    def _prepare(self) -> Prepared:
        services, experiment = self._services, self._experiment
        experiment = admission.admit(experiment, services, comes_with_model=self._own is not None)
        init = admission.init_params(experiment, services, comes_with_model=self._own is not None)
        pool = self._workers()
        place = self._place(pool)
        prepared, params, notices = live_preparation.prepare(experiment, place, init, self._own)
        run_plan = self._plan(
            prepared, params
        )  # refuses what does not fit the model, before devices are asked
        schema, more = federated_scale.ask(
            services,
            self._deployment(prepared),
            experiment,
            # `data.schema` has its means and deviations already.
            (prepared.data or {}).get("schema") if prepared.has_rows else None,
        )
        if schema is not None:
            prepared = live_preparation.scaled(experiment, prepared, schema, place)
        notices += [*more, *personalisation.describe(self._strategy, prepared.trainable)]
        notices += privacy.find_notices(experiment, services, self._run, self._row.project)
        self._open_held_out(prepared, pool)
        require_scores(experiment, self._why_unscored(prepared.model))
        state = RunState(0, params, self._strategy.init(params, run_plan.trainable))
        prepared = replace(
            prepared,
            start=start_figures(self._held_out, params),
            secure_aggregation=secure_aggregation.describe(
                experiment.privacy, experiment.federation.clients_per_round or COHORT, self._strategy
            ),
        )
        with services.blobs.reference_lock:
            digests = LiveStore(services, self._run).put(state)
            is_begun = services.database.write(
                lambda connection: rows.begin(
                    connection,
                    self._run,
                    asdict(prepared),
                    *digests,
                    [*self._row.notices, *notices],
                    services.clock(),
                    rounds=experiment.federation.rounds,
                    **prepared.start,
                )
            ).result()
        services.signals.notify("events")
        if not is_begun:
            raise Stopped
        return prepared

    def _workers(self) -> WorkerPool:
        """The run's worker processes, started when they are first needed."""
        if self._pool is None:
            self._pool = self._make_pool(TORCH if self._own is None else LITERT)
        return self._pool

    def _open_held_out(self, prepared: Prepared, pool: WorkerPool) -> None:
        self._held_out = live_preparation.open_held_out(
            self._experiment, prepared, self._place(pool), self._own
        )
        if self._held_out is None and not is_own_strategy(self._experiment.strategy.name):
            pool.close()  # the workers have nothing more to do

    def _why_unscored(self, model: ModelRef) -> str | None:
        """Why no round gets the score that rounds are compared by; None if rounds get one."""
        metric = self._experiment.federation.metric
        if self._held_out is not None:
            return figures.why_no_metric(metric, self._held_out.data_info, self._held_out.test.y)
        if not self._experiment.devices.evaluate_every:
            return UNSCORED
        if metric == "loss":
            return None
        if metric != "r2" and model.classes > scores.MAX_CLASSES:
            return (
                f"devices report it of at most {scores.MAX_CLASSES} classes, and the data has {model.classes}"
            )
        return figures.metric_blocking_reason(metric, model.task)

    def _place(self, pool: WorkerPool) -> live_preparation.Place:
        return live_preparation.Place(self._folder, pool, self._services.blobs, self._services.settings)

    def _deployment(self, prepared: Prepared) -> Deployment:
        strategy = self._experiment.strategy
        return Deployment(
            run=self._run,
            run_name=self._experiment.name,
            dataset=self._experiment.data.dataset,
            model=prepared.model,
            runtimes=prepared.runtimes,
            artifact=prepared.artifact,
            manifest=prepared.manifest,
            schema=prepared.schema,
            reads_by_schema=prepared.reads_by_schema,
            changes_steps=self._experiment.local.changes_steps,
            has_code=self._experiment.uplink.code is not None,
            changes_updates=self._experiment.privacy.changes_updates_on_devices,
            minimum_separation=self._experiment.privacy.minimum_separation or 0,
            personal_rule=presets.personal_rule(strategy.name, strategy.options),
            classes=prepared.classes,
            selection=self._experiment.devices.selection,
            quorum=self._experiment.federation.min_updates,
            project=self._row.project,
            relaying=self._relaying(),
            secure=secure_aggregation.make_sums(
                self._experiment.privacy,
                self._experiment.seed,
                privacy.noise_in_sums(self._services, self._run),
            ),
        )

    def _relaying(self) -> Relaying | None:
        federation, strategy = self._experiment.federation, self._experiment.strategy
        return Relaying(federation.relays, strategy.name, strategy.options) if federation.relays else None
