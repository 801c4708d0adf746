"""The certificate authority: made once or given, signs devices by ids of its own, keeps its server's certificate."""

from __future__ import annotations

import ssl
import stat
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator import certificates
from coordinator.accounts import certificate_authority
from coordinator.accounts.certificate_authority import Authority
from coordinator.errors import Refusal, UserError
from coordinator.settings import Settings
from tests.support.doorway import START, key_pem, request_for

DEVICE = "0b0e7a4e-6f0f-4f5e-9d63-5f5b8f6a4a10"


def settings(home: Path, **changed: Any) -> Settings:
    return Settings(home=home, database_url="", **changed)


def authority(home: Path, **changed: Any) -> Authority:
    return Authority.open(settings(home, **changed), lambda: START)


def own_ca(folder: Path, key: Any, *, ca: bool = True, days: float = 100) -> dict[str, Path]:
    """Files of a CA made elsewhere."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ACME")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(START - timedelta(days=1))
        .not_valid_after(START + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    )
    files = {"ca_certificate": folder / "own.pem", "ca_key": folder / "own.key"}
    files["ca_certificate"].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files["ca_key"].write_text(key_pem(key))
    return files


def test_the_authority_is_made_at_the_first_start_and_kept(tmp_path: Path) -> None:
    first, second = authority(tmp_path), authority(tmp_path)
    assert first.ca_pem == second.ca_pem
    lifetime = first.certificate.not_valid_after_utc - START
    assert lifetime == timedelta(days=3650)
    assert first.ca_sha256 == first.certificate.fingerprint(hashes.SHA256()).hex()


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    authority(tmp_path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "pki").iterdir()}
    assert modes["ca.key"] == modes["server.key"] == 0o600
    assert stat.S_IMODE((tmp_path / "pki").stat().st_mode) == 0o700


def test_two_coordinators_have_two_authorities(tmp_path: Path) -> None:
    one, other = authority(tmp_path / "one"), authority(tmp_path / "other")
    assert one.certificate.subject != other.certificate.subject


def test_a_first_start_that_was_cut_short_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "pki").mkdir()
    (tmp_path / "pki" / "ca.key").write_text(key_pem(ec.generate_private_key(ec.SECP256R1())))
    assert authority(tmp_path).ca_pem == authority(tmp_path).ca_pem


def test_a_certificate_names_the_device_and_nothing_of_the_request(tmp_path: Path) -> None:
    own = authority(tmp_path)
    forged = x509.UniformResourceIdentifier(certificate_authority.DEVICE_URI + "another")
    request = request_for(
        ec.generate_private_key(ec.SECP256R1()), names=(forged, x509.DNSName("localhost")), subject="admin"
    )
    issued = own.issue_device(certificate_authority.read_request(request), DEVICE, START)
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    usage = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(names) == [x509.UniformResourceIdentifier(f"spiffe://fedloop/device/{DEVICE}")]
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert "admin" not in issued.subject.rfc4514_string()
    assert own.verify(issued, START) == DEVICE
    assert issued.not_valid_before_utc == START - timedelta(minutes=5)
    assert issued.not_valid_after_utc == START + timedelta(days=30)


def test_openssl_agrees_with_what_is_signed(tmp_path: Path) -> None:
    own = authority(tmp_path)
    issued = own.issue_device(
        certificate_authority.read_request(request_for(ec.generate_private_key(ec.SECP256R1()))),
        DEVICE,
        START,
    )
    (tmp_path / "device.pem").write_text(certificates.pem_of(issued))
    at, authority_file = ("-attime", str(int(START.timestamp()))), tmp_path / "pki" / "ca.pem"
    for purpose, file in (
        ("sslclient", tmp_path / "device.pem"),
        ("sslserver", tmp_path / "pki" / "server.pem"),
    ):
        done = subprocess.run(
            ["openssl", "verify", "-x509_strict", "-purpose", purpose, *at, "-CAfile", authority_file, file],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    own = authority(tmp_path, **own_ca(tmp_path, ec.generate_private_key(ec.SECP256R1()), days=10))
    issued = own.issue_device(
        certificate_authority.read_request(request_for(ec.generate_private_key(ec.SECP256R1()))),
        DEVICE,
        START,
    )
    assert issued.not_valid_after_utc == START + timedelta(days=10)


@pytest.mark.parametrize(
    ("request_pem", "message"),
    [
        ("", "PEM"),
        ("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", "PEM"),
        ("\ud800", "PEM"),
        (request_for(ec.generate_private_key(ec.SECP384R1())), "P-256"),
        (request_for(rsa.generate_private_key(65537, 2048)), "P-256"),
    ],
)
def test_a_request_that_will_not_do_is_refused(request_pem: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as raised:
        certificate_authority.read_request(request_pem)
    assert (raised.value.status, raised.value.code) == (422, "bad_csr")


def test_a_request_for_a_key_that_its_sender_does_not_hold_is_refused() -> None:
    der = bytearray(
        x509.load_pem_x509_csr(request_for(ec.generate_private_key(ec.SECP256R1())).encode()).public_bytes(
            serialization.Encoding.DER
        )
    )
    at = der.index(b"anything")
    der[at : at + 8] = b"anybodys"
    changed = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM).decode()
    with pytest.raises(Refusal, match="own key"):
        certificate_authority.read_request(changed)


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
    ],
)
def test_an_authority_of_ones_own_signs(tmp_path: Path, key: Any) -> None:
    own = authority(tmp_path, **own_ca(tmp_path, key))
    issued = own.issue_device(
        certificate_authority.read_request(request_for(ec.generate_private_key(ec.SECP256R1()))),
        DEVICE,
        START,
    )
    assert own.verify(issued, START) == DEVICE
    assert not (tmp_path / "pki" / "ca.key").exists()


def test_files_that_are_no_authority_are_reported(tmp_path: Path) -> None:
    key, other = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    files = own_ca(tmp_path, key)
    with pytest.raises(UserError, match="both"):
        authority(tmp_path, ca_certificate=files["ca_certificate"])
    with pytest.raises(UserError, match="No such file"):
        authority(tmp_path, **files | {"ca_key": tmp_path / "absent"})
    with pytest.raises(UserError, match="not a certificate"):
        authority(tmp_path, **files | {"ca_certificate": files["ca_key"]})
    files["ca_key"].write_text(key_pem(other))
    with pytest.raises(UserError, match="is not the key of"):
        authority(tmp_path, **files)
    files["ca_key"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(UserError, match="encrypted"):
        authority(tmp_path, **files)
    with pytest.raises(UserError, match="CA:TRUE"):
        authority(tmp_path, **own_ca(tmp_path, key, ca=False))
    with pytest.raises(UserError, match="check the clock"):
        authority(tmp_path, **own_ca(tmp_path, key, days=-0.5))


def test_only_certificates_of_this_authority_for_devices_are_verified(tmp_path: Path) -> None:
    own, foreign = authority(tmp_path / "own"), authority(tmp_path / "foreign")
    request = certificate_authority.read_request(request_for(ec.generate_private_key(ec.SECP256R1())))
    server = x509.load_pem_x509_certificate((tmp_path / "own" / "pki" / "server.pem").read_bytes())
    for certificate in (foreign.issue_device(request, DEVICE, START), server, own.certificate):
        with pytest.raises(Refusal) as raised:
            own.verify(certificate, START)
        assert raised.value.code == "foreign_certificate"


def test_dates_are_checked_against_the_given_clock(tmp_path: Path) -> None:
    own = authority(tmp_path)
    issued = own.issue_device(
        certificate_authority.read_request(request_for(ec.generate_private_key(ec.SECP256R1()))),
        DEVICE,
        START,
    )
    late, early = START + timedelta(days=31), START - timedelta(days=1)
    for moment, code in ((late, "expired"), (early, "not_yet_valid")):
        with pytest.raises(Refusal) as raised:
            own.verify(issued, moment)
        assert (raised.value.status, raised.value.code) == (401, code)
    assert own.verify(issued, late, timedelta(days=2)) == DEVICE


def test_the_server_certificate_is_made_anew_at_two_thirds_of_its_life(tmp_path: Path) -> None:
    own = authority(tmp_path)
    context = own.server_context()
    file = tmp_path / "pki" / "server.pem"
    before = file.read_bytes()
    assert not own.refresh_server_certificate(context, START + timedelta(days=260))
    assert file.read_bytes() == before
    assert own.refresh_server_certificate(context, START + timedelta(days=270))
    assert file.read_bytes() != before


@pytest.mark.parametrize("lost", ["server.pem", "server.key"])
def test_the_server_certificate_is_made_anew_when_half_of_it_is_lost(tmp_path: Path, lost: str) -> None:
    authority(tmp_path)
    (tmp_path / "pki" / lost).write_text(key_pem(ec.generate_private_key(ec.SECP256R1())))
    authority(tmp_path).server_context()


def test_the_server_certificate_follows_the_names(tmp_path: Path) -> None:
    authority(tmp_path)
    authority(tmp_path, names=("fed.example", "192.0.2.7", "::1"))
    made = x509.load_pem_x509_certificate((tmp_path / "pki" / "server.pem").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "::1"]
    with pytest.raises(UserError, match="host name"):
        authority(tmp_path, names=("žluť.example",))


def test_tls_is_1_3_with_an_optional_client_certificate(tmp_path: Path) -> None:
    context = authority(tmp_path).server_context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_OPTIONAL


def test_settings_of_a_device_certificates_life_are_kept(tmp_path: Path) -> None:
    own = Authority.open(replace(settings(tmp_path), certificate_days=2), lambda: START)
    issued = own.issue_device(
        certificate_authority.read_request(request_for(ec.generate_private_key(ec.SECP256R1()))),
        DEVICE,
        START,
    )
    assert issued.not_valid_after_utc == START + timedelta(days=2)
