"""The report of a simulation: `report.json`, `curves.png` and the final model in the run's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator import json_values
from coordinator.experiments.schema import Experiment
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.reports import figures
from coordinator.reports.curves import draw_curves, loss_name
from coordinator.reports.run_files import DATA_KEYS, read_rounds, read_start, write_schema
from coordinator.reports.trace import write_trace
from coordinator.rounds.records import totals
from edge_client.files import write_durably
from edge_client.wire import arrays
from strategies.params import Tensors


def write(
    out: Path,
    experiment: Experiment,
    data_info: Mapping[str, Any],
    clients: Sequence[SimulatedClient],
    params: Tensors,
    kept_round: int,
    judged: figures.Judged,
    trials: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes model, curves and report. The report is last: a run with a report is finished.

    `data_info`: description of the data (`coordinator.workers.workspace.prepare`). `kept_round`: whose model this is.
    `trials`: further parts of the report by key, such as who attacked, and with what success.
    """
    encoded, final = arrays.encode(params), judged.final
    write_durably(out / "model.safetensors", encoded)
    write_schema(out, data_info.get("schema"))
    write_trace(out, experiment.record)
    start, rounds = read_start(out / "events.jsonl"), read_rounds(out / "rounds.csv")
    document: dict[str, Any] = {
        "experiment": experiment.model_dump(mode="json", exclude_none=True),
        "data": {key: data_info.get(key) for key in DATA_KEYS},
        "clients": len(clients),
        "runtimes": dict(sorted(Counter(client.runtime for client in clients).items())),
        "start": start,
        "rounds": rounds,
        **totals(rounds),
        "final": {
            "round": kept_round,
            "stopped_early": len(rounds) < experiment.federation.rounds,
            "test_accuracy": None if data_info["task"] == "regression" else final.accuracy,
            "test_loss": json_values.finite(final.loss),
            "test_rows": len(final.labels),
            "model_sha256": arrays.sha256(encoded),
            **figures.of_all(judged, data_info),
        },
    }
    for key, scored in judged.adapted.items():
        document["final"][f"{key}_loss"] = json_values.finite(scored.loss)
        if data_info["task"] != "regression":
            document["final"][f"{key}_accuracy"] = scored.accuracy
            document["per_client"] = figures.by_client(judged, [client.name for client in clients])
    document |= {key: dict(part) for key, part in (trials or {}).items() if part}
    if experiment.evaluation.sample is not None:
        document["final"]["held_out_rows"] = data_info["held_out"]
    if per_site := figures.by_site(judged, data_info):
        document["per_site"] = per_site
    if data_info["task"] == "regression":
        document["data"]["label_scale"] = data_info["label_scale"]
    draw_curves(out / "curves.png", experiment.name, start, rounds, loss_name(data_info["task"]))
    write_durably(out / "report.json", json_values.dumps(document, indent=2).encode())
    return document
