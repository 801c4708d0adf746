"""Devices that are enrolled and mean harm, against a served coordinator with a run under way.

One round is asked of an honest daemon and of hundreds of raw devices. Each of these sends one bad result, another
one sends every malformed request there is; all are refused in words, nothing of it is kept, and the model
comes out as it does when the honest device is alone.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from coordinator.db.tables import devices
from coordinator.rounds import intake
from coordinator.rounds.intake import Rejection
from edge_client.wire import arrays
from edge_client.wire import device as wire
from edge_client.wire.strict import InvalidDocument, loads, parse_message
from tests.support.arena import HONEST_GROUP, NO_LEASE_ENDS, Arena, Memory, add_honest, arena
from tests.support.device_client import Answer, NoAnswer, RawDevice, checkin, request
from tests.support.federation import task
from tests.support.hostile import Target, canary, request_cases, result_cases, sent
from tests.support.hostile_results import TENSORS, bad_results, mutated, sound_result
from tests.support.long import LONG
from tests.support.stored import rows, url_of

DOCS = Path(__file__).parents[2] / "docs" / "wire.md"

REQUEST_PEAK_BYTES = 40 * 2**20
"""What one request may add to the coordinator's peak.

A body is at most 1 MiB. As JSON it becomes at most some 350,000 lists (`[],` each), which take 64 bytes and a place in
another list: 25 MiB, beside the bytes, their text and the buffer. The bombs of the corpus inflate to more than this."""

IDLE_GROWTH_BYTES = 8 * 2**20
"""What the allocator may keep after the corpus was sent a second time: 20 kB a case would show."""


@dataclass
class Attack:
    """What happened, for the tests to look at."""

    answers: dict[str, Answer | None]
    acceptable: dict[str, frozenset[str]]
    stored_before: list[Any]
    stored_after: list[Any]
    memory: list[Memory]
    failures: list[str]
    metrics: str
    alone: dict[str, Any]
    together: dict[str, Any]
    afterwards: dict[str, Any]
    leftovers: dict[str, int]
    canary: Path
    updates: int


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory, module_served_on: Mapping[str, str]) -> Iterator[Attack]:
    with arena(tmp_path_factory.mktemp("arena"), environment={**NO_LEASE_ENDS, **module_served_on}) as made:
        add_honest(made)
        alone = made.finished(made.start_run(1, groups=[HONEST_GROUP]))
        yield _attacked(made, alone)


def _attacked(made: Arena, alone: dict[str, Any]) -> Attack:
    results, requests = result_cases()[:: 1 if LONG else 4], request_cases()
    *senders, attacker, other = made.enrol(len(results) + 2)
    run = made.start_run(len(made.raw) + 1)
    for device in made.raw:
        assert device.check_in(made.checkin()).status == 200
    offers = {device.id: device.task(made.checkin()) for device in made.raw}
    target = _target(made, attacker, offers, other)
    _honest_is_in(made, run)

    answers: dict[str, Answer | None] = {}
    for case in requests:  # a first time, so that all code is loaded and all caches are filled
        answers[case.name] = _played(case.play, attacker, target)
    before, memory = _stored(made), [made.memory()]
    for case in requests:
        _played(case.play, attacker, target)
    memory.append(made.memory())
    for case, sender in zip(results, senders, strict=True):
        answers[case.name] = _played(case.play, sender, _target(made, sender, offers, other))
    memory.append(made.memory())
    after = _stored(made)
    for device in made.raw:  # what was refused at its announcement leaves a task that nobody else can end
        device.post(f"/tasks/{offers[device.id]['task']}/decline", wire.Decline("failed", "enough"))
    together = made.finished(run)
    return Attack(
        answers=answers,
        acceptable={case.name: case.codes for case in (*requests, *results)},
        stored_before=before,
        stored_after=after,
        memory=memory,
        failures=made.failures(),
        metrics=made.metrics(),
        alone=alone,
        together=together,
        afterwards=made.finished(made.start_run(1, groups=[HONEST_GROUP])),
        leftovers=made.part_files(),
        canary=canary(made.fleet.folder),
        updates=len(made.rows("updates")),
    )


def _target(made: Arena, device: RawDevice, offers: dict[str, Any], other: RawDevice) -> Target:
    return made.target(device, offers[device.id], other, offers[other.id]["task"])


def _played(play: Any, device: RawDevice, target: Target) -> Answer | None:
    try:
        answer: Answer = play(device, target)
    except NoAnswer:
        return None
    return answer


def _honest_is_in(made: Arena, run: str) -> None:
    """Waits for the honest result, so that whatever is stored from now on is of an attacker."""
    for event in made.fleet.client.events(f"/events?run={run}"):
        if event["event"] == "update_accepted":
            return


def _stored(made: Arena) -> list[Any]:
    """All that a device can make the coordinator keep of its results."""
    return [made.rows("updates"), made.rows("evaluations"), made.blobs()]


@pytest.mark.slow
@pytest.mark.long
def test_hundreds_of_malformed_things_were_tried(attack: Attack) -> None:
    """One in four of the bad results here; all of them go through the parsers below."""
    assert len(attack.answers) >= (700 if LONG else 490)


@pytest.mark.slow
def test_each_is_refused_with_a_code_of_the_table(attack: Attack) -> None:
    table = documented_codes()
    wrong = {
        name: "no answer" if answer is None else (answer.status, answer.code, answer.body[:200])
        for name, answer in attack.answers.items()
        if answer is None
        or answer.code not in attack.acceptable[name]
        or answer.code not in table.get(answer.status, ())
    }
    assert not wrong


@pytest.mark.slow
def test_nothing_is_stored_of_any(attack: Attack) -> None:
    assert attack.stored_after == attack.stored_before
    assert attack.leftovers == {}


@pytest.mark.slow
def test_no_pickle_is_ever_loaded(attack: Attack) -> None:
    assert not attack.canary.exists()


@pytest.mark.slow
def test_the_coordinator_never_fails(attack: Attack) -> None:
    assert attack.failures == []
    assert not re.search(r'status="5\d\d"', attack.metrics)
    assert re.search(r'fedloop_request_seconds_count\{.*status="422"', attack.metrics)


@pytest.mark.slow
def test_memory_stays_flat(attack: Attack) -> None:
    first, second, last = attack.memory
    assert second.resident - first.resident < IDLE_GROWTH_BYTES
    assert last.peak - first.resident < REQUEST_PEAK_BYTES


@pytest.mark.slow
def test_the_round_comes_out_as_without_them(attack: Attack) -> None:
    (line,) = attack.together["rounds"]
    assert line["accepted"] == 1
    assert line["rejected"] >= (250 if LONG else 62)
    assert attack.together["final"]["model_sha256"] == attack.alone["final"]["model_sha256"]


@pytest.mark.slow
def test_the_next_run_goes_well(attack: Attack) -> None:
    assert attack.afterwards["final"]["model_sha256"] == attack.alone["final"]["model_sha256"]
    assert attack.updates <= 3


@pytest.mark.slow
@pytest.mark.long
def test_a_result_sent_again_and_again_counts_once(tmp_path: Path, served_on: Mapping[str, str]) -> None:
    with arena(tmp_path, environment=served_on) as made:
        first, second = made.enrol(2)
        run = made.start_run(2)
        for device in (first, second):
            device.check_in(made.checkin())
        offers = {device.id: device.task(made.checkin()) for device in (first, second)}
        target = _target(made, first, offers, second)
        payload = target.sound.payload
        often = 500 if LONG else 20
        for _ in range(often):
            assert first.upload(target.task, payload).document == {"offset": len(payload), "accepted": True}
        for content in sent(target, payload) * (often // 2):
            assert first.send(content).status == 200
        assert first.announce(target.task, payload[:-4] + bytes(4)).code == "duplicate"
        assert len(made.rows("updates")) == 1
        theirs = _target(made, second, offers, first)
        assert second.upload(theirs.task, theirs.sound.payload).status == 200
        (line,) = made.finished(run)["rounds"]
        assert line["accepted"] == 2
        accepted = [row for row in made.rows("events") if "update_accepted" in row]
        assert len(accepted) == 2
        assert made.failures() == []


@pytest.mark.extended
@pytest.mark.slow
def test_a_result_sent_by_many_at_once_counts_once(tmp_path: Path, served_on: Mapping[str, str]) -> None:
    with arena(tmp_path, environment=served_on) as made:
        (device,) = made.enrol(1)
        made.start_run(1)
        offer = device.task(made.checkin())
        payload = made.target(device, offer, device, offer["task"]).sound.payload
        twins = [
            RawDevice.kept(
                device.id, device.url, device.ca_pem, tmp_path / str(at), device.key, device.certificate
            )
            for at in range(20)
        ]
        ready = threading.Barrier(len(twins))

        def upload(twin: RawDevice) -> Answer:
            ready.wait()
            return twin.upload(offer["task"], payload)

        with ThreadPoolExecutor(len(twins)) as pool:
            answers = list(pool.map(upload, twins))
        for twin in twins:
            twin.close()
        assert any(answer.status == 200 and answer.document["accepted"] for answer in answers)
        assert {answer.code for answer in answers} <= {"", "upload_offset", "too_many_requests"}
        assert len(made.rows("updates")) == 1
        assert made.failures() == []


@pytest.mark.extended
@pytest.mark.slow
def test_a_forwarded_certificate_is_not_believed(tmp_path: Path, served_on: Mapping[str, str]) -> None:
    """The header of a trusted proxy, sent by whoever likes to: identity stays that of the connection."""
    with arena(tmp_path, environment=served_on) as made:
        mine, theirs = made.enrol(2)
        header = [("X-Client-Cert", theirs.certificate.replace("\n", "%0A"))]
        body = b'{"wire": "1.2", "software": "forged", "runtimes": {}, "memory_bytes": 1}'
        assert mine.send(request("POST", "/checkin", body, header)).status == 200
        result = rows(url_of(made.fleet), select(devices.c.id, devices.c.report))
        software = {row.id: (row.report or {}).get("software") for row in result}
        assert software[mine.id] == "forged" != software[theirs.id]


def documented_codes() -> dict[int, set[str]]:
    """The table of refusals in docs/wire.md."""
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", DOCS.read_text("utf-8"), re.MULTILINE)
    return {int(status): set(re.findall(r"`(\w+)`", codes)) for status, codes in rows}


# What the parsers alone say, without a coordinator around them.

TASK = task("site-a")
EXPECTED = intake.make_expected({name: np.zeros(shape, np.float32) for name, shape in TENSORS.items()}, {})
GOOD = sound_result(TASK.message, "site-b", Path("/nowhere/canary"))


def test_the_good_result_is_good() -> None:
    verdict = intake.check(arrays.BytesPayload(GOOD.payload), TASK, EXPECTED)
    assert not isinstance(verdict, Rejection)


@pytest.mark.parametrize("case", bad_results(), ids=lambda case: ascii(case.name))
def test_a_bad_result_is_rejected_in_words(case: Any, tmp_path: Path) -> None:
    path = tmp_path / "result"
    path.write_bytes(case.make(GOOD))
    verdict = intake.check(arrays.FilePayload(path), TASK, EXPECTED)
    assert isinstance(verdict, Rejection)
    assert verdict.reason in {code.replace("foreign_identity", "wrong_task") for code in case.codes}
    assert verdict.message.encode()


@pytest.mark.long
@settings(max_examples=400 if LONG else 100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_a_mutated_result_is_rejected_or_holds_what_was_requested(rng: random.Random, times: int) -> None:
    payload = GOOD.payload
    for _ in range(times):
        payload = _mutated_again(payload, rng)
    verdict = intake.check(arrays.BytesPayload(payload), TASK, EXPECTED)
    if isinstance(verdict, Rejection):
        assert verdict.message.encode()
        return
    assert {name: value.shape for name, value in verdict.delta.items()} == TENSORS
    assert all(np.isfinite(value).all() for value in verdict.delta.values())
    assert verdict.num_examples >= 1
    assert np.isfinite(verdict.train_loss)


def _mutated_again(payload: bytes, rng: random.Random) -> bytes:
    try:
        return mutated(payload, rng)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return payload  # so broken already that there is no header to change


@pytest.mark.long
@settings(max_examples=200 if LONG else 100, deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_are_rejected(payload: bytes) -> None:
    verdict = intake.check(arrays.BytesPayload(payload), TASK, EXPECTED)
    assert isinstance(verdict, Rejection)
    assert verdict.reason == "malformed"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)

MESSAGES: Sequence[Any] = (
    checkin("digits", labels={"a": "b"}, ineligible=("busy",), working_on="x"),
    wire.UploadStart(10, "ab" * 32, 10),
    wire.EvaluationResult("ab" * 32, 1, 1, 1, 0.5),
    wire.Decline("failed", "x"),
    wire.EnrolRequest("fl1.a.b", "pem", "name", "serial"),
    wire.RenewRequest("pem", "pem", "proof"),
)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=400 if LONG else 100, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_anything_in_place_of_a_value_is_unfit_or_read(
    message: Any, data: st.DataObject
) -> None:
    document = wire.to_json(message)
    for key in data.draw(st.lists(st.sampled_from(sorted(document)), min_size=1, max_size=3)):
        document[key] = data.draw(JSON, label=key)
    try:
        read = parse_message(type(message), document, "message")
    except InvalidDocument as error:
        assert str(error)
    else:
        assert isinstance(read, type(message))
        assert str(read).encode("ascii", "backslashreplace")


@pytest.mark.long
@settings(max_examples=300 if LONG else 100, deadline=None)
@given(st.binary(max_size=300) | JSON.map(lambda value: repr(value).encode("utf-8", "surrogatepass")))
def test_any_bytes_are_json_or_unfit(text: bytes) -> None:
    try:
        loads(text, "body")
    except InvalidDocument as error:
        assert "body" in str(error)
