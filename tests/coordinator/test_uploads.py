"""Uploads over the device API: resumed, counted once, and nothing kept of what is refused."""

from __future__ import annotations

import hashlib
import socket
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import func, select, update

from coordinator.accounts import enrolment
from coordinator.api.open_round import get_open_round
from coordinator.db import answers, events, rounds
from coordinator.db.store import Database
from coordinator.db.tables import runs, tasks, updates
from coordinator.device_api import uploads
from coordinator.fleets.device import DeviceFleet, sweep_uploads
from coordinator.rounds import intake, plan
from coordinator.rounds.closing import Closing
from coordinator.rounds.fleet import (
    Answer,
    Silence,
    Terms,
)
from coordinator.rounds.plan import LocalWork, RunPlan
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage, TaskOffer
from strategies import presets
from strategies.params import Params
from strategies.update import Update
from tests.support.databases import database, database_url
from tests.support.device_world import Refused, TestDevice, World, serving, sqlite
from tests.support.long import LONG

__all__ = ["database", "database_url"]

PARAMS: Params = {"frozen": np.ones(1, np.float32), "w": np.linspace(-1, 1, 60_000, dtype=np.float32)}
"""Large enough for several blocks of an upload."""


class OpenRound:
    """A round of run `r` with devices `a` and `b`, and what they would answer."""

    def __init__(
        self,
        world: World,
        wanted: int = 2,
        devices: tuple[str, ...] = ("a", "b"),
        max_examples: int | None = None,
        noise: Mapping[str, Any] | None = None,
    ) -> None:
        self.world, self.noise = world, noise
        self.devices = {name: world.enrol(name) for name in devices}
        self.deployment = world.start_run("r")
        self.fleet = DeviceFleet(world.services, self.deployment, patience_seconds=0)
        for device in self.devices.values():
            device.check_in()
        self.terms = Terms(
            intake.make_expected({"w": PARAMS["w"]}, {}, max_examples),
            Closing(wanted, 600),
            population=2,
        )
        self.submit(self.fleet)

    def submit(self, fleet: DeviceFleet, number: int = 1) -> None:
        assert fleet.clients(2) == sorted(self.devices)
        model = fleet.model(PARAMS, {})
        requested = fleet.find_open_round(number)
        work = LocalWork(batch_size=4, lr=0.1, epochs=None, steps=1)
        run_plan = RunPlan(7, 3, presets.get("fedavg"), work, ("w",), Closing(2), noise_options=self.noise)
        cohort = plan.make_tasks(tuple(self.devices), number, model.base, run_plan)
        self.tasks = requested.tasks if requested else cohort
        fleet.submit(self.tasks, model, self.terms)

    def leased(self, name: str = "a") -> tuple[TestDevice, str, bytes]:
        """A device, its task, and a good result."""
        device = self.devices[name]
        offer = device.lease()
        return device, offer.task, result_of(offer)

    def count(self, column: Any) -> int:
        query = select(func.count()).select_from(column.table)
        return int(self.world.services.database.read(lambda at: at.execute(query).scalar_one()))

    def state(self, task: str) -> str:
        query = select(tasks.c.state).where(tasks.c.id == task)
        return str(self.world.services.database.read(lambda at: at.execute(query).scalar_one()))

    def part_files(self) -> list[Path]:
        return sorted((self.world.services.settings.home / "uploads").glob("*"))

    def update_blobs(self) -> int:
        """Blobs beside the params."""
        return len(list((self.world.services.settings.home / "blobs").iterdir())) - 1


def result_of(offer: TaskOffer, *, client: str | None = None, value: float = 0.5) -> bytes:
    message = TaskMessage.from_json(offer.message)
    message = replace(message, client=client or message.client)
    delta = {"w": np.random.default_rng(3).normal(value, 1, 60_000).astype(np.float32)}
    return encode_result(message, Update(delta, num_examples=10, num_steps=1, train_loss=0.5))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenRound]:
    with sqlite(tmp_path) as database, serving(tmp_path, database) as world:
        yield OpenRound(world)


@pytest.fixture
def opened_on_each(tmp_path: Path, database: Database) -> Iterator[OpenRound]:
    """Once on each kind of database."""
    with serving(tmp_path, database) as world:
        yield OpenRound(world)


def test_an_accepted_update_reaches_the_engine_and_is_counted(opened_on_each: OpenRound) -> None:
    opened = opened_on_each
    results = opened.fleet.results()
    for name in ("b", "a"):
        device, task, payload = opened.leased(name)
        opened.world.clock.pass_seconds(1)
        assert device.upload(task, payload).accepted
    result = list(results)
    assert [each.task.message.client for each in result] == ["b", "a"]
    for each in result:
        assert isinstance(each, Answer) and isinstance(each.verdict, Update)
        assert np.array_equal(each.verdict.delta["w"], decoded_delta(payload))
        assert each.payload_bytes == len(payload)
    assert opened.part_files() == []


def test_the_open_round_shows_what_each_member_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BLOCK_BYTES", 1)  # so that it shows how much arrived
    with sqlite(tmp_path) as database, serving(tmp_path, database) as world:
        opened = OpenRound(world, wanted=4, devices=("a", "b", "c", "d"))
        experiment = {"federation": {"min_updates": 2}}
        database.write(lambda at: at.execute(update(runs).values(experiment=experiment))).result()
        for name in ("a", "b", "c"):
            device, task, payload = opened.leased(name)
            if name == "b":
                device.start_upload(task, payload)
                cut_line(world, device, task, payload, 1000)
            if name == "c":
                world.clock.pass_seconds(3)
                device.upload(task, payload)
        found = get_open_round("r", world.services).round
        assert found is not None
        assert (found.number, found.state, found.wanted, found.min_updates) == (1, "open", 4, 2)
        seen = [
            (each.state, each.received_bytes, each.expected_bytes, each.seconds) for each in found.members
        ]
        size = len(payload)
        assert seen == [
            ("training", 0, 0, None),
            ("uploading", 1000, size, None),
            ("accepted", size, size, 3),
            ("selected", 0, 0, None),
        ]
        opened.fleet.cancel(opened.tasks)
        database.write(lambda at: at.execute(update(runs).values(state="cancelled"))).result()
        assert get_open_round("r", world.services).round is None


def decoded_delta(payload: bytes) -> Any:
    from edge_client.wire import arrays

    return arrays.decode(payload)["delta/w"]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_an_upload_that_was_cut_goes_on_where_it_stopped(
    opened: OpenRound, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "BLOCK_BYTES", 1)  # so that it shows how much arrived
    device, task, payload = opened.leased()
    device.start_upload(task, payload)
    came = int(len(payload) * share)
    cut_line(opened.world, device, task, payload, came)
    state = device.start_upload(task, payload)
    assert state.offset == came
    assert device.put(task, came, payload[came:]).accepted


def cut_line(world: World, device: TestDevice, task: str, payload: bytes, at: int) -> None:
    """Sends a body up to `at` on a connection of its own, and hangs up when that arrived."""
    port = int(world.url.rpartition(":")[2])
    head = (
        f"PUT /device/v1/tasks/{task}/upload?offset=0 HTTP/1.1\r\nHost: x\r\nx-device: {device.id}\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(head.encode() + payload[:at])
        while world.services.part_files.of(task).size_bytes < at:
            threading.Event().wait(0.01)


def test_an_upload_goes_on_after_a_restart_of_the_coordinator(tmp_path: Path, database: Database) -> None:
    with serving(tmp_path, database) as world:
        opened = OpenRound(world)
        device, task, payload = opened.leased()
        device.start_upload(task, payload)
        device.put(task, 0, payload[:1000])
    with serving(tmp_path, database) as again:
        device = TestDevice(again.url, "a")
        assert device.start_upload(task, payload).offset == 1000
        assert device.put(task, 1000, payload[1000:]).accepted


def test_a_whole_upload_that_was_never_judged_is_finished_by_its_announcement(opened: OpenRound) -> None:
    device, task, payload = opened.leased()
    device.start_upload(task, payload)
    opened.world.services.part_files.of(task).write(0, payload)
    assert device.start_upload(task, payload).accepted


@pytest.mark.long
def test_a_replayed_upload_is_accepted_again_and_counts_once(opened_on_each: OpenRound) -> None:
    opened = opened_on_each
    device, task, payload = opened.leased()
    for _ in range(1000 if LONG else 100):
        assert device.upload(task, payload).accepted
    assert device.put(task, 0, payload).accepted
    assert opened.count(updates.c.run) == 1
    with pytest.raises(Refused, match="duplicate"):
        device.start_upload(task, payload[:-1])


def test_two_lines_sending_the_same_upload_do_not_spoil_it(opened_on_each: OpenRound) -> None:
    opened = opened_on_each
    device, task, payload = opened.leased()
    device.start_upload(task, payload)
    outcomes: list[str] = []

    def send() -> None:
        other = TestDevice(opened.world.url, "a")
        try:
            outcomes.append("accepted" if other.put(task, 0, payload).accepted else "more")
        except Refused as refused:
            outcomes.append(refused.code)

    lines = [threading.Thread(target=send) for _ in range(4)]
    for line in lines:
        line.start()
    for line in lines:
        line.join()
    assert set(outcomes) == {"accepted"}  # the first counts, the others hear that it does
    assert opened.count(updates.c.run) == 1


def test_a_piece_that_does_not_begin_where_the_last_ended_is_refused_with_the_right_offset(
    opened: OpenRound,
) -> None:
    device, task, payload = opened.leased()
    with pytest.raises(Refused) as early:
        device.put(task, 0, payload)
    assert (early.value.status, early.value.code) == (409, "upload_offset")
    device.start_upload(task, payload)
    device.put(task, 0, payload[:100])
    for offset in (0, 99, 101):
        with pytest.raises(Refused) as refused:
            device.put(task, offset, payload[offset:])
        assert (refused.value.status, refused.value.code) == (409, "upload_offset")
        assert refused.value.error["offset"] == 100


def test_a_deflated_result_counts_as_the_plain_one(opened: OpenRound) -> None:
    device, task, payload = opened.leased()
    assert device.upload_deflated(task, payload).accepted
    assert opened.part_files() == []


@pytest.mark.parametrize("announced", ["too little", "too much"])
def test_a_deflated_result_of_another_size_than_announced_is_refused(
    opened: OpenRound, announced: str
) -> None:
    device, task, payload = opened.leased()
    sent = zlib.compress(payload)
    result = len(payload) + (1 if announced == "too much" else -1)
    device.start_upload(task, sent, decoded_bytes=result, encoding="deflate")
    with pytest.raises(Refused, match="bad_encoding"):
        device.put(task, 0, sent)
    assert opened.part_files() == []


def test_a_bomb_never_inflates_beyond_what_was_announced(
    opened: OpenRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, task, _ = opened.leased()
    bomb = zlib.compress(bytes(50 * 2**20), 9)
    sizes: list[int] = []
    remove = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".decoded" and path.exists():
            sizes.append(path.stat().st_size)
        remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    device.start_upload(task, bomb, decoded_bytes=100_000, encoding="deflate")
    with pytest.raises(Refused, match="bad_encoding"):
        device.put(task, 0, bomb)
    assert sizes and max(sizes) <= 100_000
    assert opened.part_files() == [] and opened.update_blobs() == 0


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [
        ({"size_bytes": 10**9, "decoded_bytes": 10**9}, 413, "oversized"),
        ({"decoded_bytes": 10**12, "encoding": "deflate"}, 413, "oversized"),
        ({"decoded_bytes": 5}, 422, "malformed"),
        ({"size_bytes": 0, "decoded_bytes": 0}, 422, "malformed"),
        ({"sha256": "../../etc/passwd"}, 422, "malformed"),
        ({"encoding": "gzip"}, 422, "malformed"),
    ],
)
def test_an_announcement_that_cannot_be_is_refused_before_anything_is_kept(
    opened: OpenRound, changed: dict[str, Any], status: int, code: str
) -> None:
    device, task, payload = opened.leased()
    with pytest.raises(Refused) as refused:
        device.start_upload(task, payload, **changed)
    assert (refused.value.status, refused.value.code) == (status, code)
    assert opened.part_files() == []


def test_more_bytes_than_announced_are_refused_and_not_kept(opened: OpenRound) -> None:
    device, task, payload = opened.leased()
    device.start_upload(task, payload)
    device.put(task, 0, payload[:100])
    with pytest.raises(Refused) as refused:
        device.put(task, 100, payload)
    assert (refused.value.status, refused.value.code) == (413, "oversized")
    assert device.start_upload(task, payload).offset == 100


def test_other_bytes_than_announced_are_refused_and_the_upload_begins_anew(opened: OpenRound) -> None:
    device, task, payload = opened.leased()
    device.start_upload(task, payload)
    with pytest.raises(Refused, match="hash_mismatch"):
        device.put(task, 0, bytes(len(payload)))
    assert opened.part_files() == []
    assert device.upload(task, payload).accepted


def test_a_task_of_another_device_is_not_ones_own(opened: OpenRound) -> None:
    _, task, payload = opened.leased("a")
    with pytest.raises(Refused) as refused:
        opened.devices["b"].start_upload(task, payload)
    assert (refused.value.status, refused.value.code) == (403, "not_yours")
    with pytest.raises(Refused, match="not_found"):
        opened.devices["b"].start_upload("0" * 36, payload)


def test_a_result_that_names_another_client_is_a_foreign_identity(opened: OpenRound) -> None:
    device = opened.devices["a"]
    offer = device.lease()
    with pytest.raises(Refused) as refused:
        device.upload(offer.task, result_of(offer, client="b"))
    assert (refused.value.status, refused.value.code) == (403, "foreign_identity")
    assert opened.state(offer.task) == "rejected"


def test_a_bad_result_is_rejected_for_good_and_nothing_of_it_is_kept(opened_on_each: OpenRound) -> None:
    opened = opened_on_each
    device, task, _ = opened.leased()
    with pytest.raises(Refused) as refused:
        device.upload(task, b"this is no result at all")
    assert (refused.value.status, refused.value.code) == (422, "malformed")
    assert opened.part_files() == [] and opened.update_blobs() == 0
    assert device.check_in().task is None
    with pytest.raises(Refused, match="rejected"):
        device.start_upload(task, b"another try")
    opened.devices["b"].lease()
    opened.devices["b"].decline(opened.devices["b"].lease().task, "limits", "too large for me")
    result = list(opened.fleet.results())
    assert [type(each) for each in result] == [Answer, Silence]
    assert isinstance(result[0], Answer) and isinstance(result[0].verdict, intake.Rejection)
    assert result[0].verdict.reason == "malformed"


def test_a_rejected_result_hears_its_reason_though_its_file_is_swept_at_once(
    opened_on_each: OpenRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is over as soon as the rejection is written, and a sweep may come before the answer is made."""
    opened = opened_on_each
    services = opened.world.services
    device, task, _ = opened.leased()
    reject = answers.reject

    def swept_at_once(connection: Any, *reported: Any) -> None:
        reject(connection, *reported)
        services.part_files.forget([task])

    monkeypatch.setattr(answers, "reject", swept_at_once)
    with pytest.raises(Refused) as refused:
        device.upload(task, b"this is no result at all")
    assert (refused.value.status, refused.value.code) == (422, "malformed")


def test_an_upload_that_was_swept_away_hears_why_its_task_is_over(
    opened: OpenRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = opened.world.services
    device, task, payload = opened.leased()
    check = intake.check

    def lease_runs_out_meanwhile(*requested: Any) -> Any:
        opened.world.clock.pass_seconds(1000)
        now = services.clock()
        services.database.write(lambda at: rounds.expire_leases(at, "r", 1, "train", now)).result()
        sweep_uploads(services)
        return check(*requested)

    monkeypatch.setattr(intake, "check", lease_runs_out_meanwhile)
    with pytest.raises(Refused) as refused:
        device.upload(task, payload)
    assert (refused.value.status, refused.value.code) == (409, "lease_expired")


def test_a_result_for_a_closed_round_is_refused(tmp_path: Path, database: Database) -> None:
    with serving(tmp_path, database) as world:
        opened = OpenRound(world, wanted=1)
        late, task, payload = opened.leased("a")
        late.start_upload(task, payload)
        late.put(task, 0, payload[:500])
        device, first, good = opened.leased("b")
        assert device.upload(first, good).accepted
        with pytest.raises(Refused) as at_piece:
            late.put(task, 500, payload[500:])
        with pytest.raises(Refused) as at_start:
            late.start_upload(task, payload)
        for refused in (at_piece.value, at_start.value):
            assert (refused.status, refused.code) == (409, "round_closed")
        assert late.check_in(working_on=task).stop
        result = list(opened.fleet.results())
        assert [each.task.message.client for each in result] == ["b"]
        opened.fleet.cancel([each for each in opened.tasks if each.message.client == "a"])
        assert opened.part_files() == []


def test_of_a_result_whose_round_closes_while_it_is_stored_nothing_is_kept(
    opened_on_each: OpenRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_on_each
    services = opened.world.services
    device, task, payload = opened.leased("a")
    adopt = services.blobs.adopt

    def closed_meanwhile(file: Path, digest: str) -> None:
        adopt(file, digest)
        services.database.write(lambda at: rounds.close_round(at, "r", 1)).result()

    monkeypatch.setattr(services.blobs, "adopt", closed_meanwhile)
    with pytest.raises(Refused, match="round_closed"):
        device.upload(task, payload)
    assert (opened.update_blobs(), opened.part_files()) == (0, [])


def test_no_device_claims_more_examples_than_its_round_allows(tmp_path: Path, database: Database) -> None:
    with serving(tmp_path, database) as world:
        device, task, payload = OpenRound(world, max_examples=9).leased("a")
        with pytest.raises(Refused) as refused:
            device.upload(task, payload)
        assert (refused.value.status, refused.value.code) == (422, "too_many_examples")


@pytest.mark.parametrize("end", [enrolment.revoke, enrolment.leave])
def test_a_round_does_not_wait_for_a_device_that_was_shut_out_or_left(
    opened_on_each: OpenRound, end: Any
) -> None:
    opened = opened_on_each
    device, task, payload = opened.leased("a")
    device.upload(task, payload)
    opened.leased("b")
    services = opened.world.services
    services.database.write(lambda at: end(at, "b", services.clock())).result()
    result = list(opened.fleet.results())
    assert [(type(each), each.task.message.client) for each in result] == [(Answer, "a"), (Silence, "b")]
    assert result[1].seconds == 0


def test_text_that_the_database_has_no_place_for_is_refused(opened_on_each: OpenRound) -> None:
    _, task, _ = opened_on_each.leased("a")
    answer = httpx.post(
        f"{opened_on_each.world.url}/device/v1/tasks/{task[:-1]}%00/decline",
        headers={"x-device": "a"},
        json={"code": "memory", "words": ""},
    )
    assert answer.status_code in (404, 422)  # SQLite has room for it, and no such task
    assert answer.json()["error"]["code"] in ("not_found", "malformed")


def test_blobs_of_a_round_are_not_removed_before_its_tasks_name_them(opened: OpenRound) -> None:
    services = opened.world.services
    fleet = DeviceFleet(services, opened.world.start_run("s"), patience_seconds=0)
    model = fleet.model(PARAMS, {"control": {"w": PARAMS["w"]}})

    def another_run_that_came_to_the_same_bytes_is_done_with_them() -> int:
        folder = services.settings.home / "blobs"
        with services.blobs.reference_lock:
            services.blobs.remove([path.name for path in folder.iterdir()])
        return len(list(folder.iterdir()))

    assert another_run_that_came_to_the_same_bytes_is_done_with_them() == 2
    run_plan = RunPlan(7, 3, presets.get("fedavg"), LocalWork(4, 0.1, None, 1), ("w",), Closing(2))
    fleet.submit(plan.make_tasks(("a",), 1, model.base, run_plan), model, opened.terms)
    assert another_run_that_came_to_the_same_bytes_is_done_with_them() == 0


def test_after_the_deadline_nothing_is_taken_and_the_missing_are_silent(opened_on_each: OpenRound) -> None:
    opened = opened_on_each
    device, task, payload = opened.leased("a")
    assert device.upload(task, payload).accepted
    late, late_task, late_payload = opened.leased("b")
    for _ in range(12):  # their daemons are alive all the time
        opened.world.clock.pass_seconds(50)
        late.check_in(working_on=late_task)
    opened.world.clock.pass_seconds(1)
    with pytest.raises(Refused, match="round_closed"):
        late.upload(late_task, late_payload)
    result = list(opened.fleet.results())
    assert [(type(each), each.task.message.client) for each in result] == [(Answer, "a"), (Silence, "b")]
    assert result[1].seconds == 600


def test_events_tell_what_became_of_each_result(opened_on_each: OpenRound) -> None:
    opened = opened_on_each
    device, task, payload = opened.leased("a")
    device.upload(task, payload)
    other, second, _ = opened.leased("b")
    with pytest.raises(Refused):
        other.upload(second, b"nonsense")
    rows = opened.world.services.database.read(lambda at: events.since(at, 0, 100))
    assert [(row.event, row.device) for row in rows] == [("update_accepted", "a"), ("update_rejected", "b")]


def test_hashes_carried_along_agree_with_the_file(opened: OpenRound) -> None:
    transfer = opened.world.services.part_files.of("x")
    transfer.write(0, b"abc")
    transfer.write(3, b"def")
    assert transfer.sha256() == hashlib.sha256(b"abcdef").hexdigest()
    transfer.truncate(3)
    assert transfer.sha256() == hashlib.sha256(b"abc").hexdigest()
    transfer.write(3, b"x")
    assert transfer.sha256() == hashlib.sha256(b"abcx").hexdigest()
