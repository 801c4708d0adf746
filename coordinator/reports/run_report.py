"""The report of a run on devices, in the form of a simulation's `report.json`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from coordinator.db import registry
from coordinator.db import runs as rows
from coordinator.rounds.records import totals

_DATA_KEYS = ("fingerprint", "classes", "input_shape", "task", "preview")


def make_report(connection: Connection, run: Row[Any]) -> dict[str, Any]:
    """The current report of a run. `clients` counts devices whose updates were accepted."""
    records = rows.records(connection, run.id)
    prepared = run.prepared or {}
    model, data = prepared.get("model") or {}, prepared.get("data") or {}
    start = prepared.get("start") or {}
    last = records[-1] if records else start
    runtimes = rows.runtimes_used(connection, run.id)
    report: dict[str, Any] = {
        "run": run.id,
        "state": run.state,
        "experiment": run.experiment,
        "notices": run.notices,
        "data": {key: data.get(key, model.get(key)) for key in _DATA_KEYS},
        "clients": rows.devices_used(connection, run.id),
        "runtimes": runtimes,
        "start": {key: start.get(key) for key in ("test_loss", "test_accuracy")},
        "rounds": records,
        **totals(records),
        "final": {
            "test_accuracy": last.get("test_accuracy"),
            "test_loss": last.get("test_loss"),
            "test_rows": start.get("test_rows") or last.get("on_devices", {}).get("test_rows"),
            "model_sha256": run.params,
        },
    }
    scored = [record["per_site"] for record in records if record.get("per_site")]
    if scored:
        report["per_site"] = scored[-1]
    return report


def find_versions(connection: Connection, run: str) -> list[str]:
    """The versions in the registry that hold this run's model. They are not part of the report, which is one of their files."""
    sources = registry.versions_with_input(connection, [run]).get(run, [])
    return [str(version) for version, relation in sources if relation == "run"]
