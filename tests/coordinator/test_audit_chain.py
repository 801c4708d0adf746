"""The chain of the audit log: whatever is changed in it, the first entry concerned is named."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from coordinator.audit import entries
from coordinator.audit.copies import Copy, write
from coordinator.audit.entries import COLUMNS, GENESIS, Entry, append, hash_of, raw_entries
from coordinator.audit.heads import Head, Heads
from coordinator.audit.verification import Altered, verify_chain
from coordinator.db.store import Database
from coordinator.errors import Refusal, UserError
from tests.support.databases import with_tables

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
LENGTH = 8
Log = list[dict[str, Any]]


def written(count: int) -> Log:
    """A log as the database returns it."""
    log: Log = []
    for number in range(1, count + 1):
        row = {
            "number": number,
            "time": entries.timestamp(NOW + timedelta(seconds=number)),
            "stage": "begun",
            "begun": None,
            "principal_kind": "session",
            "principal": f"user{number % 3}",
            "address": "127.0.0.1",
            "action": "POST /tokens",
            "resource": "{}",
            "status": None,
            "details": "{}",
            "previous": log[-1]["hash"] if log else GENESIS,
        }
        log.append({**row, "hash": hash_of(row)})
    return log


def rehashed(log: Log, start: int) -> Log:
    """The log with the hashes of the entries from index `start` on computed anew, as a thorough intruder does."""
    made = [dict(entry) for entry in log]
    for at in range(start, len(made)):
        made[at]["previous"] = made[at - 1]["hash"] if at else GENESIS
        made[at]["hash"] = hash_of(made[at])
    return made


def named(log: Sequence[dict[str, Any]], known: dict[int, str] | None = None) -> int:
    with pytest.raises(Altered) as altered:
        verify_chain(log, known)
    assert f"{altered.value.number}" in str(altered.value)
    return altered.value.number


at = st.integers(0, LENGTH - 1)
values = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.booleans())


def test_an_unaltered_log_is_intact() -> None:
    log = written(LENGTH)
    assert verify_chain(log, {entry["number"]: entry["hash"] for entry in log}) == LENGTH
    assert verify_chain([]) == 0


def test_the_hash_is_what_the_documentation_says() -> None:
    """A twin that shares no code."""
    (first,) = written(1)
    document = {key: value for key, value in first.items() if key != "hash"}
    twin = json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
    assert first["hash"] == hashlib.sha256(twin).hexdigest()


@given(at, st.sampled_from(COLUMNS), values)
def test_an_edited_entry_is_named(place: int, column: str, value: Any) -> None:
    log = written(LENGTH)
    if json.dumps(log[place][column]) == json.dumps(value):
        return
    log[place][column] = value
    assert named(log) == place + 1


@given(at, st.sampled_from(["principal", "action", "time", "details", "resource", "address"]))
def test_an_edited_entry_with_a_new_hash_is_named(place: int, column: str) -> None:
    log = written(LENGTH)
    known = {LENGTH: log[-1]["hash"]}
    log[place][column] += "x"
    log[place]["hash"] = hash_of(log[place])
    assert named(log, known) == place + 1


@given(at)
def test_a_deleted_entry_is_named(place: int) -> None:
    log = written(LENGTH)
    head = {LENGTH: log[-1]["hash"]}
    del log[place]
    assert named(log, head) == place + 1


@given(st.integers(0, LENGTH - 1))
def test_a_deleted_end_is_found_by_a_head_only(place: int) -> None:
    log = written(LENGTH)
    head = {LENGTH: log[-1]["hash"]}
    assert verify_chain(log[:place]) == place
    assert named(log[:place], head) == place + 1


@given(at, at)
def test_of_two_swapped_entries_the_first_is_named(one: int, other: int) -> None:
    log = written(LENGTH)
    if one == other:
        return
    log[one], log[other] = log[other], log[one]
    assert named(log) == min(one, other) + 1


@given(at, at)
def test_swapped_contents_under_the_right_numbers_are_named(one: int, other: int) -> None:
    log = written(LENGTH)
    if one == other:
        return
    log[one], log[other] = {**log[other], "number": one + 1}, {**log[one], "number": other + 1}
    assert named(log) == min(one, other) + 1


@given(at, at, st.booleans())
def test_an_inserted_entry_is_named(place: int, copied: int, numbered: bool) -> None:
    log = written(LENGTH)
    inserted = dict(log[copied])
    if numbered:
        inserted = {**inserted, "number": place + 1, "principal": "nobody"}
        inserted["previous"] = log[place - 1]["hash"] if place else GENESIS
        inserted["hash"] = hash_of(inserted)
    log.insert(place, inserted)
    # An entry that fits in its place, or repeats the one in it, shows by the one that follows.
    assert named(log) in ({place + 1, place + 2} if numbered or copied == place else {place + 1})


@given(at, st.integers(1, LENGTH))
def test_a_log_rewritten_from_an_entry_on_is_found_by_an_earlier_head(place: int, head: int) -> None:
    log = written(LENGTH)
    known = {head: log[head - 1]["hash"]}
    log[place]["principal"] = "somebody else"
    forged = rehashed(log, place)
    assert verify_chain(forged) == LENGTH
    if head > place:
        assert named(forged, known) == head
    else:
        assert verify_chain(forged, known) == LENGTH  # that head was signed before the forgery


@given(at)
def test_a_rewritten_entry_itself_is_named_by_an_earlier_copy(place: int) -> None:
    log = written(LENGTH)
    known = {entry["number"]: entry["hash"] for entry in log}
    log[place]["principal"] = "somebody else"
    assert named(rehashed(log, place), known) == place + 1


ENTRY = Entry("begun", "admin_token", "admin", "POST /tokens", "127.0.0.1", details={"group": "ä\x00"})


def test_entries_come_back_from_the_database_as_they_were_hashed(database: Database) -> None:
    for number in range(5):
        entry = replace(ENTRY, begun=number or None, status=200, details={"text": "é" * 300})
        database.write(partial(append, entry=entry, now=NOW)).result()
    log = database.read(lambda connection: raw_entries(connection, 0, 100))
    assert verify_chain(log) == 5
    assert json.loads(log[0]["details"]) == {"text": "é" * entries.TEXT_LIMIT}


def test_two_processes_on_one_database_make_one_chain(database_url: str) -> None:
    with_tables(database_url)
    databases = [Database(database_url) for _ in range(2)]

    def write_some(database: Database) -> None:
        for each in [database.write(partial(append, entry=ENTRY, now=NOW)) for _ in range(40)]:
            each.result()

    threads = [threading.Thread(target=write_some, args=(each,)) for each in databases * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = databases[0].read(lambda connection: raw_entries(connection, 0, 1000))
    for each in databases:
        each.close()
    assert verify_chain(log) == 160


@pytest.fixture
def log_of_four(tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/log.db"
    with_tables(url)
    database = Database(url)
    for _ in range(4):
        database.write(partial(append, entry=ENTRY, now=NOW)).result()
    yield database
    database.close()


@pytest.mark.parametrize(
    ("statement", "number"),
    [
        ("UPDATE audit SET status = 'none' WHERE number = 2", 2),
        ("UPDATE audit SET details = x'00ff' WHERE number = 3", 3),
        ("UPDATE audit SET details = 'no json', hash = 'x' WHERE number = 1", 1),
        ("UPDATE audit SET number = 9 WHERE number = 2", 2),
        ("DELETE FROM audit WHERE number < 3", 1),
    ],
)
def test_rows_written_by_an_intruder_are_named(log_of_four: Database, statement: str, number: int) -> None:
    log_of_four.write(lambda connection: connection.execute(text(statement))).result()
    assert named(log_of_four.read(lambda connection: raw_entries(connection, 0, 100))) == number


def test_no_head_is_signed_over_a_log_that_lost_its_end(log_of_four: Database, tmp_path: Path) -> None:
    heads = Heads(tmp_path / "audit")
    head = heads.sign(log_of_four, NOW)
    assert head.number == 4
    assert head.is_signed
    log_of_four.write(lambda at: at.execute(text("DELETE FROM audit WHERE number > 2"))).result()
    for _ in range(3):  # the coordinator continues: the number is reached again
        log_of_four.write(partial(append, entry=ENTRY, now=NOW + timedelta(1))).result()
    with pytest.raises(Refusal, match="does not contain entry 4") as refused:
        heads.sign(log_of_four, NOW)
    assert refused.value.code == "audit_altered"
    assert refused.value.details["head"] == asdict(head)
    assert Heads(tmp_path / "audit").newest() == head


def test_the_key_of_heads_stays_and_only_its_owner_can_read_it(log_of_four: Database, tmp_path: Path) -> None:
    first = Heads(tmp_path / "audit").sign(log_of_four, NOW)
    second = Heads(tmp_path / "audit").sign(log_of_four, NOW + timedelta(1))
    assert first.key == second.key
    assert (tmp_path / "audit" / "key.pem").stat().st_mode & 0o777 == 0o600
    (tmp_path / "audit" / "key.pem").write_text("no key")
    with pytest.raises(UserError, match=r"key\.pem: expected an unencrypted Ed25519 key"):
        Heads(tmp_path / "audit").sign(log_of_four, NOW)


@pytest.mark.parametrize(
    ("field", "value"),
    [("number", 3), ("hash", "0" * 64), ("time", "2027"), ("key", "00" * 32), ("signature", "zz")],
)
def test_a_changed_head_is_refused(log_of_four: Database, tmp_path: Path, field: str, value: Any) -> None:
    head = Heads(tmp_path / "audit").sign(log_of_four, NOW)
    with pytest.raises(UserError, match="signature of the head is not valid"):
        Head.parse({**asdict(head), field: value}, "head.json")


def test_a_copy_returns_what_was_written(log_of_four: Database, tmp_path: Path) -> None:
    log = log_of_four.read(lambda connection: raw_entries(connection, 0, 100))
    head = Heads(tmp_path / "audit").sign(log_of_four, NOW)
    assert write(tmp_path / "copy.jsonl", log, head) == 4
    copy = Copy(tmp_path / "copy.jsonl")
    assert list(copy.entries()) == log
    assert copy.head == head
    assert copy.known_hashes() == {entry["number"]: entry["hash"] for entry in log}
    write(tmp_path / "head.jsonl", [], head)
    assert Copy(tmp_path / "head.jsonl").known_hashes() == {4: head.hash}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[:-1], "incomplete or was cut off"),
        (lambda lines: lines[1:], "not a copy of an audit log"),
        (lambda lines: [], "not a copy of an audit log"),
        (lambda lines: ["\x00\xff"], "not a copy of an audit log"),
        (lambda lines: [*lines[:-1], '{"head": 3}'], "not a head"),
    ],
)
def test_a_file_that_is_no_copy_is_refused(
    log_of_four: Database, tmp_path: Path, damage: Any, message: str
) -> None:
    path = tmp_path / "copy.jsonl"
    write(path, [], Heads(tmp_path / "audit").sign(log_of_four, NOW))
    path.write_text("\n".join(damage(path.read_text().splitlines())), "utf-8")
    with pytest.raises(UserError, match=message):
        Copy(path)
