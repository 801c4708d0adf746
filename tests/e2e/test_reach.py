"""A device that is not next to its coordinator: through an HTTP proxy, a balancer, a proxy that ends TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.errors import UserError
from edge_client.wire.device import Decline
from tests.support import noop
from tests.support.device_client import RawDevice, message, request
from tests.support.long import extended
from tests.support.proxies import Address, ConnectProxy, Line, TerminatingProxy

pytestmark = pytest.mark.slow

SMALL = 20_000


@pytest.mark.extended
def test_a_device_behind_an_http_proxy_enrols_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with ConnectProxy() as proxy, local_fleet(tmp_path, environment={"HTTPS_PROXY": proxy.url}) as fleet:
        _train(fleet)
        host, port = _device_address(fleet)
        assert {line.rpartition(" ")[0] for line in proxy.requests} == {f"CONNECT {host}:{port}"}


@pytest.mark.extended
def test_a_device_behind_a_balancer_that_passes_tls_on_enrols_and_trains(tmp_path: Path) -> None:
    with local_fleet(tmp_path) as fleet, Line(_device_address(fleet)) as balancer:
        _train(fleet, balancer.url)
        assert balancer.accepted > 0
        assert balancer.bytes_up > SMALL


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalFleet, TerminatingProxy]]:
    with _behind_a_proxy(tmp_path_factory.mktemp("trusted"), "--trusted-proxy", "127.0.0.1") as (
        fleet,
        proxy,
    ):
        yield fleet, proxy


def test_a_device_cannot_forge_the_header_through_the_trusted_proxy(
    trusted: tuple[LocalFleet, TerminatingProxy],
) -> None:
    fleet, proxy = trusted
    _forge(fleet, proxy.url)


def test_a_device_behind_a_trusted_proxy_enrols_and_trains(
    trusted: tuple[LocalFleet, TerminatingProxy],
) -> None:
    fleet, proxy = trusted
    _train(fleet, proxy.url)
    assert any(path.endswith("/upload") for path in proxy.paths)


@pytest.fixture(
    scope="module", params=[(), *extended((("--trusted-proxy", "127.0.0.9"),))], ids=["none", "another"]
)
def untrusted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalFleet, TerminatingProxy]]:
    """A coordinator that trusts no proxy, or another one."""
    with _behind_a_proxy(tmp_path_factory.mktemp("untrusted"), *request.param) as (fleet, proxy):
        yield fleet, proxy


def test_a_certificate_forwarded_by_a_proxy_that_is_not_trusted_counts_for_nothing(
    untrusted: tuple[LocalFleet, TerminatingProxy],
) -> None:
    fleet, proxy = untrusted
    # Enrolment needs no certificate, so it gets through; whatever needs one does not.
    device = _raw(fleet, "a", url=proxy.url)
    body = device.check_in(noop.checkin())
    assert (body.status, body.code) == (401, "no_certificate")


@pytest.mark.extended
def test_the_header_of_a_trusted_proxy_sent_by_a_device_counts_for_nothing(
    untrusted: tuple[LocalFleet, TerminatingProxy],
) -> None:
    fleet, _ = untrusted
    _forge(fleet, fleet.device_url)


def _forge(fleet: LocalFleet, url: str) -> None:
    """A device shows the certificate of another in the header: the task of the other is not its own."""
    victim, thief = _raw(fleet, "victim", url=url), _raw(fleet, "thief", url=url)
    victim.check_in(noop.checkin())
    noop.start(fleet, noop.experiment(SMALL, rounds=1, clients=1))
    task = victim.task(noop.checkin(wait_seconds=20))["task"]
    header = ("X-Client-Cert", quote(victim.certificate, safe=""))
    decline = message(Decline("failed", "forged"))
    answer = thief.send(request("POST", f"/tasks/{task}/decline", decline, [header]))
    assert (answer.status, answer.code) == (403, "not_yours")
    assert victim.post(f"/tasks/{task}/decline", Decline("failed", "its own")).status == 200


@pytest.mark.extended
def test_a_device_sent_to_somebody_else_does_not_enrol(tmp_path: Path) -> None:
    ours, theirs = local_fleet(tmp_path / "ours"), local_fleet(tmp_path / "theirs")
    with ours as fleet, theirs as other, pytest.raises(UserError, match="could not be enrolled"):
        noop.add_device(fleet, "a", url=other.device_url)


@contextmanager
def _behind_a_proxy(folder: Path, *flags: str) -> Iterator[tuple[LocalFleet, TerminatingProxy]]:
    with (
        local_fleet(folder, flags) as fleet,
        TerminatingProxy(_device_address(fleet), fleet.home / "pki") as proxy,
    ):
        yield fleet, proxy


def _train(fleet: LocalFleet, url: str | None = None) -> None:
    noop.add_device(fleet, "a", url=url).start()
    run = noop.start(fleet, noop.experiment(SMALL, rounds=2, clients=1))
    lines = noop.finish(fleet.client, run)
    assert [line["accepted"] for line in lines] == [1, 1], fleet.devices["a"].tail()


def _device_address(fleet: LocalFleet) -> Address:
    parts = urlsplit(fleet.device_url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def _raw(fleet: LocalFleet, name: str, url: str) -> RawDevice:
    token = fleet.client.post("/tokens")["token"]
    return RawDevice.enrol(url, token, fleet.folder / name, name)
