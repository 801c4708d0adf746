"""`model.register`: a run that finishes and its version in the registry are one fact, whatever befalls the coordinator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.context.services import Services
from coordinator.db import events, registry
from coordinator.db import runs as rows
from coordinator.db.registry import VersionId
from coordinator.registry import contents
from coordinator.registry.lineage import lineage
from coordinator.registry.registration import register_run
from coordinator.reports import run_report
from coordinator.runs.service import RunService
from edge_client.processes.process import tie_to_parent
from tests.support.fake_devices import answering
from tests.support.long import extended
from tests.support.services import services_in

pytestmark = pytest.mark.slow

EXPERIMENT: dict[str, Any] = {
    "data": {"dataset": "vibration", "input_shape": [8], "classes": 3},
    "model": {"name": "logreg", "register": "digits@candidate"},
    "federation": {"rounds": 1, "clients_per_round": 2, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 1},
}
LONG_SECONDS = 600.0


def row_of(services: Services, run: str) -> Any:
    return services.database.read(partial(rows.find, run=run))


def events_of(services: Services, event: str) -> list[dict[str, Any]]:
    found = services.database.read(lambda at: events.since(at, 0, 1000))
    return [row._mapping["values"] for row in found if row.event == event]


def version_of(services: Services, number: int) -> registry.VersionRow | None:
    return services.database.read(partial(registry.find, identity=VersionId("digits", number)))


@pytest.mark.parametrize(
    ("failpoint", "state"),
    [("registry.blobs_stored", "running"), *extended(("registry.committed", "finished"))],
)
def test_killed_at_its_end_a_run_is_finished_and_registered_once_or_neither(
    tmp_path: Path, failpoint: str, state: str
) -> None:
    (tmp_path / "experiment.json").write_text(json.dumps(EXPERIMENT))
    command = [sys.executable, "-m", "tests.support.registering_run"]
    command += [str(tmp_path / "home"), str(tmp_path / "experiment.json")]
    environment = {**os.environ, "FEDLOOP_FAILPOINT": failpoint}
    killed = subprocess.run(
        tie_to_parent(command), env=environment, capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    with services_in(tmp_path / "home") as services:
        (row,) = services.database.read(partial(rows.newest, limit=2))
        run = row.id
        assert row.state == state
        assert (version_of(services, 1) is not None) == (state == "finished")
        service = RunService(services, answering)
        service.start()
        assert service.join(run, LONG_SECONDS)
        assert row_of(services, run).state == "finished"

        version = version_of(services, 1)
        assert version is not None and version.aliases == ("candidate",)
        assert [file.sha256 for file in version.files if file.path == "model.safetensors"] == [
            row_of(services, run).params
        ]
        assert [each["registered"] for each in events_of(services, "run_finished")] == ["digits:1"]
        assert (
            len(events_of(services, "model_registered")) == len(events_of(services, "model_alias_moved")) == 1
        )
        assert services.database.read(partial(run_report.find_versions, run=run)) == ["digits:1"]
        graph = services.database.read(partial(lineage, version=version.id))
        assert (f"run:{run}", "digits:1") in {(edge.parent.id, edge.child.id) for edge in graph.edges}
        by_hand, is_new = register_run(services, "digits", run)
        assert (by_hand.id, is_new) == (version.id, False)


@pytest.mark.extended
def test_a_run_that_cannot_be_registered_keeps_its_model_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with services_in(tmp_path / "home") as services:
        service = RunService(services, answering)
        with monkeypatch.context() as patch:
            patch.setattr(contents, "DOCUMENT_LIMIT_BYTES", 100)  # as a report of very many rounds would be
            run = service.create(EXPERIMENT)
            assert service.join(run, LONG_SECONDS)
        row = row_of(services, run)
        assert (row.state, row.round, row.error) == ("finished", 1, None)
        assert services.blobs.path(row.params).is_file()
        (finished,) = events_of(services, "run_finished")
        assert "expected at most 100" in finished["not_registered"] and "registered" not in finished
        assert f"fedloop model add-run {run} --name digits" in row.notices[-1]
        assert version_of(services, 1) is None
        assert register_run(services, "digits", run)[1]
