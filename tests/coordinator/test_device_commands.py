"""`fedloop device` against a real operator API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fastapi import FastAPI
from structlog.testing import capture_logs
from typer.testing import CliRunner

from coordinator.accounts.admin_token import TOKEN_FILE, ensure_admin_token
from coordinator.commands import cli
from coordinator.commands.device import app
from coordinator.db import events, runs
from coordinator.db.store import Database
from coordinator.errors import UserError
from coordinator.experiments.experiment import resolve
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from tests.support.databases import with_tables
from tests.support.device_world import START
from tests.support.doorway import Device, Door, listening, open_door


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    home = tmp_path_factory.mktemp("home")
    url = f"sqlite:///{home}/fedloop.db"
    with_tables(url)
    database = Database(url)
    ensure_admin_token(home)
    with open_door(home, database, device_url="https://fed.example:8443") as opened:
        yield opened
    database.close()


@pytest.fixture(scope="module")
def operator(coordinator: Door) -> FastAPI:
    services = coordinator.services
    return operator_app(services, Any, Metrics(services.database, services.signals))  # type: ignore[arg-type]


@pytest.fixture
def fedloop(coordinator: Door, operator: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs `fedloop device …`; a user's mistake is raised as an exception."""
    with capture_logs(), listening(operator) as port:  # the server's log lines are not the command's output
        monkeypatch.setenv("FEDLOOP_COORDINATOR", f"http://127.0.0.1:{port}")
        token = (coordinator.services.settings.home / TOKEN_FILE).read_text().strip()
        monkeypatch.setenv("FEDLOOP_ADMIN_TOKEN", token)

        def run(*args: str | Path) -> Result:
            done = CliRunner().invoke(app, [str(each) for each in args])
            if isinstance(done.exception, UserError):
                raise done.exception
            assert done.exit_code == 0, done.output
            return done

        yield run


@pytest.fixture
def enrolled(coordinator: Door, tmp_path: Path, request: pytest.FixtureRequest) -> Device:
    device = Device(tmp_path, request.node.name[:60])
    assert coordinator.enrol(device).status_code == 200
    return device


def test_a_token_is_printed_as_the_line_to_type_on_the_device(
    fedloop: Any, coordinator: Door, tmp_path: Path
) -> None:
    done = fedloop("token", "--group", "clinic", "--ttl", "2h")
    command, verb, url, token = done.stdout.split()
    assert (command, verb, url) == ("fedloop-edge", "enroll", "https://fed.example:8443")
    assert "1 device, until 2026-11-20 14:00 UTC" in done.stderr
    device = Device(tmp_path)
    assert coordinator.enrol(device, token).status_code == 200
    shown = json.loads(fedloop("show", device.id, "--json").stdout)
    assert (shown["group"], shown["state"], shown["report"]) == ("clinic", "active", {})


def test_a_token_for_many_or_for_approval(fedloop: Any, coordinator: Door, tmp_path: Path) -> None:
    made = json.loads(fedloop("token", "--uses", "2", "--approve", "--json").stdout)
    assert made["uses"] == 2
    device = Device(tmp_path)
    assert coordinator.enrol(device, made["token"]).json()["certificate"] == ""
    pending = json.loads(fedloop("list", "--state", "pending", "--json").stdout)
    assert device.id in [each["id"] for each in pending]
    assert "may take part" in fedloop("approve", device.id[:12]).stdout
    assert coordinator.enrol(device, made["token"]).json()["certificate"] != ""


def test_a_withdrawn_token_is_not_listed_and_admits_no_device(
    fedloop: Any, coordinator: Door, tmp_path: Path
) -> None:
    made = json.loads(fedloop("token", "--uses", "3", "--group", "ward", "--json").stdout)
    first = Device(tmp_path, "before")
    assert coordinator.enrol(first, made["token"]).status_code == 200
    (line,) = [each for each in fedloop("tokens").stdout.splitlines() if made["id"][:8] in each]
    assert line == f"{made['id'][:8]}  group ward, 2 more devices, until 2026-11-20 12:15 UTC"
    assert made["token"].rpartition(".")[2] not in fedloop("tokens", "--json").stdout
    assert "admits no more devices" in fedloop("withdraw", made["id"][:8]).stdout
    fedloop("withdraw", made["id"])
    refused = coordinator.enrol(Device(tmp_path, "after"), made["token"])
    assert refused.json()["error"]["code"] == "token_expired"
    assert made["id"][:8] not in fedloop("tokens").stdout
    assert coordinator.enrol(first, made["token"]).status_code == 200  # who is in asks again as before
    with pytest.raises(UserError, match="fedloop device tokens"):
        fedloop("withdraw", "nobody")


@pytest.mark.parametrize("ttl", ["", "15", "m", "-1m", "15 parsecs", "1e9d"])
def test_an_invalid_duration_is_refused(fedloop: Any, ttl: str) -> None:
    with pytest.raises(UserError, match="--ttl"):
        fedloop("token", f"--ttl={ttl}")


def test_a_token_that_lives_for_years_is_refused_by_the_coordinator(fedloop: Any) -> None:
    with pytest.raises(UserError, match="ttl_seconds"):
        fedloop("token", "--ttl", "4000d")


def test_machines_of_a_list_enrol_with_one_token(fedloop: Any, coordinator: Door, tmp_path: Path) -> None:
    file = tmp_path / "serials.txt"
    file.write_text("# line 3\nSN-1\n\nSN-2  # spare\nSN-1\n")
    assert "2 listed in group north, 0 were" in fedloop("import", file, "--group", "north").stdout
    assert "0 listed in group south, 2 were" in fedloop("import", file, "--group", "south").stdout
    token = json.loads(fedloop("token", "--listed", "--json").stdout)["token"]
    device = Device(tmp_path)
    assert coordinator.enrol(device, token, serial_number="SN-2").status_code == 200
    assert json.loads(fedloop("show", device.id, "--json").stdout)["group"] == "north"
    assert coordinator.enrol(Device(tmp_path), token, serial_number="SN-2").status_code == 403


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "no serial number"), (b"\xff\xfe", "UTF-8"), (b"x" * 300, "at most 200")],
)
def test_an_invalid_list_of_serials_is_refused_with_its_file(
    fedloop: Any, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "serials.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=rf"serials\.txt.*{message}"):
        fedloop("import", file)


def test_devices_are_listed_as_a_table(fedloop: Any, enrolled: Device) -> None:
    lines = fedloop("list").stdout.splitlines()
    assert lines[0].split() == ["id", "name", "group", "state", "presence", "last", "seen", "runtimes"]
    (line,) = [each for each in lines if each.startswith(enrolled.id[:8])]
    assert line.split() == [enrolled.id[:8], enrolled.name, "default", "active", "offline", "never"]


def test_an_empty_list_says_what_to_do(fedloop: Any) -> None:
    assert "fedloop device token" in fedloop("list", "--group", "nobody is here").stdout


def test_a_device_is_found_by_id_by_prefix_or_by_name(fedloop: Any, enrolled: Device) -> None:
    for called in (enrolled.id, enrolled.id[:13], enrolled.name):
        assert json.loads(fedloop("show", called, "--json").stdout)["id"] == enrolled.id


def test_an_ambiguous_name_is_refused(fedloop: Any, coordinator: Door, tmp_path: Path) -> None:
    for _ in range(2):
        coordinator.enrol(Device(tmp_path, "twin"))
    with pytest.raises(UserError, match=r"matches 2 devices.*more of the id"):
        fedloop("revoke", "twin")
    with pytest.raises(UserError, match="no device matches 'nobody'"):
        fedloop("show", "nobody")


def test_a_revoked_device_is_refused(fedloop: Any, coordinator: Door, enrolled: Device) -> None:
    assert "is revoked" in fedloop("revoke", enrolled.name, "--reason", "stolen from the depot").stdout
    reported = coordinator.services.database.read(lambda at: events.since(at, 0, 1000))[-1]
    assert (reported.event, reported._mapping["values"]["reason"]) == (
        "device_revoked",
        "stolen from the depot",
    )
    assert coordinator.call("POST", "/checkin", {}, device=enrolled).status_code == 403
    assert "revoked" in fedloop("show", enrolled.id).stdout
    with pytest.raises(UserError, match="must enrol again"):
        fedloop("approve", enrolled.id)


def test_why_explains_in_sentences(fedloop: Any, enrolled: Device) -> None:
    lines = fedloop("why", enrolled.name).stdout.splitlines()
    assert lines[0] == f"{enrolled.name} ({enrolled.id[:8]}) is active"
    assert lines[-1] == "no runs to take part in"
    assert json.loads(fedloop("why", enrolled.name, "--json").stdout)["device"] == enrolled.id


def test_a_device_name_cannot_control_a_terminal(fedloop: Any, coordinator: Door, enrolled: Device) -> None:
    report = {
        "wire": "1.3",
        "software": "1\x1b[2J",
        "runtimes": {"litert\x1b]0;x\x07": "2"},
        "memory_bytes": 1,
    }
    assert coordinator.call("POST", "/checkin", report, device=enrolled).status_code == 200
    for done in (fedloop("show", enrolled.id), fedloop("list"), fedloop("why", enrolled.id)):
        assert "\x1b" not in done.stdout and "\x07" not in done.stdout


def test_the_operator_api_describes_devices_and_tokens(operator: FastAPI) -> None:
    document = operator.openapi()
    named = {
        (path.removeprefix("/api/v1"), method): call["operationId"]
        for path, calls in document["paths"].items()
        for method, call in calls.items()
    }
    assert named[("/tokens", "post")] == "makeToken"
    assert named[("/serials", "post")] == "listSerials"
    assert named[("/devices", "get")] == "listDevices"
    assert named[("/devices/{device}", "get")] == "getDevice"
    assert named[("/devices/{device}/approve", "post")] == "approveDevice"
    assert named[("/devices/{device}/revoke", "post")] == "revokeDevice"
    made = document["components"]["schemas"]["MadeToken"]
    assert set(made["required"]) == {"id", "token", "url", "group", "uses", "expires_at"}


class Cancelled:
    """A fake run service that records the cancelled runs."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    def cancel(self, run: str) -> None:
        self.runs.append(run)


def test_a_run_is_found_by_id_by_prefix_or_by_name(
    fedloop: Any,
    operator: FastAPI,
    coordinator: Door,
    enrolled: Device,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = {"0aa11111-x": "digits", "0aa22222-x": "digits", "0bb33333-x": "pumps"}
    experiment = resolve({}, "test", "devices").model_dump(mode="json", exclude_none=True)
    for run, name in ids.items():
        coordinator.services.database.write(
            partial(runs.create, run=run, name=name, experiment=experiment, notices=(), now=START)
        ).result()
    monkeypatch.setattr(operator.state, "runs", Cancelled(), raising=False)

    def cancel(called: str) -> None:
        monkeypatch.setattr(sys, "argv", ["fedloop", "run", "--cancel", called])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0, capsys.readouterr().err

    (line,) = [each for each in fedloop("why", enrolled.id).stdout.splitlines() if "pumps" in each]
    assert line == "run pumps (0bb33333, queued)"
    for called in ("0bb33333-x", "0bb33", "pumps"):
        cancel(called)
        assert "0bb33333, queued" in fedloop("why", enrolled.id, "--run", called).stdout
    cancel("0AA2")
    assert operator.state.runs.runs == ["0bb33333-x"] * 3 + ["0aa22222-x"]
    for called in ("0aa", "digits"):
        with pytest.raises(UserError, match=r"matches 2 runs: digits \(0aa.*give more of the id"):
            fedloop("why", enrolled.id, "--run", called)
    with pytest.raises(UserError, match=r"no run matches 'nobody'; the newest: .*pumps \(0bb33333…\)"):
        fedloop("why", enrolled.id, "--run", "nobody")
