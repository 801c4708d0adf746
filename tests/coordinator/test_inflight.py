"""Uploads in flight: as many as fit the memory that they may take, each for a turn while others wait."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from coordinator.errors import Refusal
from coordinator.limits.uploads_in_flight import (
    SLOT_SECONDS,
    UPLOAD_BYTES,
    UploadSlots,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_as_many_as_fit_and_no_more() -> None:
    uploads = UploadSlots(3 * UPLOAD_BYTES, Clock())
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(uploads.acquire())
        with pytest.raises(Refusal) as refused, uploads.acquire():
            pass
    assert (refused.value.status, refused.value.code) == (503, "busy")
    assert refused.value.retry_after_seconds
    with uploads.acquire():
        pass


def test_a_piece_that_had_its_turn_makes_room_where_others_wait() -> None:
    clock = Clock()
    uploads = UploadSlots(UPLOAD_BYTES, clock)
    with uploads.acquire() as check_slot:
        clock.now += 2 * SLOT_SECONDS
        check_slot()  # nobody waits
        with pytest.raises(Refusal), uploads.acquire():
            pass
        with pytest.raises(Refusal, match="other uploads wait"):
            check_slot()
        clock.now += 60.0
        check_slot()  # whoever waited has gone


def test_a_piece_has_its_turn_although_others_wait() -> None:
    clock = Clock()
    uploads = UploadSlots(UPLOAD_BYTES, clock)
    with uploads.acquire() as check_slot:
        clock.now += SLOT_SECONDS / 2
        with pytest.raises(Refusal), uploads.acquire():
            pass
        check_slot()


def test_one_upload_always_fits() -> None:
    with UploadSlots(1).acquire():
        pass
