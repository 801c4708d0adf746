"""Identity over real TLS: only a certificate of ours counts, and only while its device takes part."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import Depends, FastAPI

from coordinator import certificates
from coordinator.accounts import certificate_authority, enrolment
from coordinator.db.store import Database
from coordinator.device_api import identity
from coordinator.device_api.identity import calling_device
from edge_client.wire.device import PREFIX
from tests.support.databases import with_tables
from tests.support.doorway import START, Device, Door, door, error_of, listening, open_door


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path_factory.mktemp('database')}/fedloop.db"
    with_tables(url)
    opened = Database(url)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory, database: Database) -> Iterator[Door]:
    with open_door(tmp_path_factory.mktemp("home"), database) as opened:
        yield opened


@pytest.fixture(autouse=True)
def at_the_start(coordinator: Door) -> Iterator[None]:
    yield
    coordinator.clock.now = START


@pytest.fixture
def device(coordinator: Door, tmp_path: Path) -> Device:
    made = Device(tmp_path)
    assert coordinator.enrol(made).status_code == 200
    return made


def revoke(at: Door, device: Device) -> None:
    at.services.database.write(
        lambda connection: enrolment.revoke(connection, device.id, at.clock())
    ).result()


def hello(at: Door, device: Device | None, **headers: str) -> httpx.Response:
    """A request that passes for whoever has an identity: it is refused for its empty body only."""
    return at.call("POST", "/checkin", {}, device=device, **headers)


PASSED = (422, "malformed")


def test_an_enrolled_device_is_known_by_its_certificate(coordinator: Door, device: Device) -> None:
    assert error_of(hello(coordinator, device)) == PASSED


def test_without_a_certificate_there_is_enrolment_and_nothing_else(coordinator: Door) -> None:
    assert coordinator.call("GET", "/ca").text == coordinator.services.authority.ca_pem
    for method, path in (
        ("POST", "/checkin"),
        ("POST", "/leave"),
        ("GET", f"/blobs/{'0' * 64}"),
        ("POST", "/tasks/1/upload"),
        ("PUT", "/tasks/1/upload?offset=0"),
        ("POST", "/tasks/1/evaluation"),
        ("POST", "/tasks/1/decline"),
    ):
        assert error_of(coordinator.call(method, path, {})) == (401, "no_certificate"), path


def test_a_foreign_certificate_ends_the_handshake(
    coordinator: Door, device: Device, tmp_path: Path, database: Database
) -> None:
    other = door(tmp_path / "other", database)
    forged = other.services.authority.issue_device(
        certificate_authority.read_request(device.csr()), device.id, START
    )
    device.certificate = certificates.pem_of(forged)
    with pytest.raises((httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)):
        hello(coordinator, device)


def test_the_servers_own_certificate_is_no_device(coordinator: Door, tmp_path: Path) -> None:
    folder = coordinator.services.settings.home / "pki"
    context = ssl.create_default_context(cadata=coordinator.services.authority.ca_pem)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with (
        httpx.Client(verify=context, base_url=coordinator.url + PREFIX) as client,
        pytest.raises((httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)),
    ):
        client.post("/checkin", json={})


def test_older_tls_is_not_spoken(coordinator: Door) -> None:
    context = ssl.create_default_context(cadata=coordinator.services.authority.ca_pem)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    address = urlsplit(coordinator.url)
    with (
        socket.create_connection((address.hostname, address.port)) as line,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(line, server_hostname="localhost")


def test_an_expired_certificate_is_refused_as_expired_and_renewed_over_the_same_api(
    coordinator: Door, device: Device
) -> None:
    coordinator.clock.pass_days(45)
    assert error_of(hello(coordinator, device)) == (401, "expired")
    key = ec.generate_private_key(ec.SECP256R1())
    for shown in (None, device):  # with the expired certificate in TLS or without any
        answer = coordinator.call("POST", "/renew", device.renewal(key), device=shown)
        assert answer.status_code == 200
    device.key, device.certificate = key, answer.json()["certificate"]
    assert error_of(hello(coordinator, device)) == PASSED


def test_a_clock_behind_the_certificate_is_reported(coordinator: Door, device: Device) -> None:
    coordinator.clock.pass_days(-1)
    assert error_of(hello(coordinator, device)) == (401, "not_yet_valid")


def test_revocation_acts_on_the_very_next_request_of_the_same_connection(
    coordinator: Door, device: Device
) -> None:
    context = ssl.create_default_context(cadata=coordinator.services.authority.ca_pem)
    device.show_in(context)
    with httpx.Client(verify=context, base_url=coordinator.url + PREFIX) as client:
        assert error_of(client.post("/checkin", json={})) == PASSED
        revoke(coordinator, device)
        assert error_of(client.post("/checkin", json={})) == (403, "revoked")
    key = ec.generate_private_key(ec.SECP256R1())
    assert error_of(coordinator.call("POST", "/renew", device.renewal(key))) == (403, "revoked")


def test_a_device_that_left_is_a_stranger(coordinator: Door, device: Device) -> None:
    assert coordinator.call("POST", "/leave", device=device).status_code == 200
    assert error_of(hello(coordinator, device)) == (403, "unknown_device")


def test_a_certificate_of_ours_for_a_device_that_no_row_knows_is_refused(
    coordinator: Door, device: Device
) -> None:
    request = certificate_authority.read_request(device.csr())
    device.certificate = certificates.pem_of(
        coordinator.services.authority.issue_device(request, "nobody", START)
    )
    assert error_of(hello(coordinator, device)) == (403, "unknown_device")


def test_bodies_that_fit_no_message_are_refused(coordinator: Door) -> None:
    for body in ({}, [], {"token": 1, "csr": "", "name": ""}, None):
        assert error_of(coordinator.call("POST", "/enrol", body)) == (422, "malformed")
    assert error_of(coordinator.call("POST", "/enrol", {"token": "x" * 2**20})) == (413, "oversized")


def test_a_stolen_single_use_token_is_worth_nothing_after_its_use(coordinator: Door, tmp_path: Path) -> None:
    token = coordinator.token()
    assert coordinator.enrol(Device(tmp_path), token).status_code == 200
    assert error_of(coordinator.enrol(Device(tmp_path), token)) == (403, "token_used")


def forwarded(device: Device) -> dict[str, str]:
    """As nginx forwards `$ssl_client_escaped_cert`."""
    return {identity.FORWARDED: quote(device.certificate, safe="")}


def test_a_forwarded_certificate_is_ignored_unless_the_proxy_is_trusted(
    coordinator: Door, device: Device
) -> None:
    assert error_of(hello(coordinator, None, **forwarded(device))) == (401, "no_certificate")


def test_a_forwarded_certificate_does_not_change_who_is_connected(
    coordinator: Door, device: Device, tmp_path: Path
) -> None:
    other = Device(tmp_path)
    coordinator.enrol(other)
    revoke(coordinator, other)
    assert error_of(hello(coordinator, device, **forwarded(other))) == PASSED


@pytest.fixture(scope="module")
def behind_proxy(tmp_path_factory: pytest.TempPathFactory, database: Database) -> Iterator[Door]:
    """A coordinator that believes proxies on 127.0.0.0/8."""
    home = tmp_path_factory.mktemp("behind")
    with open_door(home, database, trusted_proxies=("::1", "127.0.0.0/8")) as opened:
        yield opened


def test_a_trusted_proxy_says_who_is_calling(behind_proxy: Door, tmp_path: Path) -> None:
    device = Device(tmp_path)
    behind_proxy.enrol(device)
    assert error_of(hello(behind_proxy, None, **forwarded(device))) == PASSED
    assert error_of(hello(behind_proxy, None)) == (401, "no_certificate")
    revoke(behind_proxy, device)
    assert error_of(hello(behind_proxy, None, **forwarded(device))) == (403, "revoked")


def test_certificates_forwarded_by_a_trusted_proxy_are_verified_here(
    behind_proxy: Door, tmp_path: Path, database: Database
) -> None:
    device = Device(tmp_path)
    behind_proxy.enrol(device)
    good = forwarded(device)
    for wrong in ("nonsense", quote("\0"), quote(device.certificate[:-60])):
        answer = hello(behind_proxy, None, **{identity.FORWARDED: wrong})
        assert error_of(answer) == (401, "foreign_certificate")
    other = door(tmp_path / "other", database)
    forged = other.services.authority.issue_device(
        certificate_authority.read_request(device.csr()), device.id, START
    )
    answer = hello(behind_proxy, None, **{identity.FORWARDED: quote(certificates.pem_of(forged), safe="")})
    assert error_of(answer) == (401, "foreign_certificate")
    behind_proxy.clock.pass_days(31)
    assert error_of(hello(behind_proxy, None, **good)) == (401, "expired")
    behind_proxy.clock.now = START


def test_no_other_header_forwards_a_certificate(behind_proxy: Door, tmp_path: Path) -> None:
    """A proxy replaces the header it is set to; any other comes from the client unchanged."""
    device = Device(tmp_path)
    behind_proxy.enrol(device)
    escaped = quote(device.certificate, safe="")
    for header in ("x-forwarded-client-cert", "ssl-client-cert", "x-ssl-cert"):
        for value in (escaped, f'Cert="{escaped}"'):
            assert error_of(hello(behind_proxy, None, **{header: value})) == (401, "no_certificate")


def test_the_connections_own_address_counts_and_not_one_that_a_header_names(
    coordinator: Door, device: Device
) -> None:
    claims = {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1"}
    assert error_of(hello(coordinator, None, **forwarded(device), **claims)) == (401, "no_certificate")


def test_a_proxy_in_front_speaks_plain_http_or_tls(behind_proxy: Door, tmp_path: Path) -> None:
    """Without TLS there is no certificate but the forwarded one."""
    app = FastAPI()
    app.state.services = behind_proxy.services

    @app.get("/who")
    async def who(caller: Annotated[str, Depends(calling_device)]) -> Any:
        return caller

    device = Device(tmp_path, "gate")
    behind_proxy.enrol(device)
    with listening(app) as port:
        answer = httpx.get(f"http://127.0.0.1:{port}/who", headers=forwarded(device))
    assert answer.json() == device.id


@pytest.mark.parametrize(
    ("address", "trusted", "believed"),
    [
        ("127.0.0.1", (), False),
        ("10.1.2.3", ("10.0.0.0/8",), True),
        ("11.1.2.3", ("10.0.0.0/8",), False),
        ("::ffff:10.1.2.3", ("10.1.2.3",), True),
        ("::1", ("10.1.2.3",), False),
        ("", ("10.1.2.3",), False),
    ],
)
def test_who_is_a_trusted_proxy(address: str, trusted: tuple[str, ...], believed: bool) -> None:
    assert identity._is_trusted(address, trusted) is believed


def test_refusals_name_no_secret(coordinator: Door, tmp_path: Path) -> None:
    token = coordinator.token()
    answers = [coordinator.enrol(Device(tmp_path), text) for text in (token, token, token + "x")]
    secret = token.rpartition(".")[2]
    assert all(secret not in each.text for each in answers[1:])
