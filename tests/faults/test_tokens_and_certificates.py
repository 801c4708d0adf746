"""Who gets in, and who stays out, over TLS against a served coordinator."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.accounts.certificate_authority import DEVICE_URI, Authority
from coordinator.context.services import utc_now
from coordinator.settings import Settings
from edge_client.wire import device as wire
from tests.support.arena import Arena, arena
from tests.support.device_client import (
    Answer,
    NoAnswer,
    RawDevice,
    csr,
    fetched_ca,
    line,
    message,
    new_key,
    renewal,
    request,
)

pytestmark = pytest.mark.slow

CROWD = 100


@dataclass(frozen=True)
class Gate:
    """A served coordinator, and its authority in the hands of the test, to sign what it never would."""

    arena: Arena
    authority: Authority
    folder: Path

    def holder(self, name: str, certificate: str, key: ec.EllipticCurvePrivateKey, device: str) -> RawDevice:
        """Whoever holds this key and shows this certificate."""
        url = self.arena.fleet.device_url
        return RawDevice.kept(device, url, self.authority.ca_pem, self.folder / name, key, certificate)

    def dated(self, device: RawDevice, days: float) -> str:
        """A certificate for the device as if it had been made so many days ago, for 30 days."""
        requested = x509.load_pem_x509_csr(csr(device.key).encode())
        made = self.authority.issue_device(requested, device.id, utc_now() - timedelta(days=days))
        return _pem(made)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory, module_served_on: Mapping[str, str]) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gate")
    with arena(folder, environment=module_served_on) as made:
        settings = Settings(home=made.fleet.home, database_url="sqlite://")
        yield Gate(made, Authority.open(settings, utc_now), folder)


@pytest.fixture
def device(gate: Gate) -> RawDevice:
    return gate.arena.enrol(1)[0]


def test_a_token_used_by_a_hundred_at_once_admits_as_many_as_it_says(
    tmp_path: Path, served_on: Mapping[str, str]
) -> None:
    with arena(tmp_path, environment=served_on) as made:
        admitted = len(made.fleet.client.get("/devices")["devices"])
        for uses in (1, 5):
            token = made.fleet.client.post("/tokens", {"uses": uses})["token"]
            answers = _crowd(made, token)
            enrolled = [answer.document for answer in answers if answer.status == 200]
            assert len(enrolled) == uses
            assert len({each["device"] for each in enrolled}) == uses
            assert all(each["certificate"] for each in enrolled)
            refused = [(answer.status, answer.code) for answer in answers if answer.status != 200]
            assert set(refused) == {(403, "token_used")}
            admitted += uses
            assert len(made.fleet.client.get("/devices")["devices"]) == admitted
        assert made.failures() == []


def _crowd(made: Arena, token: str) -> list[Answer]:
    """A hundred devices, each with a key of its own, that enrol with one token in the same moment."""
    url = made.fleet.device_url
    ca_pem = fetched_ca(url)
    requested = [message(wire.EnrolRequest(token, csr(new_key()), f"crowd-{at}")) for at in range(CROWD)]
    ready = threading.Barrier(CROWD)

    def enrol(body: bytes) -> Answer:
        stranger = line(url, ca_pem)
        ready.wait()
        try:
            return stranger.send(request("POST", "/enrol", body))
        finally:
            stranger.close()

    with ThreadPoolExecutor(CROWD) as pool:
        return list(pool.map(enrol, requested))


def test_a_key_that_asks_again_is_the_same_device(gate: Gate) -> None:
    token = gate.arena.fleet.client.post("/tokens", {})["token"]
    body = message(wire.EnrolRequest(token, csr(new_key()), "twice"))
    stranger = line(gate.arena.fleet.device_url, gate.authority.ca_pem)
    first, second = (stranger.send(request("POST", "/enrol", body)).document for _ in range(2))
    stranger.close()
    assert first["device"] == second["device"]
    assert first["certificate"] == second["certificate"]


ROUTES = [
    ("POST", "/checkin"),
    ("POST", "/leave"),
    ("GET", "/blobs/" + "ab" * 32),
    ("POST", "/tasks/" + "x" * 36 + "/upload"),
    ("PUT", "/tasks/" + "x" * 36 + "/upload?offset=0"),
    ("POST", "/tasks/" + "x" * 36 + "/evaluation"),
    ("POST", "/tasks/" + "x" * 36 + "/decline"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_certificate_there_is_nothing_but_enrolment(gate: Gate, method: str, path: str) -> None:
    stranger = line(gate.arena.fleet.device_url, gate.authority.ca_pem)
    answer = stranger.send(request(method, path, b"{}"), method=method)
    stranger.close()
    assert (answer.status, answer.code) == (401, "no_certificate")


def test_a_revoked_device_is_refused_from_its_next_request_on(gate: Gate, device: RawDevice) -> None:
    assert device.check_in(gate.arena.checkin()).status == 200
    gate.arena.fleet.client.post(f"/devices/{device.id}/revoke")
    opened = device.line.connections
    answer = device.check_in(gate.arena.checkin())
    assert (answer.status, answer.code) == (403, "revoked")
    assert device.line.connections == opened, "it was the connection that had been let in"
    renewed = device.post("/renew", renewal(device.certificate, device.key, new_key()))
    assert (renewed.status, renewed.code) == (403, "revoked")
    again = device.post("/renew", renewal(gate.dated(device, 40), device.key, new_key()))
    assert (again.status, again.code) == (403, "revoked")


def test_an_expired_certificate_is_refused_but_renews(gate: Gate, device: RawDevice) -> None:
    expired = gate.dated(device, 75)
    late = gate.holder("late", expired, device.key, device.id)
    answer = late.check_in(gate.arena.checkin())
    assert (answer.status, answer.code) == (401, "expired")
    next_key = new_key()
    renewed = late.post("/renew", renewal(expired, device.key, next_key))
    assert renewed.status == 200
    assert renewed.document["device"] == device.id
    back = gate.holder("back", renewed.document["certificate"], next_key, device.id)
    assert back.check_in(gate.arena.checkin()).status == 200


def test_a_certificate_that_expired_too_long_ago_renews_no_more(gate: Gate, device: RawDevice) -> None:
    answer = device.post("/renew", renewal(gate.dated(device, 121), device.key, new_key()))
    assert (answer.status, answer.code) == (401, "expired")


def test_a_certificate_of_the_future_is_refused(gate: Gate, device: RawDevice) -> None:
    early = gate.holder("early", gate.dated(device, -2), device.key, device.id)
    answer = early.check_in(gate.arena.checkin())
    assert (answer.status, answer.code) == (401, "not_yet_valid")


def test_a_certificate_alone_renews_nothing(gate: Gate, device: RawDevice) -> None:
    """Certificates are no secret: only the key speaks for a device."""
    thief = new_key()
    answer = device.post("/renew", renewal(device.certificate, thief, new_key()))
    assert (answer.status, answer.code) == (403, "bad_proof")


def test_a_certificate_of_another_authority_does_not_even_connect(gate: Gate, device: RawDevice) -> None:
    """A CA of the same name and another key: the handshake ends."""
    key = new_key()
    forged = _signed(_builder(device.id, key, gate.authority.certificate.subject), new_key())
    with pytest.raises(NoAnswer):
        gate.holder("forged", forged, key, device.id).check_in(gate.arena.checkin())
    stranger = line(gate.arena.fleet.device_url, gate.authority.ca_pem)
    answer = stranger.send(request("POST", "/renew", message(renewal(forged, key, new_key()))))
    stranger.close()
    assert (answer.status, answer.code) == (401, "foreign_certificate")


def test_a_device_signs_no_others(gate: Gate, device: RawDevice) -> None:
    """A certificate signed by a device's own key is not one of ours, though its chain ends at our CA."""
    key = new_key()
    issuer = x509.load_pem_x509_certificate(device.certificate.encode())
    child = _signed(_builder("another", key, issuer.subject), device.key)
    holder = gate.holder("child", child + device.certificate, key, "another")
    try:
        answer = holder.check_in(gate.arena.checkin())
    except NoAnswer:
        return  # OpenSSL ended the handshake
    assert (answer.status, answer.code) == (401, "foreign_certificate")


def test_the_coordinators_own_certificate_is_no_devices(gate: Gate) -> None:
    pki = gate.arena.fleet.home / "pki"
    key: Any = serialization.load_pem_private_key((pki / "server.key").read_bytes(), None)
    server = gate.holder("server", (pki / "server.pem").read_text(), key, "server")
    try:
        answer = server.check_in(gate.arena.checkin())
    except NoAnswer:
        return  # OpenSSL refuses it as a client's
    assert (answer.status, answer.code) == (401, "foreign_certificate")


def test_a_certificate_for_a_device_that_never_was_is_refused(gate: Gate) -> None:
    key = new_key()
    made = gate.authority.issue_device(x509.load_pem_x509_csr(csr(key).encode()), "nobody", utc_now())
    answer = gate.holder("nobody", _pem(made), key, "nobody").check_in(gate.arena.checkin())
    assert (answer.status, answer.code) == (403, "unknown_device")


def test_a_device_that_left_is_not_taken_back_by_its_certificate(gate: Gate, device: RawDevice) -> None:
    assert device.post("/leave", {}).status == 200
    answer = device.check_in(gate.arena.checkin())
    assert (answer.status, answer.code) == (403, "unknown_device")


def test_a_body_names_nobody(gate: Gate) -> None:
    """Keys that name another device are passed over: the report is kept as the caller's."""
    mine, theirs = gate.arena.enrol(2)
    checkin_body = wire.to_json(gate.arena.checkin(device_class="mine")) | {
        "device": theirs.id,
        "id": theirs.id,
    }
    assert mine.post("/checkin", checkin_body).status == 200
    seen = {
        each["id"]: each["last_seen_at"]
        for each in gate.arena.fleet.client.get("/devices?limit=1000")["devices"]
    }
    assert seen[mine.id] is not None
    assert seen[theirs.id] is None


def _builder(device: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device)])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(DEVICE_URI + device)]), False
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> str:
    return _pem(builder.sign(key, hashes.SHA256()))


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
