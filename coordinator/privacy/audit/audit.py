"""A privacy audit: attacks on an experiment of one's own, by its own code.

1. prepare the experiment as a simulation does: data, clients, model
2. attack updates of one client, plain and under each defence
3. write audit.json and reconstructions.png
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator import json_values
from coordinator.errors import UserError
from coordinator.experiments.defaults import COHORT
from coordinator.experiments.engines import default_workers
from coordinator.experiments.schema import Experiment
from coordinator.extras import problems_with
from coordinator.output_folders import begin, require_new, resumable, undone_if_refused
from coordinator.privacy.audit import inversion, natural, picture
from coordinator.privacy.audit.clients import Audited, open_audited
from coordinator.privacy.audit.defences import Defences, View, views
from coordinator.privacy.audit.outcome import Outcome
from coordinator.runs import simulation
from coordinator.runs.model_setup import make_run_plan
from coordinator.workers.pool import TORCH, WorkerDied, WorkerPool
from edge_client.files import write_durably

REPORT, PICTURE = "audit.json", "reconstructions.png"
_SHOWN_ROWS = 3


@dataclass(frozen=True)
class Options:
    """What is audited, and how thoroughly.

    Attributes:
        client: name of the client that is attacked; None: the first one.
        rows: of it that are attacked one by one, and that are sought behind an update of more.
        iterations: of the attack by optimisation.
    """

    defences: Defences = Defences()  # noqa: RUF009 - a frozen value
    client: str | None = None
    rows: int = 8
    iterations: int = 300


def audit(
    experiment: Experiment, out: Path, environment: simulation.Environment, options: Options
) -> dict[str, Any]:
    """Attacks an experiment, writes the report and its picture into the empty or new folder `out`, and returns the report.

    Raises:
        UserError: something in the experiment, its data or the options is wrong, or cannot be attacked.
        RunInterrupted: it stopped for another reason.
    """
    require_new(out)
    options.defences.require_valid()
    _require_attackable(experiment)
    if lacking := problems_with(experiment.federation.runtimes):
        raise UserError("\n".join(lacking))
    with undone_if_refused(out):
        begin(out, "experiment.toml", experiment.to_toml())
        work = out / "work"
        work.mkdir()
        size = experiment.simulation.workers or default_workers(experiment.simulation.engine)
        with (
            resumable("start the audit again, with another --out", WorkerDied),
            WorkerPool(size, work / "workers.log", TORCH) as pool,
        ):
            document = _audit(experiment, out, environment, options, pool)
        shutil.rmtree(work)
    write_durably(out / REPORT, json_values.dumps(document, indent=2).encode())
    return document


def _audit(
    experiment: Experiment, out: Path, environment: simulation.Environment, options: Options, pool: WorkerPool
) -> dict[str, Any]:
    prepared = simulation.prepare(
        experiment, out / "work" / "data", pool, environment.data_dir, environment.progress
    )
    cohort = experiment.federation.clients_per_round or min(COHORT, len(prepared.clients))
    plan = make_run_plan(experiment, prepared.strategy, prepared.trainable, cohort)
    audited = open_audited(experiment, pool, prepared, plan, options.client)
    seen = _possible_views(audited, options.defences)
    environment.progress.stage(f"attacking updates of client {audited.names[audited.target]}")
    outcomes = inversion.run(audited, seen, options.defences.clip_norm, options.rows, options.iterations)
    if any(each.pairs for each in outcomes):
        picture.draw(out / PICTURE, outcomes, f"{experiment.name}: rows above their reconstructions")
    return {
        "experiment": experiment.model_dump(mode="json", exclude_none=True),
        "client": audited.names[audited.target],
        "client_rows": len(audited.rows_of(audited.target)),
        "updates": [{**each.to_json(), **_examples(each, audited)} for each in outcomes],
    }


def _require_attackable(experiment: Experiment) -> None:
    """Refuses what the audit would not attack as it is."""
    if experiment.simulation.attack is not None:
        raise UserError(
            "simulation.attack makes clients send what they have not learnt, so their updates say nothing of real ones; leave it out"
        )


def _possible_views(audited: Audited, defences: Defences) -> list[View]:
    """The views of the experiment's clients.

    Raises:
        UserError: there are fewer clients with rows than are added.
    """
    having = sum(client.num_examples > 0 for client in audited.prepared.clients)
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
