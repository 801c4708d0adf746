"""What a run on devices has come to, in the form of a simulation's `report.json`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from coordinator import report
from coordinator.db import registry
from coordinator.db import runs as rows

_OF_DATA = ("fingerprint", "classes", "input_shape", "task", "preview")


def document(connection: Connection, run: Row[Any]) -> dict[str, Any]:
    """The report of a run as it stands. `clients` counts devices whose updates went in."""
    records = rows.records(connection, run.id)
    prepared = run.prepared or {}
    model, data = prepared.get("model") or {}, prepared.get("data") or {}
    start = prepared.get("start") or {}
    last = records[-1] if records else start
    runtimes = rows.runtimes_used(connection, run.id)
    written: dict[str, Any] = {
        "run": run.id,
        "state": run.state,
        "experiment": run.experiment,
        "notices": run.notices,
        "data": {key: data.get(key, model.get(key)) for key in _OF_DATA},
        "clients": rows.devices_used(connection, run.id),
        "runtimes": runtimes,
        "start": {key: start.get(key) for key in ("test_loss", "test_accuracy")},
        "rounds": records,
        **report.totals(records),
        "final": {
            "test_accuracy": last.get("test_accuracy"),
            "test_loss": last.get("test_loss"),
            "test_rows": start.get("test_rows") or last.get("on_devices", {}).get("test_rows"),
            "model_sha256": run.params,
        },
    }
    scored = [record["per_site"] for record in records if record.get("per_site")]
    if scored:
        written["per_site"] = scored[-1]
    return written


def versions(connection: Connection, run: str) -> list[str]:
    """The versions in the registry that are the model of this run. Not of its report, which is a file of them."""
    made = registry.made_from(connection, [run]).get(run, [])
    return [str(version) for version, relation in made if relation == "run"]
