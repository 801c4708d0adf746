"""Wrong tokens: so many are answered as such, from one address and from all; the file's token is no short one."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.accounts.admin_token import TOKEN_FILE, ensure_admin_token, read_admin_token
from coordinator.errors import Refusal, UserError
from coordinator.limits.rates import (
    OVERALL,
    PER_ADDRESS,
    WrongTokens,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def answered(guesses: WrongTokens, address: str, count: int) -> int:
    """How many of so many wrong tokens were answered as wrong ones."""
    taken = 0
    for _ in range(count):
        try:
            guesses.record("admin", address)
        except Refusal as refusal:
            assert (refusal.status, refusal.code) == (429, "too_many_guesses")
            assert refusal.retry_after_seconds is not None
            assert 0 < refusal.retry_after_seconds <= 60
        else:
            taken += 1
    return taken


def test_one_address_does_not_use_up_the_guesses_of_another() -> None:
    guesses = WrongTokens(Clock())
    assert answered(guesses, "192.0.2.1", 100) == PER_ADDRESS
    assert answered(guesses, "192.0.2.2", 100) == PER_ADDRESS


def test_many_addresses_have_a_limit_together() -> None:
    guesses = WrongTokens(Clock())
    assert sum(answered(guesses, f"192.0.2.{at}", 5) for at in range(200)) == OVERALL


def test_addresses_of_one_network_count_as_one() -> None:
    guesses = WrongTokens(Clock())
    assert sum(answered(guesses, f"2001:db8::{at:x}", 1) for at in range(100)) == PER_ADDRESS
    assert answered(guesses, "::ffff:192.0.2.1", 30) == PER_ADDRESS
    assert answered(guesses, "192.0.2.1", 30) == 0


def test_guesses_come_back_with_time() -> None:
    clock = Clock()
    guesses = WrongTokens(clock)
    answered(guesses, "192.0.2.1", 100)
    clock.now = 60.0
    assert answered(guesses, "192.0.2.1", 100) == PER_ADDRESS


def test_a_token_that_could_be_guessed_is_not_served(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).write_text("hunter2\n")
    with pytest.raises(UserError, match=r"admin\.token: a token of 7 characters, expected 32"):
        ensure_admin_token(tmp_path)
    (tmp_path / TOKEN_FILE).unlink()
    ensure_admin_token(tmp_path)
    assert len(read_admin_token(tmp_path)) == 43
