"""The report of a run on devices, in the form of a simulation's `report.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from coordinator.db import privacy, registry, relays
from coordinator.db import runs as rows
from coordinator.reports.privacy.description import describe_ledger
from coordinator.reports.run_files import DATA_KEYS
from coordinator.rounds.records import totals

MAX_NAMED_DEVICES = 1000
"""Most devices of a model class that the report names."""


def make_report(connection: Connection, run: Row[Any]) -> dict[str, Any]:
    """The current report of a run. `clients` counts devices whose updates were accepted."""
    records = rows.records(connection, run.id)
    prepared = run.prepared or {}
    model, data = prepared.get("model") or {}, prepared.get("data") or {}
    start = prepared.get("start") or {}
    last = records[-1] if records else start
    is_finished, judged = run.state == "finished", run.figures or {}
    if is_finished and run.best and run.best["params"]:
        last = records[run.best["round"] - 1]
    on_devices = last.get("on_devices") or {}
    runtimes = rows.runtimes_used(connection, run.id)
    report: dict[str, Any] = {
        "run": run.id,
        "state": run.state,
        "experiment": run.experiment,
        "notices": run.notices,
        "data": {key: data.get(key, model.get(key)) for key in DATA_KEYS},
        "clients": rows.devices_used(connection, run.id),
        "runtimes": runtimes,
        "start": {key: start.get(key) for key in ("test_loss", "test_accuracy")},
        "rounds": records,
        **totals(records),
        "final": {
            "round": last.get("round", 0),
            "stopped_early": is_finished and len(records) < run.experiment["federation"]["rounds"],
            "test_accuracy": last.get("test_accuracy"),
            "test_loss": last.get("test_loss"),
            "test_rows": start.get("test_rows") or on_devices.get("test_rows"),
            "model_sha256": run.params,
            **_of_devices(on_devices),
            **judged.get("final", {}),
        },
    }
    if scale := (data.get("schema") or {}).get("label_scale"):
        report["data"]["label_scale"] = scale
    if secure := prepared.get("secure_aggregation"):
        report["secure_aggregation"] = secure
    if (ledger := privacy.find(connection, run.id)) is not None:
        report["privacy"] = describe_ledger(run.experiment, ledger)
    if absent := relays.absences(connection, run.id):
        report["relays_absent"] = absent
    if run.own_model is not None:
        report["own_model"] = own_model_hashes(run)
    if classes := prepared.get("classes"):
        scored = judged.get("device_classes", {})
        report["device_classes"] = _device_classes(
            rows.model_classes_used(connection, run.id), classes, scored
        )
    if per_site := _per_site(last, records, judged, is_finished=is_finished):
        report["per_site"] = per_site
    return report


def _device_classes(
    devices: Mapping[str, Sequence[str]],
    classes: Sequence[Mapping[str, Any]],
    scored: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """What each model class trains and who is in it, and how its part of the final model does. `devices`: ids by class."""
    return {
        each["name"]: {
            "width": each["width"],
            "memory_bytes": each["memory_bytes"],
            "clients": len(devices.get(each["name"], ())),
            "devices": list(devices.get(each["name"], ()))[:MAX_NAMED_DEVICES],
            "params": sum(math.prod(shape) for shape in each["shapes"].values()),
            "options": each["model"]["options"],
            **scored.get(each["name"], {}),
        }
        for each in classes
    }


def _of_devices(on_devices: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics` by the devices' own rows, which stand for the coordinator's where it has none."""
    return {"metrics": on_devices["metrics"]} if on_devices.get("metrics") else {}


def _per_site(
    last: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    judged: Mapping[str, Any],
    *,
    is_finished: bool,
) -> Any:
    """Figures per site: the devices' own first, then the coordinator's. Of a finished run only those of its final model."""
    if is_finished:
        return (
            last.get("per_site") if last.get("on_devices") else judged.get("per_site") or last.get("per_site")
        )
    scored = [record["per_site"] for record in records if record.get("per_site")]
    return scored[-1] if scored else None


def own_model_hashes(run: Row[Any]) -> dict[str, str]:
    """The SHA-256 of each file of the user's own model that came with a run, by name."""
    return {f"{name}_sha256": ref["sha256"] for name, ref in run.own_model.items()}


def find_versions(connection: Connection, run: str) -> list[str]:
    """The versions in the registry that hold this run's model. They are not part of the report, which is one of their files."""
    sources = registry.versions_with_input(connection, [run]).get(run, [])
    return [str(version) for version, relation in sources if relation == "run"]
