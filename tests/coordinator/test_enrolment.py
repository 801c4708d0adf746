"""Who may take part: tokens are used once, listed machines enrol once, certificates are renewed by their key."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from sqlalchemy import func, select

from coordinator.accounts import enrolment
from coordinator.db import devices, tables, tokens
from coordinator.db.events import since
from coordinator.db.store import Database
from coordinator.errors import Refusal
from edge_client.wire.device import Enrolled, EnrolRequest, RenewRequest
from tests.support.doorway import START, Device, Door, door


@pytest.fixture
def coordinator(tmp_path: Path, database: Database) -> Iterator[Door]:
    yield door(tmp_path / "home", database)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def begin(at: Door, token: str, device: Device, **changed: Any) -> Future[Enrolled]:
    message = replace(EnrolRequest(token, device.csr(), device.name), **changed)
    services = at.services
    return services.database.write(
        lambda connection: enrolment.enrol(
            connection, services.authority, services.settings, message, at.clock()
        )
    )


def enrol(at: Door, token: str, device: Device, **changed: Any) -> Enrolled:
    answer = begin(at, token, device, **changed).result()
    device.id, device.certificate = answer.device, answer.certificate
    return answer


def renew(at: Door, device: Device, key: ec.EllipticCurvePrivateKey, **changed: Any) -> Enrolled:
    message = RenewRequest(**device.renewal(key, **changed))
    services = at.services
    return services.database.write(
        lambda connection: enrolment.renew(
            connection, services.authority, services.settings, message, at.clock()
        )
    ).result()


def change(at: Door, what: Any, *args: Any) -> Any:
    return at.services.database.write(lambda connection: what(connection, *args, at.clock())).result()


def approve(at: Door, device: str) -> devices.DeviceRow:
    row: devices.DeviceRow = at.services.database.write(
        lambda connection: enrolment.approve(connection, at.services.authority, device, at.clock())
    ).result()
    return row


def row_of(at: Door, device: str) -> devices.DeviceRow:
    return at.services.database.read(lambda connection: enrolment.require_device(connection, device))


def events(at: Door) -> list[str]:
    return [row.event for row in at.services.database.read(lambda connection: since(connection, 0, 1000))]


def count(at: Door, table: Any) -> int:
    statement = select(func.count()).select_from(table)
    return int(at.services.database.read(lambda connection: connection.execute(statement).scalar_one()))


def refused(code: str) -> Any:
    """The block must end in a refusal with this code."""
    return pytest.raises(Refusal, check=lambda error: error.code == code)


def test_a_token_lets_one_device_in_into_its_group(coordinator: Door, device: Device) -> None:
    answer = enrol(coordinator, coordinator.token(group="clinic"), device, serial_number="SN-1")
    row = row_of(coordinator, answer.device)
    assert (row.name, row.device_group, row.state, row.serial_number) == (
        "gateway",
        "clinic",
        "active",
        "SN-1",
    )
    certificate = x509.load_pem_x509_certificate(answer.certificate.encode())
    assert coordinator.services.authority.verify(certificate, START) == answer.device
    assert certificate.public_key() == device.key.public_key()
    assert row.certificate_until == certificate.not_valid_after_utc
    assert answer.not_after == certificate.not_valid_after_utc.isoformat()
    assert events(coordinator) == ["token_made", "device_enrolled"]


def test_of_a_token_only_a_hash_is_kept(coordinator: Door, device: Device) -> None:
    token = coordinator.token()
    enrol(coordinator, token, device)
    secret = token.rpartition(".")[2]
    for table in (tables.tokens, tables.events, tables.devices):
        rows = coordinator.services.database.read(lambda at, table=table: at.execute(select(table)).all())
        assert rows and secret not in repr(rows)


def test_a_single_use_token_is_refused_the_second_time(coordinator: Door, tmp_path: Path) -> None:
    token = coordinator.token()
    enrol(coordinator, token, Device(tmp_path))
    with refused("token_used"):
        enrol(coordinator, token, Device(tmp_path))
    assert count(coordinator, tables.devices) == 1


def test_a_hundred_at_once_with_one_token_get_one_certificate(coordinator: Door, tmp_path: Path) -> None:
    token = coordinator.token()
    waiting = [begin(coordinator, token, Device(tmp_path)) for _ in range(100)]
    errors = [each.exception(60) for each in waiting]
    assert errors.count(None) == 1
    assert {error.code for error in errors if isinstance(error, Refusal)} == {"token_used"}
    assert count(coordinator, tables.certificates) == count(coordinator, tables.devices) == 1


def test_a_token_of_many_uses_admits_so_many(coordinator: Door, tmp_path: Path) -> None:
    token = coordinator.token(uses=3)
    waiting = [begin(coordinator, token, Device(tmp_path)) for _ in range(10)]
    assert [each.exception(60) is None for each in waiting].count(True) == 3


def test_a_token_ends(coordinator: Door, device: Device) -> None:
    token = coordinator.token()
    coordinator.clock.now += timedelta(minutes=15)
    with refused("token_expired"):
        enrol(coordinator, token, device)


def test_a_token_that_was_not_made_here_is_unknown(coordinator: Door, device: Device) -> None:
    form, ca, secret = coordinator.token().split(".")
    for wrong in (
        "",
        "nonsense",
        f"{form}.{ca}.",
        f"{form}.{'0' * 64}.{secret}",
        f"{form}.{ca}.{secret}x",
        "fl1.é.é",
    ):
        with refused("token_unknown"):
            enrol(coordinator, wrong, device)


def test_a_lost_answer_is_given_again_without_another_use(coordinator: Door, device: Device) -> None:
    token = coordinator.token()
    first = enrol(coordinator, token, device)
    coordinator.clock.pass_days(1)  # the token has expired since
    assert enrol(coordinator, token, device) == first
    assert count(coordinator, tables.certificates) == 1
    assert events(coordinator) == ["token_made", "device_enrolled"]


def test_the_same_key_at_once_becomes_one_device(coordinator: Door, device: Device) -> None:
    token = coordinator.token(uses=5)
    answers = [begin(coordinator, token, device) for _ in range(5)]
    assert len({each.result(60).device for each in answers}) == 1
    assert count(coordinator, tables.devices) == 1


@pytest.mark.parametrize(
    "changed",
    [{"name": ""}, {"name": "a\nb"}, {"name": "\x00"}, {"name": "\ud800"}, {"serial_number": "x" * 201}],
)
def test_names_that_no_list_could_show_are_refused(
    coordinator: Door, device: Device, changed: dict[str, str]
) -> None:
    token = coordinator.token()
    with refused("malformed"):
        enrol(coordinator, token, device, **changed)
    enrol(coordinator, token, device, name="Gerät 7")  # the token was not used up


def test_a_pending_device_gets_its_certificate_once_approved(coordinator: Door, device: Device) -> None:
    token = coordinator.token(needs_approval=True)
    first = enrol(coordinator, token, device)
    assert first.certificate == "" and first.retry_seconds > 0
    assert enrol(coordinator, token, device) == first
    assert approve(coordinator, first.device).state == "active"
    again = enrol(coordinator, token, device)
    assert (again.device, again.certificate != "") == (first.device, True)
    assert approve(coordinator, first.device).state == "active"
    assert events(coordinator) == ["token_made", "device_pending", "device_approved"]


def test_the_settings_may_ask_for_approval_of_all(tmp_path: Path, database: Database, device: Device) -> None:
    careful = door(tmp_path / "careful", database, needs_approval=True)
    assert enrol(careful, careful.token(), device).certificate == ""


def test_a_device_revoked_while_pending_gets_nothing(coordinator: Door, device: Device) -> None:
    token = coordinator.token(needs_approval=True)
    pending = enrol(coordinator, token, device).device
    change(coordinator, enrolment.revoke, pending)
    with refused("revoked"):
        enrol(coordinator, token, device)
    with refused("not_pending"):
        approve(coordinator, pending)


def listed(at: Door, *numbers: str, group: str) -> int:
    return at.services.database.write(
        lambda connection: tokens.add_serials(connection, numbers, group, at.clock(), "default")
    ).result()


def test_listed_machines_enrol_once_each_into_their_own_groups(coordinator: Door, tmp_path: Path) -> None:
    assert listed(coordinator, "A1", "A2", "A1", group="north") == 2
    assert listed(coordinator, "A1", "B1", group="south") == 1
    token = coordinator.token(uses=100, listed_serials_only=True)
    for number, group in (("A1", "north"), ("B1", "south")):
        answer = enrol(coordinator, token, Device(tmp_path), serial_number=number)
        assert row_of(coordinator, answer.device).device_group == group
    with refused("serial_used"):
        enrol(coordinator, token, Device(tmp_path), serial_number="A1")
    for number in ("C1", None):
        with refused("serial_unknown"):
            enrol(coordinator, token, Device(tmp_path), serial_number=number)
    assert count(coordinator, tables.devices) == 2


def test_a_hundred_machines_with_one_serial_number_are_one(coordinator: Door, tmp_path: Path) -> None:
    listed(coordinator, "A1", group="north")
    token = coordinator.token(uses=1000, listed_serials_only=True)
    waiting = [begin(coordinator, token, Device(tmp_path), serial_number="A1") for _ in range(100)]
    assert [each.exception(60) is None for each in waiting].count(True) == 1


def test_renewal_gives_a_certificate_for_the_next_key(coordinator: Door, device: Device) -> None:
    enrol(coordinator, coordinator.token(), device)
    coordinator.clock.pass_days(20)
    key = ec.generate_private_key(ec.SECP256R1())
    answer = renew(coordinator, device, key)
    certificate = x509.load_pem_x509_certificate(answer.certificate.encode())
    assert answer.device == device.id
    assert certificate.public_key() == key.public_key()
    assert certificate.not_valid_after_utc == START + timedelta(days=50)
    assert row_of(coordinator, device.id).certificate_until == certificate.not_valid_after_utc
    old = x509.load_pem_x509_certificate(device.certificate.encode())
    assert coordinator.services.authority.verify(old, coordinator.clock()) == device.id


def test_a_device_gets_so_many_certificates_in_a_day(coordinator: Door, device: Device) -> None:
    enrol(coordinator, coordinator.token(), device)
    with pytest.raises(Refusal, match="certificates per day") as refused:
        for _ in range(enrolment.RENEWALS_PER_DAY):
            renew(coordinator, device, ec.generate_private_key(ec.SECP256R1()))
    assert (refused.value.status, refused.value.code) == (429, "too_many_requests")
    assert count(coordinator, tables.certificates) == enrolment.RENEWALS_PER_DAY
    coordinator.clock.pass_days(2)
    renew(coordinator, device, ec.generate_private_key(ec.SECP256R1()))


def test_a_lost_renewal_is_answered_again(coordinator: Door, device: Device) -> None:
    enrol(coordinator, coordinator.token(), device)
    key = ec.generate_private_key(ec.SECP256R1())
    first = renew(coordinator, device, key)
    coordinator.clock.pass_days(1)
    assert renew(coordinator, device, key) == first
    assert events(coordinator).count("device_renewed") == 1


def test_renewal_may_keep_the_key(coordinator: Door, device: Device) -> None:
    first = enrol(coordinator, coordinator.token(), device)
    coordinator.clock.pass_days(20)
    second = renew(coordinator, device, device.key)
    assert second.not_after > first.not_after
    assert renew(coordinator, device, device.key) == second


def test_renewals_go_on_and_on_and_old_certificates_are_forgotten(coordinator: Door, device: Device) -> None:
    enrol(coordinator, coordinator.token(), device)
    for _ in range(12):
        coordinator.clock.pass_days(25)
        key = ec.generate_private_key(ec.SECP256R1())
        device.certificate = renew(coordinator, device, key).certificate
        device.key = key
    assert count(coordinator, tables.certificates) < 8


@pytest.mark.parametrize("days_after_expiry", [0.5, 15, 89])
def test_an_expired_device_is_renewed_by_its_key(
    coordinator: Door, device: Device, days_after_expiry: float
) -> None:
    enrol(coordinator, coordinator.token(), device)
    coordinator.clock.pass_days(30 + days_after_expiry)
    assert renew(coordinator, device, ec.generate_private_key(ec.SECP256R1())).device == device.id


def test_after_ninety_days_more_it_must_enrol_again(coordinator: Door, device: Device) -> None:
    enrol(coordinator, coordinator.token(), device)
    coordinator.clock.pass_days(121)
    with refused("expired"):
        renew(coordinator, device, ec.generate_private_key(ec.SECP256R1()))


def test_a_coordinator_whose_clock_was_far_ahead_locks_nobody_out(coordinator: Door, device: Device) -> None:
    enrol(coordinator, coordinator.token(), device)
    coordinator.clock.pass_days(45)
    key = ec.generate_private_key(ec.SECP256R1())
    device.certificate, device.key = renew(coordinator, device, key).certificate, key
    coordinator.clock.pass_days(-45)
    shown = x509.load_pem_x509_certificate(device.certificate.encode())
    with refused("not_yet_valid"):
        coordinator.services.authority.verify(shown, coordinator.clock())
    for next_key in (ec.generate_private_key(ec.SECP256R1()), key):
        renewed = x509.load_pem_x509_certificate(renew(coordinator, device, next_key).certificate.encode())
        assert coordinator.services.authority.verify(renewed, coordinator.clock()) == device.id


def test_renewal_needs_the_old_key(coordinator: Door, device: Device, tmp_path: Path) -> None:
    enrol(coordinator, coordinator.token(), device)
    thief, key = Device(tmp_path), ec.generate_private_key(ec.SECP256R1())
    thief.certificate = device.certificate
    for changed in ({}, {"proof": "no base64"}, {"proof": ""}, {"proof": device.renewal(thief.key)["proof"]}):
        with refused("bad_proof"):
            renew(coordinator, thief, key, **changed)


def test_renewal_is_refused_to_the_revoked_and_to_those_who_left(coordinator: Door, tmp_path: Path) -> None:
    for end, code in ((enrolment.revoke, "revoked"), (enrolment.leave, "unknown_device")):
        device = Device(tmp_path)
        enrol(coordinator, coordinator.token(), device)
        change(coordinator, end, device.id)
        with refused(code):
            renew(coordinator, device, ec.generate_private_key(ec.SECP256R1()))


def test_a_certificate_of_another_coordinator_is_not_renewed(
    coordinator: Door, device: Device, tmp_path: Path, database: Database
) -> None:
    other = door(tmp_path / "other", database)
    enrol(other, other.token(), device)
    with refused("foreign_certificate"):
        renew(coordinator, device, ec.generate_private_key(ec.SECP256R1()))


def test_no_two_devices_share_a_key(coordinator: Door, tmp_path: Path) -> None:
    one, two = Device(tmp_path), Device(tmp_path)
    for each in (one, two):
        enrol(coordinator, coordinator.token(), each)
    with refused("bad_csr"):
        renew(coordinator, one, two.key)
    key = ec.generate_private_key(ec.SECP256R1())
    renew(coordinator, one, key)
    with refused("bad_csr"):
        renew(coordinator, two, key)
    third = Device(tmp_path)
    third.key = key
    with refused("bad_csr"):
        enrol(coordinator, coordinator.token(), third)


def test_revoking_twice_is_reported_once(coordinator: Door, device: Device) -> None:
    enrol(coordinator, coordinator.token(), device)
    for _ in range(2):
        assert change(coordinator, enrolment.revoke, device.id).state == "revoked"
    assert events(coordinator).count("device_revoked") == 1
    with refused("not_found"):
        change(coordinator, enrolment.revoke, "nobody")


def test_devices_are_listed_by_page_state_group_and_name(coordinator: Door, tmp_path: Path) -> None:
    for number in range(7):
        group = "north" if number < 4 else "south"
        enrol(coordinator, coordinator.token(group=group), Device(tmp_path, f"100%_{number}"))
    read = coordinator.services.database.read
    everyone = read(lambda at: devices.listed(at, 100))
    assert [row.id for row in everyone] == sorted(row.id for row in everyone)
    assert read(lambda at: devices.listed(at, 3, after=everyone[2].id)) == everyone[3:6]
    assert len(read(lambda at: devices.listed(at, 100, group="south"))) == 3
    change(coordinator, enrolment.revoke, everyone[0].id)
    assert [row.id for row in read(lambda at: devices.listed(at, 100, state="revoked"))] == [everyone[0].id]
    assert [row.name for row in read(lambda at: devices.listed(at, 100, called="100%_3"))] == ["100%_3"]
    assert read(lambda at: devices.listed(at, 100, called=everyone[4].id[:13].upper())) == [everyone[4]]
    assert read(lambda at: devices.listed(at, 100, called="%")) == []
