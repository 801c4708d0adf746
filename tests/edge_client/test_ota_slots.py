"""The pointer: whatever happens in whatever order, what is active is whole, and the last two versions can be told apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.ota import slots
from edge_client.ota.slots import Pointer, Slot
from edge_client.wire import blocks, rollouts
from edge_client.wire.device import ReleaseEvaluation, ReleaseOffer
from edge_client.wire.rollouts import NO_MODEL
from edge_client.wire.strict import Unfit

EMPTY = Pointer("digits")


def offer(version: int, rollout: str = "r", **changes: object) -> ReleaseOffer:
    return replace(ReleaseOffer(rollout, "digits", version), **changes)  # type: ignore[arg-type]


def running(*versions: int) -> Pointer:
    pointer = EMPTY
    for version in versions:
        pointer = slots.proved(slots.committed(slots.begun(pointer, offer(version)), Slot(version, "r")))
    return pointer


def test_versions_alternate_between_the_slots() -> None:
    pointer = running(1, 2, 3)
    assert (pointer.active, pointer.a, pointer.b) == ("a", Slot(3, "r"), Slot(2, "r"))


def test_a_slot_that_is_being_written_holds_nothing_to_go_back_to() -> None:
    pointer = slots.begun(running(1, 2), offer(3))
    assert (pointer.running, pointer.spare) == (Slot(2, "r"), None)
    assert [(each.version, each.standing) for each in slots.reports(pointer)] == [
        (2, "active"),
        (3, "installing"),
    ]


def test_a_crash_loop_is_more_starts_than_a_trial_may_take() -> None:
    pointer = slots.committed(slots.begun(running(1), offer(2)), Slot(2, "r"))
    for _ in range(slots.TRIAL_STARTS):
        pointer = slots.started(pointer)
        assert not slots.is_crash_loop(pointer)
    pointer = slots.started(pointer)
    assert slots.is_crash_loop(pointer)
    back = slots.fallen_back(pointer, "crash_loop", "it crashed")
    assert back.running == Slot(1, "r")
    active, last = slots.reports(back)
    assert (active.version, last.version, last.standing, last.code) == (1, 2, "rolled_back", "crash_loop")
    assert not slots.is_news(back, offer(2))


def test_without_another_version_nothing_runs_after_a_fall() -> None:
    back = slots.fallen_back(running(1), "self_test", "wrong")
    assert (back.active, back.running) == (None, None)


def test_starts_are_counted_on_trial_only() -> None:
    assert slots.started(running(1)) == running(1)
    assert slots.started(EMPTY) == EMPTY


def test_trouble_on_the_way_says_nothing_about_the_version() -> None:
    pointer = slots.put_off(running(1), offer(2), "expired", "old")
    assert slots.is_news(pointer, offer(2))
    assert pointer.failed == ()


def test_a_failed_version_is_told_to_the_next_rollout_that_offers_it() -> None:
    pointer = slots.failed(running(1), offer(2), "self_test", "wrong")
    told = slots.told_failed(pointer, offer(2, "s"))
    assert told.last is not None
    assert (told.last.rollout, told.last.standing, told.last.code) == ("s", "failed", "self_test")
    assert slots.told_failed(told, offer(2, "s")) == told


def test_the_running_version_is_news_only_for_another_rollout() -> None:
    pointer = running(1)
    assert not slots.is_news(pointer, offer(1))
    assert slots.is_news(pointer, offer(1, "s"))
    assert slots.reports(slots.renamed(pointer, "s"))[0].rollout == "s"


def test_why_a_version_fell_is_told_on_after_the_way_back_was_signed() -> None:
    pointer = slots.renamed(slots.fallen_back(running(1, 2), "self_test", "wrong"), "s")
    assert [(each.version, each.code) for each in slots.reports(pointer)] == [(1, ""), (2, "self_test")]


def test_going_back_to_what_runs_ends_what_was_being_installed() -> None:
    """Else the device says for ever that it installs what it was told to leave."""
    pointer = slots.renamed(slots.put_off(running(1), offer(2), "disk", "no room"), "r")
    assert [(each.version, each.standing) for each in slots.reports(pointer)] == [(1, "active")]


def test_going_back_to_no_version_is_news_until_none_runs_or_is_installed() -> None:
    none = ReleaseOffer("r", "digits", NO_MODEL, "roll_back")
    for before in (running(1), slots.put_off(EMPTY, offer(1), "disk", "no room")):
        assert slots.is_news(before, none) and not slots.is_news(slots.given_up(before), none)
    (last,) = slots.reports(slots.given_up(running(1)))
    assert (last.version, last.standing, last.code) == (1, "rolled_back", "told")
    assert slots.is_news(slots.given_up(running(1)), offer(1))


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
            if not slots.is_news(pointer, wanted):
                continue
            if pointer.spare is not None and pointer.spare.version == version:
                pointer = slots.turned_back(pointer, pointer.spare)
                continue
            pointer = slots.begun(pointer, wanted)
            if what == "install":
                pointer = slots.committed(pointer, Slot(version, "r"))
            elif what == "unfit":
                pointer = slots.failed(pointer, wanted, "self_test", "")
            else:
                pointer = slots.put_off(pointer, wanted, "expired", "")
        elif what == "fall" and pointer.active is not None:
            pointer = slots.fallen_back(pointer, "self_test", "")
        elif what == "turn" and pointer.spare is not None:
            pointer = slots.turned_back(pointer, pointer.spare)
        elif what == "start":
            pointer = slots.started(pointer)
        elif what == "prove":
            pointer = slots.proved(pointer)
        assert (pointer.active is None) == (pointer.running is None)
        assert pointer.active is not None or pointer.spare is None, "a version that could run does not"
        if pointer.running is not None:
            assert pointer.failure(pointer.running.version) is None
            assert pointer.spare is None or pointer.spare.version != pointer.running.version
        assert [each.standing for each in slots.reports(pointer)].count("active") == (
            pointer.active is not None
        )


def test_the_pointer_is_read_as_it_was_written(tmp_path: Path) -> None:
    pointer = slots.failed(running(1, 2), offer(3), "memory", "too much")
    pointer = replace(pointer, a=Slot(1, "r", 0.5, ReleaseEvaluation(4, 3, 1.5, 2, 2.5)), trial_starts=2)
    slots.write(tmp_path, pointer)
    assert slots.read(tmp_path, "digits") == pointer
    assert slots.models(tmp_path) == ("digits",)
    assert slots.active_folder(tmp_path, "digits") == tmp_path / "releases" / "digits" / "b"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": "other"}', '{"model": "digits", "format": 7}'])
def test_a_damaged_pointer_is_as_none(tmp_path: Path, content: str) -> None:
    slots.write(tmp_path, running(1))
    (tmp_path / "releases/digits/pointer.json").write_text(content)
    assert slots.read(tmp_path, "digits") == EMPTY


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
    with pytest.raises(Unfit, match="model is 'other'"):
        rollouts.from_json(b'{"model": "other", "rollouts": []}', "digits")


@pytest.mark.parametrize("name", ["", "../up", "A", "tuf.json", "a/b", "x" * 64])
def test_a_model_is_a_plain_name(name: str) -> None:
    assert not rollouts.is_release(name, 1)


@given(st.binary(max_size=5000))
def test_blocks_are_read_as_they_were_described(content: bytes) -> None:
    found = blocks.read(blocks.described(content), len(content))
    assert found is not None
    assert list(found.hashes) == blocks.hashes_of(content, found.block_bytes)


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
    described = blocks.described(bytes(3_000_000))
    assert described["block_bytes"] == 4096
    assert len(described["blocks"]) < 11_000
