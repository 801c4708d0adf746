"""The wire through its versions: recorded bytes, read by today's code, and replayed against today's coordinator."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from edge_client import config
from edge_client.daemon.executor import Executor
from edge_client.outbox import Ledger, Outbox
from edge_client.state import State
from edge_client.transport.link import Answer as Heard
from edge_client.wire import arrays
from edge_client.wire import device as wire
from edge_client.wire.arrays import result_header
from edge_client.wire.device import TaskMessage
from edge_client.wire.strict import parse_message
from tests.golden.wire import make
from tests.support.arena import RAW_GROUP, Arena, arena
from tests.support.device_client import Answer, RawDevice
from tests.support.edge import FakeTraining

RECORDED = sorted(path.name for path in make.FOLDER.iterdir() if path.is_dir() and path.name[0].isdecimal())
SERVED = [f"{wire.WIRE[0]}.{minor}" for minor in range(wire.OLDEST_MINOR, wire.WIRE[1] + 1)]
NEW_IN_1_1 = {"evaluation", "checkin_answer_evaluate"}
NEW_IN_1_4 = {"statistics", "checkin_answer_statistics"}


def golden(version: str, name: str) -> Any:
    return json.loads((make.FOLDER / version / f"{name}.json").read_bytes())


def new_after(version: str) -> set[str]:
    """The messages that came with later versions."""
    return (NEW_IN_1_1 if version == "1.0" else set()) | (NEW_IN_1_4 if version < "1.4" else set())


def payload(version: str) -> bytes:
    return (make.FOLDER / version / "result.safetensors").read_bytes()


def test_every_version_that_is_served_is_recorded() -> None:
    assert set(SERVED) <= set(RECORDED)
    for version in RECORDED:
        names = {path.stem for path in (make.FOLDER / version).glob("*.json")}
        assert names == set(make.KINDS) - new_after(version)


@pytest.mark.parametrize("name", make.KINDS)
def test_todays_messages_are_these_bytes(name: str) -> None:
    recorded = (make.FOLDER / make.CURRENT / f"{name}.json").read_bytes()
    assert make.canonical(make.messages()[name]) == recorded


def test_todays_result_is_these_bytes() -> None:
    assert make.result() == payload(make.CURRENT)
    assert zlib.decompress((make.FOLDER / make.CURRENT / "result.deflate").read_bytes()) == make.result()


def test_every_key_is_recorded() -> None:
    """A key that has its default in the recording would not be missed if it were dropped."""
    for name, message in make.messages().items():
        assert set(golden(make.CURRENT, name)) == {field.name for field in fields(message)}, name


@pytest.mark.parametrize("version", RECORDED)
def test_recorded_messages_are_read(version: str) -> None:
    for path in sorted((make.FOLDER / version).glob("*.json")):
        recorded = golden(version, path.stem)
        read: Any = parse_message(make.KINDS[path.stem], recorded, path.stem)
        today = make.messages()[path.stem]
        assert _without_version(read, recorded) == _without_version(today, recorded), path
        for field in fields(read):
            assert field.name in recorded or getattr(read, field.name) == field.default


def _without_version(message: Any, keys: Any) -> Any:
    """What the message, and each message within it, says under the keys of its time."""
    if not is_dataclass(message) or not isinstance(keys, dict):
        return message
    return {
        key: _without_version(value, keys[key])
        for key, value in vars(message).items()
        if key in keys and key != "wire"
    }


@pytest.mark.parametrize("version", RECORDED)
def test_recorded_results_and_tasks_are_read(version: str) -> None:
    header = arrays.read_header(payload(version))
    body = result_header(header.values)
    assert (body.round, body.client, body.num_examples, body.train_loss) == (3, make.DEVICE, 40, 0.75)
    assert arrays.decode(payload(version))["delta/fc.weight"].shape == (3, 4)
    message = golden(version, "checkin_answer")["task"]["message"]
    assert TaskMessage.from_json(message) == make.task_message()


@pytest.mark.parametrize(
    ("theirs", "agreed"),
    [
        ((1, 0), None),
        ((1, 1), None),
        ((1, 2), (1, 2)),
        ((1, 3), (1, 3)),
        ((1, 4), (1, 4)),
        ((1, 5), (1, 4)),
        ((1, 99), (1, 4)),
        ((0, 9), None),
        ((2, 0), None),
        ((2, 2), None),
    ],
)
def test_the_lower_minor_version_is_used(theirs: tuple[int, int], agreed: tuple[int, int] | None) -> None:
    assert wire.negotiate(theirs) == agreed


def test_three_minor_versions_back_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "WIRE", (1, 5))
    monkeypatch.setattr(wire, "OLDEST_MINOR", 3)
    assert wire.negotiate((1, 3)) == (1, 3)
    assert wire.negotiate((1, 2)) is None


@pytest.mark.parametrize(
    ("agreed", "deflates"), [("1.0", False), ("1.1", False), ("1.2", True), ("1.3", True)]
)
def test_a_device_deflates_only_for_who_can_inflate(tmp_path: Path, agreed: str, deflates: bool) -> None:
    """It is configured to; an older coordinator says an older version, and gets the bytes as they are."""
    loaded = config.load(
        None, {"HOME": str(tmp_path)}, [f"state_dir={tmp_path}", "deflate_uploads=true"]
    ).config
    state = State(tmp_path)
    executor = Executor(loaded, state, Outbox(state, loaded.outbox_bytes), Ledger(state), FakeTraining())
    executor.check_in(_Line({**golden("1.0", "checkin_answer"), "wire": agreed}), make.messages()["checkin"])  # type: ignore[arg-type]
    assert executor.deflate is deflates
    state.close()


@dataclass
class _Line:
    """A coordinator that answers every request with one document."""

    document: dict[str, Any]

    def post(self, path: str, message: Any, **rest: Any) -> Heard:
        return Heard(self.document, None)


# Against a served coordinator.


@dataclass
class Recorded:
    """A device in the field: what it sends are the recorded bytes, with only ids replaced."""

    version: str
    raw: RawDevice
    heard: list[dict[str, Any]]

    def check_in(self, **changed: Any) -> dict[str, Any]:
        answer = self.raw.post("/checkin", {**golden(self.version, "checkin"), **changed})
        assert answer.status == 200, answer
        self.heard.append(answer.document)
        return self.heard[-1]

    def upload(self, offer: dict[str, Any], **changed: Any) -> Answer:
        message = offer["message"]
        body = arrays.read_header(payload(self.version)).values
        body |= {key: message[key] for key in ("round", "client", "base")}
        content = arrays.encode(arrays.decode(payload(self.version)), body)
        start = golden(self.version, "upload_start") | {
            "size_bytes": len(content),
            "decoded_bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            **changed,
        }
        begun = self.raw.post(f"/tasks/{offer['task']}/upload", start)
        assert begun.status == 200, begun
        return self.raw.piece(offer["task"], content)

    def evaluate(self, offer: dict[str, Any]) -> Answer:
        figures = golden(self.version, "evaluation") | {"base": offer["params"]["sha256"]}
        return self.raw.post(f"/tasks/{offer['task']}/evaluation", figures)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with arena(tmp_path_factory.mktemp("versions")) as made:
        yield made


@pytest.fixture(scope="module")
def story(served: Arena) -> tuple[dict[str, Recorded], dict[str, Any]]:
    """One round with a device of each version, evaluation on devices included, and the run's report."""
    raw = served.enrol(len(SERVED))
    devices = {version: Recorded(version, each, []) for version, each in zip(SERVED, raw, strict=True)}
    run = served.start_run(len(devices), groups=[RAW_GROUP], evaluate_every=1)
    todo = {version: ["train", "evaluate"] for version in devices}
    while any(todo.values()):
        for version, device in devices.items():
            offer = device.check_in(wait_seconds=0.2)["task"]
            if offer is None:
                continue
            assert offer["kind"] == todo[version].pop(0)
            answer = device.upload(offer) if offer["kind"] == "train" else device.evaluate(offer)
            assert answer.status == 200, answer
            assert answer.document["accepted"] is True
    return devices, served.finished(run)


@pytest.mark.slow
def test_devices_two_minor_versions_old_take_part(
    story: tuple[dict[str, Recorded], dict[str, Any]],
) -> None:
    devices, report = story
    (line,) = report["rounds"]
    assert line["accepted"] == len(SERVED)
    for version, device in devices.items():
        assert {answer["wire"] for answer in device.heard} == {version}


@pytest.mark.slow
def test_a_device_gets_only_the_tasks_it_knows(story: tuple[dict[str, Recorded], dict[str, Any]]) -> None:
    devices, report = story
    kinds = {
        version: [answer["task"]["kind"] for answer in device.heard if answer["task"]]
        for version, device in devices.items()
    }
    assert kinds == {version: ["train", "evaluate"] for version in SERVED}
    assert report["rounds"][0]["on_devices"]["devices"] == len(SERVED)


@pytest.mark.slow
def test_an_old_device_finds_every_key_it_knows(story: tuple[dict[str, Recorded], dict[str, Any]]) -> None:
    for version, device in story[0].items():
        for answer in device.heard:
            name = (
                "checkin_answer_evaluate"
                if (answer["task"] or {}).get("kind") == "evaluate"
                else "checkin_answer"
            )
            then = golden(version, name)
            assert set(then) <= set(answer)
            if answer["task"] is not None:
                assert set(then["task"]) <= set(answer["task"])
                assert set(then["task"]["model"]) <= set(answer["task"]["model"])
                assert set(then["task"]["message"]) <= set(answer["task"]["message"])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.9", "1.1", "2.0", "3.1"])
def test_an_unsupported_version_is_refused_with_the_supported_ones(served: Arena, version: str) -> None:
    (device,) = served.enrol(1)
    answer = device.post("/checkin", {**golden(make.CURRENT, "checkin"), "wire": version})
    assert (answer.status, answer.code) == (426, "wire_version")
    error = answer.document["error"]
    assert (error["oldest"], error["newest"]) == (SERVED[0], SERVED[-1])
    assert version in error["message"]


@pytest.mark.slow
def test_a_newer_device_is_understood_as_far_as_it_goes(served: Arena) -> None:
    """Wire 1.5, whatever it brings, is unknown keys to us."""
    (raw,) = served.enrol(1)
    device = Recorded(make.CURRENT, raw, [])
    newer = {"wire": "1.5", "battery": {"percent": [80, 81.5]}, "labels": {"site": "newer"}}
    run = served.start_run(1, labels={"site": "newer"})
    offer = None
    while offer is None:
        answer = device.check_in(**newer, wait_seconds=0.2)
        offer = answer["task"]
    assert answer["wire"] == make.CURRENT
    assert device.upload(offer, priority="high").document["accepted"] is True
    assert served.finished(run)["rounds"][0]["accepted"] == 1
