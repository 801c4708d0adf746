"""`fedloop-edge doctor` against a coordinator over real TLS: each finding, and how to mend it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from edge_client import config
from edge_client.commands import doctor
from edge_client.commands.doctor import Check
from tests.support.edge import enrolled
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.small_disk import fill, small_disk


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().running() as fake:
        yield fake


def examined(folder: Path, *sets: str, clock_ahead: float = 0.0) -> dict[str, Check]:
    loaded = config.load(None, {"HOME": str(folder)}, [f"state_dir={folder}", *sets]).config
    return {check.name: check for check in doctor.examine(loaded, lambda: time.time() + clock_ahead)}


def test_a_device_that_is_taken_is_well(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    table = tmp_path / "digits.csv"
    table.write_text("a,digit\n" + "".join(f"{n},{n % 3}\n" for n in range(30)))
    data = ("data.digits.kind=csv", f"data.digits.path={table}", "data.digits.label=digit")
    found = examined(tmp_path, *data)
    assert all(check.well for check in found.values()), found
    assert found["certificate"].found == "accepted, and valid for 30 more days"
    assert found["data digits"].found.endswith(" rows")
    assert coordinator.checkins == []


def test_whether_it_can_train_by_dp_sgd_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examined(tmp_path)["DP-SGD"].found.startswith("opacus ")
    assert "DP-SGD" not in examined(tmp_path, 'runtimes=["litert"]')

    def lacking(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", lacking)
    check = examined(tmp_path)["DP-SGD"]
    assert check.well  # other tasks go on
    assert "tasks of DP-SGD are declined; pip install 'fedloop[privacy]'" in check.found


@pytest.mark.parametrize(
    ("status", "code", "mend"),
    [
        (403, "revoked", "enroll again"),
        (403, "unknown_device", "enroll again"),
        (403, "pending", "wait for it"),
        (401, "expired", "fedloop-edge run"),
        (401, "no_certificate", "an intermediary removes"),
    ],
)
def test_a_certificate_that_is_not_taken_is_reported(
    coordinator: FakeCoordinator, tmp_path: Path, status: int, code: str, mend: str
) -> None:
    enrolled(coordinator, tmp_path)
    coordinator.refusals["/blobs/"] = (status, code)
    check = examined(tmp_path)["certificate"]
    assert not check.well
    assert code in check.found and mend in check.mend


def test_without_an_enrolment_it_says_how_to_begin(tmp_path: Path) -> None:
    found = examined(tmp_path)
    assert (found["identity"].well, found["identity"].mend) == (False, "fedloop-edge enroll URL TOKEN")
    assert "coordinator" not in found


def test_a_damaged_identity_is_reported(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    (tmp_path / "identity" / "server.json").write_text("{")
    assert "cannot be read" in examined(tmp_path)["identity"].found


def test_a_coordinator_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    with FakeCoordinator().running() as fake:
        enrolled(fake, tmp_path)
    found = examined(tmp_path)
    assert not found["coordinator"].well and "certificate" not in found


def test_a_coordinator_made_anew_is_reported(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    with FakeCoordinator().running() as other:
        server = tmp_path / "identity" / "server.json"
        server.write_text(server.read_text().replace(coordinator.url, other.url))
        check = examined(tmp_path)["coordinator"]
    assert "not the coordinator this device enrolled with" in check.found


def test_a_clock_that_is_off_is_reported(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    check = examined(tmp_path, clock_ahead=86_400.0)["clock"]
    assert (check.well, check.found) == (
        False,
        "this machine's clock is 24 h ahead of the coordinator's; set it",
    )


def test_a_runtime_and_data_that_are_missing_are_reported(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    nothing = examined(tmp_path, "runtimes=[]")
    assert "pip install" in nothing["runtimes"].mend
    assert "[data.NAME]" in nothing["data"].mend
    gone = examined(tmp_path, "data.digits.kind=csv", "data.digits.path=/nowhere.csv", "data.digits.label=y")
    assert "/nowhere.csv" in gone["data digits"].found


def test_a_state_folder_of_somebody_else_ends_it(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"this is no database, whatever its name is" * 100)
    found = examined(tmp_path)
    assert list(found) == ["state folder"] and not found["state folder"].well
    assert found["state folder"].mend == "state.db is damaged: move it away; identity and models are kept"


def test_a_state_folder_on_a_full_disk_is_reported_as_such_and_keeps_its_database(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        fill(disk / "filler")
        found = examined(disk / "state")
        assert list(found) == ["state folder"] and not found["state folder"].well
        assert "its disk is full: free some space there" in found["state folder"].mend
        assert "move it away" not in found["state folder"].mend
