"""Whoever has a token for the operator API, and code that was allowed to run: neither gets at the coordinator's machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.operator.client import Refused
from coordinator.sandbox import enter
from tests.support import spy
from tests.support.cli import CACHE, assert_refused, options, run_here
from tests.support.processes import HANGS_SECONDS
from tests.support.require import require

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "federation": {"rounds": 1, "clients_per_round": 1, "runtimes": {"litert": 1.0}},
    "local": {"steps": 1},
}
HUBCONF = """
from pathlib import Path


def evil(out, **options):
    Path(out).write_text("was here")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's code, a data folder and a `hubconf.py`."""
    folder = tmp_path_factory.mktemp("operator")
    for name in ("code", "data", "hub"):
        (folder / name).mkdir()
    shutil.copy(Path(spy.__file__), folder / "code" / "spy.py")
    (folder / "hub" / "hubconf.py").write_text(HUBCONF)
    rng = np.random.default_rng(7)
    rows = "".join(f"{x:.3f},{y:.3f},{int(x > y)}\n" for x, y in rng.normal(size=(60, 2)))
    (folder / "data" / "rows.csv").write_text(f"x,y,label\n{rows}")
    (folder / "data" / "notes.csv").write_text("root:*:20228:0\nnobody:*:1\n")
    return folder


@pytest.fixture(scope="module")
def fleet(folder: Path, module_served_on: Mapping[str, str]) -> Iterator[LocalFleet]:
    """`fedloop serve` as somebody starts it who lets others run a module of theirs."""
    if reason := enter.unavailable_reason():
        require("landlock", reason)
    flags = ("--allow-code", "spy:build", "--data-dir", str(folder / "data"))
    secrets = {"PGPASSWORD": spy.SECRET, "FEDLOOP_ADMIN_TOKEN": spy.SECRET, "FEDLOOP_CACHE_DIR": str(CACHE)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "code")
        place = folder / ("postgresql" if module_served_on else "sqlite")
        with local_fleet(place, flags, {**secrets, **module_served_on}) as running:
            yield running


def started(fleet: LocalFleet, **tables: Any) -> str:
    run: str = fleet.client.post("/runs", {"experiment": {**SMALL, **tables}})["id"]
    return run


def prepared(fleet: LocalFleet, run: str) -> dict[str, Any]:
    """The run once it is prepared, or has failed at that; then it is ended."""
    end = time.monotonic() + HANGS_SECONDS
    while True:
        found: dict[str, Any] = fleet.client.get(f"/runs/{run}")
        if found["state"] == "running":
            fleet.client.post(f"/runs/{run}/cancel")
            return found
        if found["state"] != "queued":
            return found
        assert time.monotonic() < end, fleet.coordinator.tail()
        time.sleep(0.05)


def refused(fleet: LocalFleet, **tables: Any) -> str:
    with pytest.raises(Refused) as raised:
        started(fleet, **tables)
    assert raised.value.status == 422
    return raised.value.code


@pytest.mark.parametrize("at", ["workers.worker", "conversion.convert"])
def test_allowed_code_gets_nothing_of_the_coordinators(fleet: LocalFleet, at: str) -> None:
    assert (fleet.home / "admin.token").is_file()
    address = fleet.operator_url.removeprefix("http://")
    model = {"name": "spy:build", "at": at, "home": str(fleet.home), "address": address}

    error = prepared(fleet, started(fleet, model=model))["error"]

    can = ["write", "replace", "read", "import", "start", "random", "threads"]
    assert f"RuntimeError: got [], can {can}" in error


def test_allowed_code_and_tables_of_the_data_folder_are_prepared(fleet: LocalFleet, folder: Path) -> None:
    tables = {
        "data": {"dataset": "csv", "scale": "site", "path": str(folder / "data" / "rows.csv")},
        "model": {"name": "spy:build"},
        "federation": {**SMALL["federation"], "runtimes": {"torch": 1.0}},
    }
    found = prepared(fleet, started(fleet, **tables))
    assert (found["state"], found["error"]) == ("running", None)
    assert [notice.partition(" are ")[0] for notice in found["notices"]] == ["test figures"]


def test_code_that_is_merely_installed_never_runs(fleet: LocalFleet, folder: Path) -> None:
    canary = folder / "canary"
    hub = {"repo_or_dir": str(folder / "hub"), "model": "evil", "source": "local", "out": str(canary)}
    assert refused(fleet, model={"name": "torch.hub:load", **hub}) == "code_not_allowed"
    assert refused(fleet, data={"dataset": "os:abort"}) == "code_not_allowed"
    assert not canary.exists()


def test_the_command_says_what_the_administrator_is_to_do(fleet: LocalFleet, folder: Path) -> None:
    env = {"FEDLOOP_COORDINATOR": fleet.operator_url, "FEDLOOP_ADMIN_TOKEN": read_admin_token(fleet.home)}
    done = run_here("run", *options(["data.dataset=mine:load"]), cwd=folder, env=env)
    assert_refused(done, "data.dataset = 'mine:load'", "fedloop serve --allow-code mine:load")
    done = run_here("run", *options(["model.init=start.safetensors"]), cwd=folder, env=env)
    assert_refused(done, str(folder / "start.safetensors"), "--allow-path DIR", "digits:3")


def test_endless_and_secret_files_are_refused_before_they_are_read(fleet: LocalFleet) -> None:
    before = psutil.Process(fleet.coordinator.pid).memory_info().rss
    for path in ("/dev/zero", "/etc/shadow", "/proc/self/environ", str(fleet.home / "admin.token")):
        assert refused(fleet, data={"dataset": "csv", "path": path}) == "path_not_allowed"
        assert refused(fleet, model={"name": "logreg", "init": path}) == "path_not_allowed"
    assert psutil.Process(fleet.coordinator.pid).memory_info().rss < before + 50_000_000


def test_a_file_that_is_no_table_is_not_quoted(fleet: LocalFleet, folder: Path) -> None:
    path = folder / "data" / "notes.csv"
    by_path = started(fleet, data={"dataset": "csv", "path": str(path)})
    by_init = started(fleet, model={"name": "logreg", "init": str(path)})
    error = prepared(fleet, by_path)["error"]
    assert str(path) in error and "no column 'label'" in error
    assert "root" not in error.replace(str(path), "") and "20228" not in error
    assert prepared(fleet, by_init)["error"] == f"model.init = {str(path)!r} is not a safetensors file"
