"""A device's words: however many and of whatever characters, they fill neither log nor database, and move no cursor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from edge_client.wire import device as wire
from tests.support.arena import Arena, arena
from tests.support.cli import run_cli
from tests.support.device_client import RawDevice

pytestmark = pytest.mark.slow

MUCH = 120_000
HOSTILE = "\x1b[2Jgone \x9b31m\u0085\u202egpj.exe\u2066\u200e\u061c\u2028\u2029\r\nline two"
BAD = re.compile("[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f]")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, module_served_on: Mapping[str, str]) -> Iterator[Arena]:
    with arena(tmp_path_factory.mktemp("arena"), environment=module_served_on) as made:
        yield made


@pytest.fixture(scope="module")
def device(made: Arena) -> RawDevice:
    return made.enrol(1)[0]


def test_words_without_end_are_cut_and_names_without_end_refused(made: Arena, device: RawDevice) -> None:
    log, database = made.fleet.coordinator.log, made.fleet.home / "fedloop.db"
    before = log.stat().st_size
    for letter in "abcdefgh":
        assert device.check_in(made.checkin(ineligible=(letter * MUCH,))).status == 200
        for changed in (
            {"labels": {"hall": letter * MUCH}},
            {"software": letter * MUCH},
            {"opted_out": (letter,) * 300},
        ):
            answer = device.check_in(made.checkin(**changed))
            assert (answer.status, answer.code) == (422, "malformed")
            assert next(iter(changed)) in answer.document["error"]["message"]
            assert len(answer.body) < 500
    assert (answer := device.check_in(made.checkin(ineligible=("x" * 2**20,)))).status == 413, answer
    assert log.stat().st_size - before < 40_000
    assert sum(len(str(row)) for row in made.rows("devices")) < 10_000
    assert not database.exists() or database.stat().st_size < 2**20  # on PostgreSQL the rows tell


@pytest.mark.extended
def test_no_word_of_a_device_moves_a_cursor(made: Arena, device: RawDevice) -> None:
    made.start_run(1)
    hostile = made.checkin(ineligible=(HOSTILE,), labels={HOSTILE: HOSTILE}, device_class=HOSTILE)
    assert device.check_in(hostile).status == 200
    offer = device.task(made.checkin())
    assert device.post(f"/tasks/{offer['task']}/decline", wire.Decline("failed", HOSTILE)).status == 200
    device.check_in(hostile)
    home = {"FEDLOOP_HOME": str(made.fleet.home), "FEDLOOP_COORDINATOR": made.fleet.operator_url}
    for command in (["device", "list"], ["device", "show", device.id], ["device", "why", device.id]):
        done = run_cli(*command, env=home)
        assert done.returncode == 0, done.stderr
        assert BAD.findall(done.stdout + done.stderr) == []
    for line in made.fleet.coordinator.log.read_text().splitlines():
        message = json.loads(line) if line.startswith("{") else line
        assert BAD.findall(json.dumps(message, ensure_ascii=False).replace("\\n", "")) == []
    declined = next(row for row in made.rows("tasks") if offer["task"] in row)
    assert BAD.findall(json.dumps([str(each) for each in declined], ensure_ascii=False)) == []


def test_a_log_line_of_a_path_is_short(made: Arena, tmp_path: Path) -> None:
    device = made.raw[0]
    device.get("/blobs/" + "%C2%9B%E2%80%AE" * 200)
    line = made.fleet.coordinator.log.read_text().splitlines()[-1]
    assert len(line) < 2_000
    assert BAD.findall(json.dumps(json.loads(line), ensure_ascii=False)) == []
