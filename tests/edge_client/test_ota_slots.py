"""The pointer: whatever happens in whatever order, what is active is whole, and the last two versions can be told apart."""

from __future__ import annotations

import errno
import json
import tempfile
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.ota import slots, transitions
from edge_client.ota.transitions import Pointer, Slot
from edge_client.wire import blocks, rollouts
from edge_client.wire.device import ReleaseEvaluation, ReleaseOffer
from edge_client.wire.rollouts import NO_MODEL
from edge_client.wire.strict import InvalidDocument

EMPTY = Pointer("digits")


def offer(version: int, rollout: str = "r", **changes: object) -> ReleaseOffer:
    return replace(ReleaseOffer(rollout, "digits", version), **changes)  # type: ignore[arg-type]


def running(*versions: int) -> Pointer:
    pointer = EMPTY
    for version in versions:
        pointer = transitions.finish_trial(
            transitions.activate(transitions.begin_install(pointer, offer(version)), Slot(version, "r"))
        )
    return pointer


def proved(version: int) -> Slot:
    return Slot(version, "r", proved=True)


def test_versions_alternate_between_the_slots() -> None:
    pointer = running(1, 2, 3)
    assert (pointer.active, pointer.a, pointer.b) == ("a", proved(3), proved(2))


def test_a_slot_that_is_being_written_holds_nothing_to_go_back_to() -> None:
    pointer = transitions.begin_install(running(1, 2), offer(3))
    assert (pointer.running, pointer.spare) == (proved(2), None)
    assert [(each.version, each.standing) for each in transitions.reports(pointer)] == [
        (2, "active"),
        (3, "installing"),
    ]


def test_a_crash_loop_is_more_starts_than_a_trial_may_take() -> None:
    pointer = transitions.activate(transitions.begin_install(running(1), offer(2)), Slot(2, "r"))
    for _ in range(transitions.TRIAL_STARTS):
        pointer = transitions.count_start(pointer)
        assert not transitions.is_crash_loop(pointer)
    pointer = transitions.count_start(pointer)
    assert transitions.is_crash_loop(pointer)
    back = transitions.roll_back(pointer, "crash_loop", "it crashed")
    assert (back.running, back.trial_starts) == (proved(1), None)
    active, last = transitions.reports(back)
    assert (active.version, last.version, last.standing, last.code) == (1, 2, "rolled_back", "crash_loop")
    assert not transitions.needs_action(back, offer(2))


def test_without_another_version_nothing_runs_after_a_fall() -> None:
    back = transitions.roll_back(running(1), "self_test", "wrong")
    assert (back.active, back.running) == (None, None)


def test_starts_are_counted_on_trial_only() -> None:
    assert transitions.count_start(running(1)) == running(1)
    assert transitions.count_start(EMPTY) == EMPTY


def test_trouble_on_the_way_says_nothing_about_the_version() -> None:
    pointer = transitions.postpone(running(1), offer(2), "expired", "old")
    assert transitions.needs_action(pointer, offer(2))
    assert pointer.failed == ()


def test_a_failed_version_is_reported_to_the_next_rollout_that_offers_it() -> None:
    pointer = transitions.record_failure(running(1), offer(2), "self_test", "wrong")
    result = transitions.report_known_failure(pointer, offer(2, "s"))
    assert result.last is not None
    assert (result.last.rollout, result.last.standing, result.last.code) == ("s", "failed", "self_test")
    assert transitions.report_known_failure(result, offer(2, "s")) == result


def test_the_running_version_is_news_only_for_another_rollout() -> None:
    pointer = running(1)
    assert not transitions.needs_action(pointer, offer(1))
    assert transitions.needs_action(pointer, offer(1, "s"))
    assert transitions.reports(transitions.assign_rollout(pointer, "s"))[0].rollout == "s"


def test_the_reason_of_a_rollback_is_reported_also_after_it_was_signed() -> None:
    pointer = transitions.assign_rollout(transitions.roll_back(running(1, 2), "self_test", "wrong"), "s")
    assert [(each.version, each.code) for each in transitions.reports(pointer)] == [(1, ""), (2, "self_test")]


def test_going_back_to_what_runs_ends_what_was_being_installed() -> None:
    """Else the device says for ever that it installs what it was told to leave."""
    pointer = transitions.assign_rollout(transitions.postpone(running(1), offer(2), "disk", "no room"), "r")
    assert [(each.version, each.standing) for each in transitions.reports(pointer)] == [(1, "active")]


def test_going_back_to_no_version_is_news_until_none_runs_or_is_installed() -> None:
    none = ReleaseOffer("r", "digits", NO_MODEL, "roll_back")
    for before in (running(1), transitions.postpone(EMPTY, offer(1), "disk", "no room")):
        assert transitions.needs_action(before, none) and not transitions.needs_action(
            transitions.deactivate(before), none
        )
    (last,) = transitions.reports(transitions.deactivate(running(1)))
    assert (last.version, last.standing, last.code) == (1, "rolled_back", "told")
    assert transitions.needs_action(transitions.deactivate(running(1)), offer(1))


_events = st.lists(
    st.tuples(
        st.sampled_from(["install", "unfit", "put off", "fall", "start", "prove", "turn"]), st.integers(1, 5)
    ),
    max_size=30,
)


@given(_events)
def test_after_whatever_happened_the_active_slot_is_whole_and_no_failed_version(
    events: list[tuple[str, int]],
) -> None:
    pointer = EMPTY
    for what, version in events:
        wanted = offer(version)
        if what in ("install", "unfit", "put off"):
            if not transitions.needs_action(pointer, wanted):
                continue
            if pointer.spare is not None and pointer.spare.version == version:
                pointer = transitions.switch_back(pointer, pointer.spare)
                continue
            if transitions.must_wait(pointer, wanted):
                continue
            pointer = transitions.begin_install(pointer, wanted)
            if what == "install":
                pointer = transitions.activate(pointer, Slot(version, "r"))
            elif what == "unfit":
                pointer = transitions.record_failure(pointer, wanted, "self_test", "")
            else:
                pointer = transitions.postpone(pointer, wanted, "expired", "")
        elif what == "fall" and pointer.active is not None:
            pointer = transitions.roll_back(pointer, "self_test", "")
        elif what == "turn" and pointer.spare is not None:
            pointer = transitions.switch_back(pointer, pointer.spare)
        elif what == "start":
            pointer = transitions.count_start(pointer)
        elif what == "prove":
            pointer = transitions.finish_trial(pointer)
        assert (pointer.active is None) == (pointer.running is None)
        assert pointer.active is not None or pointer.spare is None, "a version that could run does not"
        if pointer.running is not None:
            assert pointer.failure(pointer.running.version) is None
            assert pointer.spare is None or pointer.spare.version != pointer.running.version
        assert [each.standing for each in transitions.reports(pointer)].count("active") == (
            pointer.active is not None
        )


def test_the_pointer_is_read_as_it_was_written(tmp_path: Path) -> None:
    pointer = transitions.record_failure(running(1, 2), offer(3), "memory", "too much")
    pointer = replace(pointer, a=Slot(1, "r", 0.5, ReleaseEvaluation(4, 3, 1.5, 2, 2.5)), trial_starts=2)
    slots.write(tmp_path, pointer)
    assert slots.read(tmp_path, "digits") == pointer
    assert slots.models(tmp_path) == ("digits",)
    assert slots.active_folder(tmp_path, "digits") == tmp_path / "releases" / "digits" / "b"


def test_a_pointer_of_before_says_by_its_trial_what_had_proved_itself(tmp_path: Path) -> None:
    slots.write(tmp_path, transitions.activate(transitions.begin_install(running(1), offer(2)), Slot(2, "r")))
    path = tmp_path / "releases/digits/pointer.json"
    document = json.loads(path.read_text())
    for slot in (document["a"], document["b"]):
        del slot["proved"]
    del document["sha256"]
    path.write_text(json.dumps(document | {"format": 1}))
    pointer = slots.read(tmp_path, "digits")
    assert (pointer.running, pointer.spare, pointer.trial_starts) == (Slot(2, "r"), proved(1), 0)


RUBBISH = ["", "{", "[]", "\0\0\0", '{"model": "other"}', '{"model": "digits", "format": 7}']


@pytest.mark.parametrize("content", RUBBISH)
@pytest.mark.parametrize("name", [slots.POINTER_NAME, slots.COPY_NAME])
def test_a_damaged_pointer_is_restored_from_its_copy(tmp_path: Path, content: str, name: str) -> None:
    slots.write(tmp_path, running(1))
    path = tmp_path / "releases/digits" / name
    sound = path.read_bytes()
    path.write_text(content)
    assert slots.read(tmp_path, "digits") == running(1)
    assert ("restored from its copy" in slots.repair(tmp_path, "digits")) == (name == slots.POINTER_NAME)
    assert path.read_bytes() == sound
    path.unlink()
    assert slots.models(tmp_path) == ("digits",) and slots.read(tmp_path, "digits") == running(1)


@pytest.mark.parametrize("content", RUBBISH)
def test_without_a_sound_copy_nothing_is_known(tmp_path: Path, content: str) -> None:
    slots.write(tmp_path, running(1))
    for name in (slots.POINTER_NAME, slots.COPY_NAME):
        (tmp_path / "releases/digits" / name).write_text(content)
    assert slots.read(tmp_path, "digits") == EMPTY
    assert "is asked again" in slots.repair(tmp_path, "digits")


@given(st.data())
def test_no_changed_byte_of_a_pointer_is_believed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        slots.write(Path(folder), running(1, 2))
        path = Path(folder) / "releases/digits/pointer.json"
        (path.with_name(slots.COPY_NAME)).unlink()
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        assert slots.read(Path(folder), "digits") in (EMPTY, running(1, 2))


def test_a_pointer_that_cannot_be_read_now_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots.write(tmp_path, running(1))

    def no_more_files(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", no_more_files)
    with pytest.raises(OSError, match="Too many open files"):
        slots.read(tmp_path, "digits")


# -- what is signed --


def test_a_growing_share_keeps_whom_it_had() -> None:
    devices = [f"device-{number}" for number in range(2000)]
    chosen = [
        {each for each in devices if rollouts.Rollout("r", 1, salt="s", permille=permille).is_for(each)}
        for permille in (0, 10, 100, 500, 1000)
    ]
    assert all(before <= after for before, after in pairwise(chosen))
    assert [len(each) for each in chosen][::4] == [0, 2000]
    assert 800 < len(chosen[3]) < 1200


def test_a_document_of_another_model_is_none() -> None:
    with pytest.raises(InvalidDocument, match="model is 'other'"):
        rollouts.from_json(b'{"model": "other", "rollouts": []}', "digits")


@pytest.mark.parametrize("name", ["", "../up", "A", "tuf.json", "a/b", "x" * 64])
def test_a_model_is_a_plain_name(name: str) -> None:
    assert not rollouts.is_release(name, 1)


@given(st.binary(max_size=5000))
def test_blocks_are_read_as_they_were_described(content: bytes) -> None:
    found = blocks.read(blocks.describe(content), len(content))
    assert found is not None
    assert list(found.hashes) == blocks.hashes_of(BytesIO(content), found.block_bytes)


@pytest.mark.parametrize(
    "custom",
    [
        None,
        {},
        [],
        {"block_bytes": 0, "blocks": ""},
        {"block_bytes": 1024, "blocks": "AAAA"},
        {"block_bytes": True, "blocks": "!"},
    ],
)
def test_blocks_that_make_no_sense_are_none(custom: object) -> None:
    assert blocks.read(custom, 5000) is None


def test_a_large_file_is_described_in_few_bytes() -> None:
    described = blocks.describe(bytes(3_000_000))
    assert described["block_bytes"] == 4096
    assert len(described["blocks"]) < 11_000
