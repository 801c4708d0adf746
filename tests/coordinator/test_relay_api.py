"""Relays at the device API over real TLS: for whom they may speak, and a round whose updates stay at one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.accounts import enrolment
from coordinator.db.migrations import migrate
from coordinator.db.store import Database
from coordinator.errors import Refusal
from edge_client.wire.relays import ON_BEHALF
from tests.support.doorway import Device, Door, error_of, open_door

PASSED = (422, "malformed")
"""A check-in whose sender is known is refused for its empty body only."""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    url = f"sqlite:///{tmp_path_factory.mktemp('database')}/fedloop.db"
    migrate(url)
    home = tmp_path_factory.mktemp("home")
    with (
        closing(Database(url)) as database,
        open_door(home, database, names=("localhost", "fed.example")) as at,
    ):
        yield at


@dataclass
class Site:
    """A relay, and its devices."""

    door: Door
    folder: Path
    relay: Device

    def device(self, name: str = "gateway") -> Device:
        made = Device(self.folder, name)
        assert self.door.enrol(made, self.door.token(relay=self.relay.id)).is_success
        return made


@pytest.fixture
def site(door: Door, tmp_path: Path) -> Site:
    relay = Device(tmp_path, "relay")
    assert door.enrol(relay, door.token(relay_names=["localhost"])).is_success
    return Site(door, tmp_path, relay)


def for_device(at: Site, device: str, sender: Device | None = None) -> tuple[int, str]:
    """How a check-in for a device is answered that the relay, or another sender, makes."""
    return error_of(at.door.call("POST", "/checkin", {}, device=sender or at.relay, **{ON_BEHALF: device}))


def test_a_relay_speaks_for_its_own_devices_only(site: Site) -> None:
    mine, other = site.device(), Device(site.folder)
    site.door.enrol(other)
    assert for_device(site, mine.id) == PASSED
    for named in (other.id, site.relay.id, "nobody", "x" * 36):
        assert for_device(site, named) == (403, "not_yours"), named
    assert for_device(site, mine.id, sender=other) == (403, "not_yours")


def test_a_revoked_device_is_refused_through_its_relay_and_a_revoked_relay_is_no_verdict_on_its_devices(
    site: Site,
) -> None:
    mine, left = site.device(), site.device()

    def revoke(device: str) -> None:
        site.door.services.database.write(lambda at: enrolment.revoke(at, device, site.door.clock())).result()

    revoke(left.id)
    assert for_device(site, left.id) == (403, "revoked")
    revoke(site.relay.id)
    assert for_device(site, mine.id) == (503, "relay_unavailable")


def test_a_relays_certificate_is_for_the_names_of_its_token(site: Site) -> None:
    answer = site.door.call("POST", "/relay/certificate", {"csr": site.relay.csr()}, device=site.relay)
    certificate = x509.load_pem_x509_certificate(answer.json()["certificate"].encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [each.value for each in names] == ["localhost"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    mine = site.device()
    for device, headers in ((mine, {}), (site.relay, {ON_BEHALF: mine.id})):
        refused = site.door.call("POST", "/relay/certificate", {"csr": mine.csr()}, device=device, **headers)
        assert error_of(refused) == (403, "no_relay")


def test_a_device_cannot_speak_as_a_relay_of_its_own_task(site: Site) -> None:
    mine = site.device()
    for path in ("/relay/tasks/x/accepted", "/relay/tasks/x/rejected"):
        assert error_of(site.door.call("POST", path, {}, device=mine)) == (403, "no_relay")
    assert error_of(site.door.call("GET", "/relay/tasks/x", device=mine)) == (403, "no_relay")


@pytest.mark.parametrize(
    ("terms", "code", "words"),
    [
        ({"relay_names": ["fed.example"]}, "malformed", "the coordinator's own name"),
        ({"relay_names": ["no name"]}, "malformed", None),
        ({"relay_names": ["a.example"], "relay": "x"}, "malformed", "does not belong to another"),
        ({"relay": "x"}, "not_found", "there is no device 'x'"),
    ],
)
def test_a_token_for_a_relay_is_made_for_what_exists(
    site: Site, terms: dict[str, Any], code: str, words: str | None
) -> None:
    if words is None:
        terms = {"relay_names": ["ümlaut.example"]}
    with pytest.raises(Refusal, match=words or "expected a host name") as refused:
        site.door.token(**terms)
    assert refused.value.code == code
    mine = site.device()
    with pytest.raises(Refusal, match="is not a relay of this fleet"):
        site.door.token(relay=mine.id)
