"""A privacy audit: attacks on an experiment of one's own, by its own code.

1. prepare the experiment as a simulation does: data, clients, model
2. attack updates of one client, plain and under each defence
3. write audit.json and reconstructions.png
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator import json_values
from coordinator.errors import UserError
from coordinator.experiments.defaults import COHORT
from coordinator.experiments.engines import default_workers
from coordinator.experiments.privacy.section import BY_CLIENTS
from coordinator.experiments.schema import Experiment
from coordinator.extras import problems_with
from coordinator.output_folders import begin, require_new, resumable, undone_if_refused
from coordinator.privacy.accountant import Spending
from coordinator.privacy.audit import inversion, mechanism, natural, picture
from coordinator.privacy.audit.clients import Audited, open_audited, row_losses
from coordinator.privacy.audit.defences import Defences, Overrides, View, of_experiment, views
from coordinator.privacy.audit.membership import MAX_ROWS, Membership, judge
from coordinator.privacy.audit.outcome import Outcome
from coordinator.reports import folder_state
from coordinator.rounds.plan import cohort_size
from coordinator.runs import simulation
from coordinator.runs.model_setup import make_run_plan
from coordinator.runs.privacy import by_clients
from coordinator.runs.privacy.plan import account_independent, make_noise
from coordinator.workers.pool import TORCH, WorkerDied, WorkerPool
from edge_client.files import write_durably
from edge_client.wire import arrays
from strategies.params import Params
from strategies.privacy.central import CentralNoise
from strategies.privacy.clients import ClientNoise

REPORT, PICTURE = "audit.json", "reconstructions.png"
_SHOWN_ROWS = 3


@dataclass(frozen=True)
class Options:
    """What is audited, and how thoroughly.

    Attributes:
        client: name of the client that is attacked; None: the first one.
        rows: of it that are attacked one by one, and that are sought behind an update of more.
        iterations: of the attack by optimisation.
        run: folder of a finished simulation of the experiment, whose model is attacked; None: one is made.
        updates_only: whether to attack no model.
        canaries: invented clients that bound epsilon, where the experiment claims one.
    """

    overrides: Overrides = Overrides()  # noqa: RUF009 - a frozen value
    client: str | None = None
    rows: int = 8
    iterations: int = 200
    run: Path | None = None
    updates_only: bool = False
    canaries: int = 1000


def audit(
    experiment: Experiment, out: Path, environment: simulation.Environment, options: Options
) -> dict[str, Any]:
    """Attacks an experiment, writes the report and its picture into the empty or new folder `out`, and returns the report.

    Raises:
        UserError: something in the experiment, its data or the options is wrong, or cannot be attacked.
        RunInterrupted: it stopped for another reason.
    """
    require_new(out)
    of_experiment(experiment.privacy, experiment.privacy.noise_multiplier, options.overrides)
    _require_attackable(experiment, options)
    if lacking := problems_with(experiment.federation.runtimes):
        raise UserError("\n".join(lacking))
    finished = None if options.run is None else _open_run(options.run)
    with undone_if_refused(out):
        begin(out, "experiment.toml", experiment.to_toml())
        work = out / "work"
        work.mkdir()
        size = experiment.simulation.workers or default_workers(experiment.simulation.engine)
        with (
            resumable("start the audit again, with another --out", WorkerDied),
            WorkerPool(size, work / "workers.log", TORCH) as pool,
        ):
            audited = _prepare(experiment, work, environment, options, pool)
            document = _attack_updates(audited, out, environment, options)
            if not options.updates_only:
                if finished is None:
                    simulation.simulate(experiment, out / "run", environment)
                    finished = _open_run(out / "run")
                environment.progress.stage("telling members from other rows by their losses")
                document["membership"] = _attack_model(audited, finished).to_json()
        shutil.rmtree(work)
    write_durably(out / REPORT, json_values.dumps(document, indent=2).encode())
    return document


def _prepare(
    experiment: Experiment,
    work: Path,
    environment: simulation.Environment,
    options: Options,
    pool: WorkerPool,
) -> Audited:
    """The experiment as a run begins it, open in all workers."""
    progress = environment.progress
    prepared = simulation.prepare(experiment, work / "data", pool, environment.data_dir, progress)
    cohort = experiment.federation.clients_per_round or min(COHORT, len(prepared.clients))
    plan = make_run_plan(experiment, prepared.strategy, prepared.trainable, cohort)
    return open_audited(experiment, pool, prepared, plan, options.client)


def _attack_updates(
    audited: Audited, out: Path, environment: simulation.Environment, options: Options
) -> dict[str, Any]:
    """The report as far as updates are concerned; draws the picture."""
    experiment, name = audited.experiment, audited.names[audited.target]
    spending, noise = _own_noise(audited)
    multiplier = None if noise is None else noise.sum_multiplier
    defences = of_experiment(experiment.privacy, multiplier, options.overrides)
    seen = _possible_views(audited, defences)
    environment.progress.stage(f"attacking updates of client {name}")
    outcomes = inversion.run(audited, seen, defences.clip_norm, options.rows, options.iterations)
    if any(each.pairs for each in outcomes):
        picture.draw(out / PICTURE, outcomes, f"{experiment.name}: rows above their reconstructions")
    bound: dict[str, Any] = {"why_not": mechanism.why_not(audited)}
    if bound["why_not"] is None and spending is not None and noise is not None:
        environment.progress.stage("telling from released sums which canaries took part")
        bound = mechanism.audit(audited, spending, noise, options.canaries).to_json()
    return {
        "experiment": experiment.model_dump(mode="json", exclude_none=True),
        "canaries": bound,
        "client": name,
        "client_rows": len(audited.rows_of(audited.target)),
        "updates": [{**each.to_json(), **_examples(each, audited)} for each in outcomes],
    }


def _own_noise(
    audited: Audited,
) -> tuple[Spending | by_clients.SpendingByClients | None, CentralNoise | ClientNoise | None]:
    """What the experiment's rounds spend, and their noise, if it has one. Raises: UserError: as a run of it does."""
    mechanism.require_known(audited)
    experiment, clients = audited.experiment, len(audited.names)
    if experiment.privacy.mechanism == "central":
        spending = account_independent(experiment, audited.cohort, clients)
        return spending, make_noise(experiment.privacy, spending, audited.cohort)
    if experiment.privacy.mechanism in BY_CLIENTS:
        sizes = audited.prepared.sizes
        spent = by_clients.account(experiment, cohort_size(audited.run_plan), sizes)
        return spent, by_clients.client_noise(experiment.privacy, spent, audited.cohort, sizes.values)
    return None, None


def _attack_model(audited: Audited, finished: Finished) -> Membership:
    """How well the final model's losses tell the clients' rows from held-out ones.

    Raises:
        UserError: the run was of other data.
    """
    if finished.data_fingerprint != audited.prepared.data_info["fingerprint"]:
        raise UserError(
            f"--run {finished.folder}: its data were other ones than the experiment names now; name another run, or leave --run out"
        )
    rng = audited.rng("membership")
    members, others = (
        np.sort(rng.choice(rows, min(MAX_ROWS, len(rows)), replace=False))
        for rows in (audited.data.parts, audited.data.test_rows)
    )
    losses = row_losses(audited, finished.params, np.concatenate([members, others]))
    return judge(losses[: len(members)], losses[len(members) :])


@dataclass(frozen=True)
class Finished:
    """The result of a simulation."""

    folder: Path
    params: Params
    data_fingerprint: str


def _open_run(folder: Path) -> Finished:
    """The final model of a finished simulation. Raises: UserError: the folder has none, or it is damaged."""
    if not folder_state.is_finished(folder):
        raise UserError(
            f"--run {folder}: holds no finished simulation; finish it with: fedloop simulate --resume {folder}"
        )
    try:
        params = arrays.decode((folder / "model.safetensors").read_bytes())
        fingerprint = json.loads((folder / "report.json").read_text("utf-8"))["data"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--run {folder}: a file of this run is damaged: {error}") from None
    return Finished(folder, params, fingerprint)


def _require_attackable(experiment: Experiment, options: Options) -> None:
    """Refuses what the audit would not attack as it is."""
    if experiment.model.adapt is not None and not options.updates_only:
        raise UserError(
            f"model.adapt = {experiment.model.adapt!r}: the final model is merged with its frozen part, so that its losses cannot be asked for "
            "here; give --updates-only"
        )
    if experiment.simulation.attack is not None:
        raise UserError(
            "simulation.attack makes clients send what they have not learnt, so their updates say nothing of real ones; leave it out"
        )


def _possible_views(audited: Audited, defences: Defences) -> list[View]:
    """The views of the experiment's clients. A group of secure aggregation has no more members than a round has clients.

    Raises:
        UserError: there are fewer clients with rows than are added.
    """
    having = sum(client.num_examples > 0 for client in audited.prepared.clients)
    if audited.experiment.privacy.secure_aggregation:
        defences = replace(defences, group_size=min(defences.group_size, audited.cohort, having))
    if defences.group_size > having:
        raise UserError(
            f"--group-size {defences.group_size}: the experiment has {having} clients with rows; expected at most as many"
        )
    return views(defences, min(audited.cohort, having), having)


def _examples(outcome: Outcome, audited: Audited) -> dict[str, Any]:
    """Some of the rows and their reconstructions in natural form, where there is one."""
    schema = natural.read_schema(audited.prepared.data_info)
    if outcome.tokens or outcome.method == "embedding":
        return {"tokens": natural.natural_tokens(outcome.tokens, schema)}
    if schema is None or not schema.columns:
        return {}
    rows = [
        {
            "row": natural.natural_row(pair.row, schema),
            "reconstruction": natural.natural_row(pair.reconstruction, schema),
        }
        for pair in outcome.pairs[:_SHOWN_ROWS]
    ]
    return {"examples": rows}
