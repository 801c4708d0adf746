"""Enrolment and the identity on disk, against a coordinator over real TLS."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edge_client.errors import UserError
from edge_client.transport import identity
from edge_client.transport.failures import (
    ServerRefused,
    Unreachable,
    WrongClock,
)
from edge_client.transport.link import describe_wrong_clock
from tests.support.edge import enrolled
from tests.support.fake_coordinator import Authority, FakeCoordinator


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().running() as fake:
        yield fake


def test_enrolment_leaves_a_private_identity(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    who = enrolled(coordinator, tmp_path / "state")
    assert who.device in coordinator.devices.values()
    assert identity.load(tmp_path / "state") == who
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert who.credentials.key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "expected fl1.HASH.SECRET"),
        ("fl1.abc.def", "not a SHA-256"),
        ("fl2." + 64 * "a" + ".x", "begins with 'fl2'"),
        ("fl1." + 64 * "a" + ".x", "Nothing was stored"),
    ],
)
def test_a_wrong_token_is_reported_and_nothing_is_stored(
    coordinator: FakeCoordinator, tmp_path: Path, token: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        identity.enrol(tmp_path, coordinator.url, token, name="x", wait=lambda seconds: None)
    assert list(tmp_path.iterdir()) == []
    assert coordinator.devices == {}


@pytest.mark.parametrize(
    ("days", "message"),
    [
        ((1.0, 365.0), "not valid now: certificate is not yet valid; this machine's clock says 20"),
        ((-9.0, -1.0), "certificate has expired; .* which agrees with the coordinator's: its certificate must be renewed"),
    ],
)  # fmt: skip
def test_a_certificate_that_is_not_valid_by_this_clock_is_reported_with_the_clock(
    tmp_path: Path, days: tuple[float, float], message: str
) -> None:
    early = FakeCoordinator(server_days=days)
    with early.running(), pytest.raises(Unreachable, match=f"{message}.*then enroll again"):
        identity.enrol(tmp_path, early.url, early.token, name="x", wait=lambda seconds: None)
    assert identity.load(tmp_path) is None


def test_a_clock_that_is_wrong_is_reported_by_how_much(coordinator: FakeCoordinator) -> None:
    own = time.time() - 48 * 3600
    error = WrongClock("https://fed: its certificate is not valid now: certificate is not yet valid")
    result = describe_wrong_clock(error, coordinator.url, own)
    assert result.startswith(f"{error}; this machine's clock says ")
    assert result.endswith("UTC; this machine's clock is 48 h behind the coordinator's; set it")


def test_a_port_that_does_not_speak_tls_is_reported_as_the_operators(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        with pytest.raises(
            Unreachable, match=r"not in TLS: it may be the operator's port.*fedloop device token"
        ):
            url = f"https://127.0.0.1:{server.server_port}"
            identity.enrol(tmp_path, url, f"fl1.{64 * 'a'}.x", name="x", wait=lambda seconds: None)
    finally:
        server.shutdown()
        server.server_close()


def test_somebody_between_who_shows_the_right_ca_is_not_believed(tmp_path: Path) -> None:
    impostor = FakeCoordinator()
    with impostor.running():
        right = Authority()
        token = f"fl1.{right.sha256}.c2VjcmV0"
        own, impostor.authority = impostor.authority, right  # its TLS certificate is signed by `own` still
        assert own is not right
        with pytest.raises(Unreachable, match="not the coordinator"):
            identity.enrol(tmp_path, impostor.url, token, name="x", wait=lambda seconds: None)
    assert impostor.devices == {}
    assert identity.load(tmp_path) is None


def test_waiting_for_approval_asks_again_with_the_same_key(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    coordinator.approvals_missing = 2
    waits: list[float] = []
    identity.enrol(tmp_path, coordinator.url, coordinator.token, name="x", wait=waits.append)
    assert waits == [1.5, 1.5]
    assert len(coordinator.devices) == 1


def test_an_interrupted_enrolment_is_taken_up_with_the_same_key(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    coordinator.approvals_missing = 1
    with pytest.raises(KeyboardInterrupt):
        identity.enrol(tmp_path, coordinator.url, coordinator.token, name="x", wait=interrupted)
    assert identity.load(tmp_path) is None
    enrolled(coordinator, tmp_path)
    assert len(coordinator.devices) == 1


def test_a_refused_token_is_the_coordinators_word(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    coordinator.refusals["/enrol"] = (403, "token_used")
    with pytest.raises(ServerRefused, match="token_used"):
        enrolled(coordinator, tmp_path)
    assert identity.load(tmp_path) is None


def test_a_certificate_for_another_key_is_not_taken(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    other = Authority()
    real = coordinator.authority.device
    coordinator.authority.device = lambda key, device, days: real(other.key.public_key(), device, days)  # type: ignore[method-assign]
    with pytest.raises(Unreachable, match="another key"):
        enrolled(coordinator, tmp_path)
    assert identity.load(tmp_path) is None


def test_a_renewal_that_was_cut_off_leaves_the_old_identity_and_is_taken_up(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    before = enrolled(coordinator, tmp_path)
    coordinator.refusals["/renew"] = (503, "busy")
    with pytest.raises(ServerRefused):
        identity.renew(tmp_path, before, expired=False)
    assert identity.load(tmp_path) == before
    next_key = (tmp_path / "identities" / "2" / "key.pem").read_bytes()
    del coordinator.refusals["/renew"]
    after = identity.renew(tmp_path, before, expired=False)
    assert after.credentials.key.read_bytes() == next_key
    assert after.device == before.device
    assert [path.name for path in (tmp_path / "identities").iterdir()] == ["2"]


def test_each_renewal_has_a_new_key(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    who = enrolled(coordinator, tmp_path)
    keys = {who.credentials.key.read_bytes()}
    for _ in range(3):
        who = identity.renew(tmp_path, who, expired=False)
        keys.add(who.credentials.key.read_bytes())
    assert len(keys) == 4


def test_renewals_spread_over_a_tenth_of_the_life_after_two_thirds(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    who = enrolled(coordinator, tmp_path)
    life = who.not_after - who.not_before
    for fingerprint in ("0" * 64, "8" * 64, "f" * 64):
        share = (replace(who, fingerprint=fingerprint).renew_at - who.not_before) / life
        assert 2 / 3 <= share <= 2 / 3 + 0.1
