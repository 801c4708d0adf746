"""The report of a simulation: `report.json`, `curves.png` and the final model in the run's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator import json_values
from coordinator.experiments.schema import Experiment
from coordinator.fleets.simulated import SimulatedClient
from coordinator.reports.curves import draw_curves
from coordinator.reports.run_files import read_rounds, read_start
from coordinator.rounds.records import totals
from coordinator.workers.evaluation import score_sites
from edge_client.files import write_durably
from edge_client.train.evaluation import Evaluation
from edge_client.wire import arrays
from strategies.params import Tensors


def write(
    out: Path,
    experiment: Experiment,
    data_info: Mapping[str, Any],
    clients: Sequence[SimulatedClient],
    params: Tensors,
    final: Evaluation,
    sites: npt.NDArray[np.int32] | None,
) -> dict[str, Any]:
    """Writes model, curves and report. The report is last: a run with a report is finished.

    `data_info`: description of the data (`coordinator.workers.workspace.prepare`). `sites`: site index of each test row, or
    None if the data has no sites.
    """
    encoded = arrays.encode(params)
    write_durably(out / "model.safetensors", encoded)
    start, rounds = read_start(out / "events.jsonl"), read_rounds(out / "rounds.csv")
    document: dict[str, Any] = {
        "experiment": experiment.model_dump(mode="json", exclude_none=True),
        "data": {key: data_info[key] for key in ("fingerprint", "classes", "input_shape", "task", "preview")},
        "clients": len(clients),
        "runtimes": dict(sorted(Counter(client.runtime for client in clients).items())),
        "start": start,
        "rounds": rounds,
        **totals(rounds),
        "final": {
            "test_accuracy": final.accuracy,
            "test_loss": json_values.finite(final.loss),
            "test_rows": len(final.labels),
            "model_sha256": arrays.sha256(encoded),
        },
    }
    if sites is not None:
        document["per_site"] = score_sites(final, sites, data_info["site_names"])
    draw_curves(out / "curves.png", experiment.name, start, rounds)
    write_durably(out / "report.json", json_values.dumps(document, indent=2).encode())
    return document
