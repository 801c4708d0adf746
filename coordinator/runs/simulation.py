"""A whole federation on one machine, from the experiment to the report.

    1. the folder: write the resolved experiment, take the lock
    2. the data: load and partition it in a worker
    3. the model: initial params, and its artifact if LiteRT clients take part
    4. the rounds: the same engine as on a real fleet, over a simulated one
    5. the report

All code that imports a framework, and all code of a user, runs in worker processes.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments import adapters
from coordinator.experiments.defaults import COHORT
from coordinator.experiments.engines import clients_per_job, default_workers
from coordinator.experiments.privacy import secure_aggregation
from coordinator.experiments.schema import Experiment
from coordinator.extras import problems_with
from coordinator.fleets.client_profiles import make_virtual_time
from coordinator.fleets.replayed import make_replay
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.output_folders import begin, locked, require_new, resumable, undone_if_refused
from coordinator.reports import folder_state, report
from coordinator.reports.figures import Judged, LabelledRows, has_metrics, round_metric, why_no_metric
from coordinator.reports.progress import Progress, Quiet
from coordinator.rounds.events import Clock
from coordinator.rounds.fleet import Fleet
from coordinator.rounds.plan import RunPlan, cohort_size
from coordinator.rounds.records import UNSCORED, RunState, Score
from coordinator.runs import resumption
from coordinator.runs.initial_params import read_init
from coordinator.runs.model_setup import (
    export_model,
    load_data,
    make_run_plan,
    require_scores,
    set_up_engine,
    set_up_model,
)
from coordinator.runs.own_strategy import make_strategy
from coordinator.runs.population import device_classes, models
from coordinator.runs.population.clients import make_clients
from coordinator.runs.privacy import plan as privacy
from coordinator.runs.privacy.by_clients import Sizes, give_row_noise
from coordinator.runs.simulated_rounds import SimulationFleet, around_fleet, make_rounds, require_enough
from coordinator.runs.simulation_store import SimulationStore
from coordinator.runs.trials import attack, cluster_models, local_baseline, personal_models
from coordinator.workers.evaluation import accuracy_of_tested, evaluate
from coordinator.workers.pool import TORCH, WorkerDied, WorkerPool
from coordinator.workers.workspace_arrays import open_workspace
from edge_client.train.evaluation import Evaluation
from strategies.params import Params, Tensors, materialize
from strategies.strategy import Strategy


@dataclass(frozen=True)
class Environment:
    """What a run needs besides its experiment.

    Attributes:
        data_dir: folder of data files.
        make_fleet: the fleet that trains, given the run's folder for its files; default: a simulated one.
        owns_rows: whether clients train on rows of the run's own data set; else figures of single clients are not reported.
        how_to_resume: what the user does if the run is interrupted; `{out}` is its folder.
    """

    data_dir: Path | None = None
    progress: Progress = Quiet()  # noqa: RUF009 - holds no state
    clock: Clock = lambda: datetime.now(UTC)
    monotonic: Callable[[], float] = time.monotonic
    make_fleet: Callable[[Experiment, Prepared], Fleet] | None = None
    owns_rows: bool = True
    how_to_resume: str = "fedloop simulate --resume {out}"


def simulate(
    experiment: Experiment, out: Path, environment: Environment, fill: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Runs an experiment into the empty or new folder `out` and returns its report.

    `fill`: writes files into `out` that the experiment names.

    Raises:
        UserError: something in the experiment or its data is wrong, or `out` is not empty.
        RunInterrupted: the run stopped for another reason; what was committed can be resumed.
    """
    require_new(out, hint=f", or go on with: {environment.how_to_resume.format(out=out)}")
    if lacking := problems_with(experiment.federation.runtimes, experiment.privacy.mechanism):
        raise UserError("\n".join(lacking))
    with undone_if_refused(out, (out / "checkpoint" / "checkpoint.json").exists):
        begin(out, "experiment.toml", experiment.to_toml())
        if fill is not None:
            fill(out)
        return _run(experiment, out, environment)


def resume(out: Path, environment: Environment, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Resumes the run in `out` from its last committed round; of a finished run it only returns the report.

    `sets`: changes of the keys `experiment.MAY_CHANGE`. With more `federation.rounds`, a finished run goes on, and its result is
    that of a run with so many rounds from the start.

    Raises:
        UserError: `out` holds no simulation, its experiment or data were changed since, or a key may not change.
        RunInterrupted: as `simulate`.
    """
    with resumption.restored_if_refused(out):
        experiment = resumption.read(out, sets)
        if folder_state.is_finished(out):
            environment.progress.note(f"{out}: this run is already finished")
            shutil.rmtree(out / "work", ignore_errors=True)  # the process may have died before it could
            finished: dict[str, Any] = json.loads((out / "report.json").read_text("utf-8"))
            return finished
        return _run(experiment, out, environment)


def _run(experiment: Experiment, out: Path, environment: Environment) -> dict[str, Any]:
    work = out / "work"
    progress = environment.progress
    how = f"nothing committed is lost; go on with: {environment.how_to_resume.format(out=out)}"
    with (
        resumable(how, WorkerDied),
        locked(out / folder_state.LOCK, resumption.taken(out)),
        _start_workers(experiment, work) as pool,
    ):
        resumption.remove_leftovers(out)
        store = SimulationStore(out, progress, environment.clock, environment.monotonic)
        prepared = prepare(experiment, work, pool, environment.data_dir, progress)
        if (target := experiment.model.register_as) is not None:
            progress.note(
                f"model.register is ignored: a simulation has no registry; afterwards: fedloop model add {out} --name {target.model}"
            )
        experiment = resumption.record_engine(experiment, prepared.model["chosen"], out)
        store.identity = resumption.identify(experiment, prepared.data_info, work)
        if store.checkpoint is not None:
            resumption.require_same(store.checkpoint, prepared.params, store.identity, out)
        cohort = _cohort_size(experiment, len(prepared.clients))
        run_plan = make_run_plan(experiment, prepared.strategy, prepared.trainable, cohort)
        names = [client.name for client in prepared.clients]
        run_plan = privacy.with_privacy(run_plan, experiment, names, prepared.sizes, out / "checkpoint")
        state = _run_rounds(experiment, pool, prepared, store, environment, run_plan)
        progress.stage("evaluating the model")
        kept_round, params = state.result(experiment.federation.keep == "best")
        own, clusters = cluster_models.judge(
            pool, prepared.strategy, state.strategy, prepared.clients, params, prepared.folder, out
        )
        judged = _judge(experiment, pool, prepared, params, state.round, environment, run_plan, store, own)
        test_rows, task = len(judged.test.y), prepared.data_info["task"]
        trials = {
            "privacy": privacy.describe(experiment, run_plan, state.round),
            "secure_aggregation": secure_aggregation.describe(
                experiment.privacy, cohort_size(run_plan), prepared.strategy
            ),
            "attack": attack.measure(experiment, pool, params, prepared.clients, prepared.data_info),
            "server_data": prepared.data_info.get("server"),
            "personalised": personal_models.describe(
                prepared.strategy, prepared.clients, prepared.trainable, store.client_state
            ),
            "clusters": clusters,
            "device_classes": device_classes.judge(
                experiment,
                pool,
                test_rows,
                params,
                prepared.clients,
                task,
                out,
                prepared.strategy.models(state.strategy),
            ),
        }
        model = adapters.merge(experiment, params, work)
        written = report.write(
            out, experiment, prepared.data_info, prepared.clients, model, kept_round, judged, trials
        )
    shutil.rmtree(work)
    return written


def _judge(
    experiment: Experiment,
    pool: WorkerPool,
    prepared: Prepared,
    params: Tensors,
    rounds: int,
    environment: Environment,
    run_plan: RunPlan,
    store: SimulationStore,
    own: Evaluation | None,
) -> Judged:
    """The final model on the held-out rows, and what it is compared with. `rounds`: that the run took. `own`: by the models that
    clients chose; None: by those that they keep, if they keep any."""
    rows, data_info = open_workspace(prepared.folder), prepared.data_info
    keep_logits = has_metrics(data_info, len(rows.test_rows))
    final = evaluate(pool, len(rows.test_rows), params, keep_logits=keep_logits)
    alone = None
    if environment.owns_rows and local_baseline.is_wanted(experiment, data_info):
        environment.progress.stage("training each client alone, to compare")
        alone = local_baseline.train_alone(
            pool,
            run_plan,
            prepared.clients,
            prepared.params,
            rows.owners,
            rounds,
            keep_logits=keep_logits,
        )
    clients, owners = prepared.clients, rows.owners
    if own is None:
        own = personal_models.score(pool, prepared.strategy, clients, params, store.client_state, owners)
    adapted = {} if own is None else {"personalised": own}
    if (chosen := experiment.simulation.fine_tune) is not None:
        environment.progress.stage("fine-tuning the model on each client")
        adapted["fine_tuned"] = local_baseline.fine_tune(
            pool, run_plan, chosen, clients, materialize(params), owners
        )
    test, train = (
        LabelledRows(rows.y[chosen], rows.sites[chosen] if rows.sites.size else None)
        for chosen in (rows.test_rows, rows.parts)
    )
    return Judged(final, test, train, alone, adapted, owners)


def _run_rounds(
    experiment: Experiment,
    pool: WorkerPool,
    prepared: Prepared,
    store: SimulationStore,
    environment: Environment,
    run_plan: RunPlan,
) -> RunState:
    give_row_noise(experiment, run_plan, pool, prepared.folder, prepared.model)
    clock = make_virtual_time(experiment, prepared.clients)
    fleet: SimulationFleet | None = None
    if environment.make_fleet is not None:
        fleet = environment.make_fleet(experiment, prepared)
    per_job = clients_per_job(prepared.model["engine"], prepared.sizes.values)
    if (replay := experiment.simulation.replay) is not None:
        environment.progress.note(
            f"replaying {replay}: who answers, when and with what outcome is as recorded"
        )
        run_plan, fleet = make_replay(Path(replay), run_plan, pool, prepared.clients, clock, per_job)
    around = around_fleet(experiment, prepared.clients, run_plan)
    run_rounds = make_rounds(
        run_plan, pool, prepared.clients, clock, store.checkpoint, fleet, per_job, around
    )
    names = [client.name for client in prepared.clients]
    rows, metric = open_workspace(prepared.folder), experiment.federation.metric
    owners, y = rows.owners, rows.y[rows.test_rows]

    def score(number: int, params: Tensors) -> Score:
        if not experiment.evaluation.is_due(number, run_plan.rounds):
            return UNSCORED
        scored = evaluate(pool, len(owners), params, keep_logits=metric != "loss")
        figure = round_metric(metric, scored, y, prepared.data_info)
        if prepared.data_info["task"] == "regression":
            return Score(scored.loss, None, {}, figure)
        if not environment.owns_rows:
            return Score(scored.loss, scored.accuracy, {}, figure)
        tested = accuracy_of_tested(scored, owners, names)
        return Score(scored.loss, scored.accuracy, tested, figure)

    checkpoint = store.checkpoint
    with store:
        if checkpoint is None:
            start = RunState(0, prepared.params, run_plan.strategy.init(prepared.params, run_plan.trainable))
            first = score(0, start.params)
            store.emit(
                "run_started",
                experiment=experiment.name,
                clients=len(names),
                rounds=run_plan.rounds,
                test_loss=first.loss,
                test_accuracy=first.accuracy,
            )
        else:
            start = checkpoint.run_state
            store.emit_resumed(checkpoint, experiment.name)
        environment.progress.begin(run_plan.rounds, start.round)
        if environment.make_fleet is None:
            store.write_in_pauses(pool)
        return run_rounds(start, store, evaluate=score, emit=store.emit, monotonic=environment.monotonic)


def _cohort_size(experiment: Experiment, clients: int) -> int:
    """Clients per round."""
    require_enough(experiment, clients)
    return experiment.federation.clients_per_round or min(COHORT, clients)


def _start_workers(experiment: Experiment, work: Path) -> WorkerPool:
    work.mkdir(exist_ok=True)
    size = experiment.simulation.workers or default_workers(experiment.simulation.engine)
    return WorkerPool(size, work / "workers.log", TORCH)


@dataclass(frozen=True)
class Prepared:
    """Data and model of a run; the workers have both open.

    Attributes:
        folder: the workspace.
        data_info: description of the data (`coordinator.workers.workspace.prepare`).
        model: its description, as workers take it; `engine` is the one that PyTorch clients train with here, and `chosen` the one that the
            experiment means.
        params: initial params.
    """

    strategy: Strategy
    folder: Path
    data_info: Mapping[str, Any]
    clients: tuple[SimulatedClient, ...]
    model: Mapping[str, Any]
    params: Params
    trainable: tuple[str, ...]

    @property
    def sizes(self) -> Sizes:
        """Values of an update, and rows of each client."""
        values = sum(self.params[name].size for name in self.trainable)
        return Sizes(values, tuple(client.num_examples for client in self.clients))


def prepare(
    experiment: Experiment, folder: Path, pool: WorkerPool, data_dir: Path | None, progress: Progress
) -> Prepared:
    """Fills the workspace `folder` unless it is complete, and opens it in all workers.

    Raises:
        UserError: the data, the model or their combination is wrong.
    """
    strategy = make_strategy(experiment, lambda: pool, folder.parent)
    progress.stage("loading and partitioning the data")
    data_info = load_data(experiment, folder, pool, data_dir)
    attack.poison(experiment, folder, pool, data_info)
    for line in (*data_info["shown"], *_describe_sites(experiment, data_info)):
        progress.note(line)
    _require_task(experiment, data_info["task"])
    _require_scored(experiment, data_info, folder)
    model, ids = experiment.model.describe(data_info), data_info.get("ids", 0)
    progress.stage("building the model")
    model, params, trainable = set_up_model(experiment, model, folder, pool, read_init(experiment), ids)
    classes = device_classes.set_up(experiment, model, params, pool) or models.set_up(
        experiment, model, params, pool, partial(set_up_model, folder=folder, pool=pool, init=None, ids=ids)
    )
    trained = {name: params[name].shape for name in trainable}
    strategy = models.equip(strategy, experiment, data_info, model, trained, classes, pool)
    clients = make_clients(experiment, data_info, classes)
    if any(client.runtime == "litert" for client in clients):
        progress.stage("exporting the model to LiteRT")
        exported = export_model(experiment, model)
        model |= {"tflite": str(exported.tflite), "manifest": str(exported.manifest)}
    model |= device_classes.describe(experiment, model, clients, partial(export_model, experiment))
    model |= set_up_engine(experiment, strategy, model, pool, progress)
    pool.broadcast({"kind": "open", "folder": str(folder), "model": model})
    return Prepared(strategy, folder, data_info, clients, model, params, trainable)


def _require_task(experiment: Experiment, task: str) -> None:
    """Refuses data whose labels are not what the experiment says."""
    declared = experiment.data.task
    if declared is not None and declared != task:
        raise UserError(f"data.task = {declared!r}, but the data set is for {task!r}")
    if experiment.simulation.fine_tune is not None and task == "regression":
        raise UserError("simulation.fine_tune compares accuracies, and quantities have none; leave it out")


def _require_scored(experiment: Experiment, data_info: Mapping[str, Any], folder: Path) -> None:
    """Refuses keys that need scores which the held-out rows in the workspace do not give."""
    rows = open_workspace(folder)
    unscored = None if len(rows.test_rows) else "the data set holds out no rows"
    labels = rows.y[rows.test_rows]
    require_scores(experiment, unscored or why_no_metric(experiment.federation.metric, data_info, labels))


def _describe_sites(experiment: Experiment, data_info: Mapping[str, Any]) -> list[str]:
    """A line that says whether the sites of the data are the clients."""
    if not data_info["site_names"]:
        return []
    if experiment.data.partition == "natural":
        return ["Each site is a client."]
    return [
        f"The sites are not the clients: data.partition = {experiment.data.partition!r} deals the rows of all sites out to "
        f'{len(data_info["clients"])} clients; with data.partition = "natural" each site is a client.'
    ]
