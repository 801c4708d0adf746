"""`fedloop audit` against a real `fedloop serve`, and a SIGKILL of it at each moment between a change and its record."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator import failpoints
from coordinator.audit.copies import write
from coordinator.audit.entries import raw_entries
from coordinator.audit.heads import Heads
from coordinator.audit.queries import Filters, records
from coordinator.audit.verification import verify_chain
from coordinator.db import tokens
from coordinator.errors import UserError
from coordinator.operator.client import connect
from edge_client.processes.process import tie_to_parent
from tests.support.cli import FEDLOOP, run_here
from tests.support.long import extended
from tests.support.services import services_in

pytestmark = pytest.mark.slow


@contextmanager
def served(home: Path, failpoint: str = "") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A coordinator, and its address; commands of this process find it."""
    command = [str(FEDLOOP), "serve", "--home", str(home), "--operator", "127.0.0.1:0"]
    with (home.parent / "serve.log").open("ab") as log, pytest.MonkeyPatch.context() as patch:
        process = subprocess.Popen(
            tie_to_parent([*command, "--device", "127.0.0.1:0"]),
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "FEDLOOP_FAILPOINT": failpoint},
        )
        assert process.stdout is not None
        try:
            address = json.loads(process.stdout.readline())["operator"]
            patch.setenv("FEDLOOP_COORDINATOR", address)
            patch.setenv("FEDLOOP_ADMIN_TOKEN", (home / "admin.token").read_text().strip())
            yield process, address
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("coordinator") / "home"
    with served(home):
        client = connect()
        for group in ("clinic", "lab", "ward"):
            client.post("/tokens", {"group": group})
        yield home


def fedloop(*args: str | Path, code: int = 0) -> str:
    """What `fedloop audit` prints."""
    done = run_here("audit", *args)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def change(home: Path, *statements: str) -> None:
    """Writes into the database past the coordinator, as its administrator could."""
    with closing(sqlite3.connect(home / "fedloop.db", timeout=30)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def test_the_start_and_each_change_are_listed(home: Path) -> None:
    listed = json.loads(fedloop("list", "--json"))
    assert [each["action"] for each in listed][-4:] == ["POST /tokens"] * 3 + ["start"]
    assert listed[-1]["kind"] == "process"
    assert listed[-1]["details"]["sandbox"] is True
    shown = fedloop("list", "--action", "tokens", "--since", "1h", "--by", "admin", "--limit", "2")
    assert shown.count("POST /tokens") == 2
    assert "group ward" in shown and "done 201" in shown
    assert fedloop("list", "--since", "2999-01-01") == "no entries match\n"
    assert "expected a date or time" in fedloop("list", "--since", "soon", code=2)


def test_an_export_is_verified_without_the_coordinator(home: Path, tmp_path: Path) -> None:
    assert "entries and the head of entry" in fedloop("export", tmp_path / "log.jsonl")
    assert fedloop("verify", tmp_path / "log.jsonl", "--coordinator", "http://127.0.0.1:1").startswith(
        "intact: "
    )
    assert "does not replace" in fedloop("export", tmp_path / "log.jsonl", code=2)
    token = (home / "admin.token").read_text().strip()
    assert token not in (tmp_path / "log.jsonl").read_text()

    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    for at in range(1, len(lines) - 1):
        (tmp_path / "less.jsonl").write_text("\n".join(lines[:at] + lines[at + 1 :]))
        assert f"altered: entr{'y' if at < len(lines) - 2 else 'ies'} {at} " in fedloop(
            "verify", tmp_path / "less.jsonl", code=1
        )
    (tmp_path / "cut.jsonl").write_text("\n".join(lines[:-1]))
    assert "incomplete or was cut off" in fedloop("verify", tmp_path / "cut.jsonl", code=2)


def test_the_log_is_compared_with_an_earlier_export_or_head(home: Path, tmp_path: Path) -> None:
    fedloop("export", tmp_path / "head.jsonl", "--head-only")
    fedloop("export", tmp_path / "old.jsonl")
    connect().post("/tokens", {})
    fedloop("export", tmp_path / "new.jsonl")
    for earlier in ("head.jsonl", "old.jsonl"):
        assert "contains entry" in fedloop("verify", "--head", tmp_path / earlier)
        assert "contains entry" in fedloop("verify", tmp_path / "new.jsonl", "--head", tmp_path / earlier)
    assert "give the older one to --head" in fedloop(
        "verify", tmp_path / "old.jsonl", "--head", tmp_path / "new.jsonl", code=2
    )
    assert "head without entries" in fedloop("verify", tmp_path / "head.jsonl", code=2)


def test_changes_in_the_database_are_named(home: Path, tmp_path: Path) -> None:
    """Without an earlier export too: the coordinator compares with the head that it signed last."""
    fedloop("export", tmp_path / "before.jsonl")
    assert "intact" in fedloop("verify")
    change(home, "CREATE TABLE kept AS SELECT * FROM audit")
    for number, statements in {
        3: ["UPDATE audit SET principal = 'somebody' WHERE number = 3"],
        2: ["DELETE FROM audit WHERE number = 2"],
        5: ["DELETE FROM audit WHERE number >= 5"],
        4: [
            "UPDATE audit SET number = -4 WHERE number = 4",
            "UPDATE audit SET number = 4 WHERE number = 6",
            "UPDATE audit SET number = 6 WHERE number = -4",
        ],
    }.items():
        change(home, *statements)
        for more in ([], ["--head", str(tmp_path / "before.jsonl")]):
            shown = json.loads(fedloop("verify", "--json", *more, code=1))
            assert shown["intact"] is False
            assert shown["entry"] == number, shown
        change(home, "DELETE FROM audit", "INSERT INTO audit SELECT * FROM kept")
    assert "intact" in fedloop("verify")


def test_a_log_of_another_coordinator_is_not_taken_for_this_one(home: Path, tmp_path: Path) -> None:
    with services_in(tmp_path / "other") as other:
        write(tmp_path / "theirs.jsonl", [], Heads(tmp_path / "audit").sign(other.database, other.clock()))
    assert "is signed by the key" in fedloop("verify", "--head", tmp_path / "theirs.jsonl", code=1)


@pytest.mark.parametrize(
    ("failpoint", "is_made", "outcome"),
    [
        ("audit.changed", True, "unfinished"),
        *extended(("audit.begun", False, "unfinished"), ("audit.ended", True, "done")),
    ],
)
def test_killed_at_any_moment_no_change_is_without_an_entry(
    tmp_path: Path, failpoint: str, is_made: bool, outcome: str
) -> None:
    with served(tmp_path / "home", failpoint) as (process, _):
        with pytest.raises(UserError):
            connect().post("/tokens", {"group": "clinic"})
        assert process.wait() == -signal.SIGKILL
    with services_in(tmp_path / "home") as services:
        made: list[Any] = services.database.read(lambda at: tokens.usable(at, services.clock(), 10))
        assert bool(made) == is_made
        record, start = services.database.read(partial(records, filters=Filters(), limit=10))
        assert (record["action"], record["outcome"], start["action"]) == ("POST /tokens", outcome, "start")
        verify_chain(services.database.read(lambda at: raw_entries(at, 0, 100)))


def test_every_failpoint_is_reached_above() -> None:
    (mark,) = test_killed_at_any_moment_no_change_is_without_an_entry.pytestmark  # type: ignore[attr-defined]
    cases = [getattr(each, "values", each) for each in mark.args[1]]  # those of the long edition are marked
    assert {case[0] for case in cases} == {*failpoints.AUDIT_NAMES}
