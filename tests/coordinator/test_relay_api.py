"""Relays at the device API over real TLS: for whom they may speak, and a round whose updates stay at one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from sqlalchemy import Select, insert, select

from coordinator.accounts import enrolment
from coordinator.db.store import Database
from coordinator.db.tables import events, runs, tasks, updates
from coordinator.errors import Refusal
from coordinator.fleets.device_relayed import device_fleet
from coordinator.rounds import engine, plan
from coordinator.rounds.fleet import Answer, OpenRound, Silence
from coordinator.rounds.plan import RunPlan
from coordinator.scheduling.deployments import Deployment, Relaying
from edge_client.relay.certificate import ServerCertificate
from edge_client.relay.folding import CannotFold, fold
from edge_client.relay.intermediary import Intermediary
from edge_client.relay.server import RelayServer
from edge_client.relay.updates import KeptUpdates
from edge_client.relay.uploads import Uploads
from edge_client.transport.failures import ServerRefused
from edge_client.transport.link import Credentials, Link, download, parse_answer, pinned_context, upload
from edge_client.wire import arrays
from edge_client.wire.device import BlobRef, CheckInAnswer, TaskMessage, TaskOffer, UploadStart
from edge_client.wire.relays import ON_BEHALF, FoldRequest
from edge_client.wire.strict import parse_message
from strategies import presets
from strategies.relays import RelayedMeanFold, add_relays
from strategies.update import RelayPart, Update
from tests.support.databases import with_tables
from tests.support.device_world import MODEL, REPORT
from tests.support.doorway import Device, Door, error_of, key_pem, open_door
from tests.support.federation import PARAMS, run_plan, update

pytestmark = pytest.mark.slow

PASSED = (422, "malformed")
"""A check-in whose sender is known is refused for its empty body only."""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    url = f"sqlite:///{tmp_path_factory.mktemp('database')}/fedloop.db"
    with_tables(url)
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
    door.clock.now = datetime.now(UTC)  # a relay compares certificates with its own clock
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


class Round:
    """A round of three devices behind one relay, in this process: the relay's server and its folds are the real ones."""

    def __init__(
        self, site: Site, run: str, names: tuple[str, ...] = ("a", "b", "c"), **planned: Any
    ) -> None:
        self.site, self.run = site, run
        self.services = site.door.services
        self.devices = sorted((site.device(name) for name in names), key=lambda each: each.id)
        row = {"id": run, "name": run, "state": "running", "experiment": {}, "notices": [], "round": 0}
        row["created_at"] = site.door.clock()
        self.services.database.write(lambda at: at.execute(insert(runs).values(**row))).result()
        ref = BlobRef("0" * 64, 10)
        deployment = Deployment(run, run, "digits", MODEL, ("litert",), relaying=Relaying(1, "fedavg", {}))
        self.deployment = replace(deployment, artifact=ref, manifest=ref)
        self.services.deployments.add(self.deployment)
        flat = run_plan(clients_per_round=len(names), **planned)
        self.plan: RunPlan = replace(flat, strategy=add_relays(flat.strategy, 1))
        self.fleet = device_fleet(self.services, self.deployment, patience_seconds=0)
        self.model = self.fleet.model(PARAMS, {})
        made = plan.make_tasks([each.id for each in self.devices], 1, self.model.base, self.plan)
        self.opened = OpenRound(made, len(names))
        self.fleet.submit(made, self.model, engine.make_terms(self.plan, self.model, self.opened))

    def link(self, device: Device, url: str) -> Link:
        folder = self.site.folder
        (folder / f"{device.id}.crt").write_text(device.certificate)
        (folder / f"{device.id}.key").write_text(key_pem(device.key))
        shown = Credentials(folder / f"{device.id}.crt", folder / f"{device.id}.key")
        return Link(url, pinned_context(self.services.authority.ca_pem, shown))

    def send(self, device: Device, relay: RelayServer, sent: Update) -> TaskOffer:
        """What a daemon does: checks in, fetches the model, uploads; all of it at its relay."""
        with closing(self.link(device, f"https://localhost:{relay.server_address[1]}")) as link:
            offer = parse_answer(CheckInAnswer, link.post("/checkin", REPORT)).task
            assert offer is not None and offer.params is not None
            download(link, offer.params, self.site.folder / f"{device.id}.model")
            file = self.site.folder / f"{device.id}.result"
            digest = arrays.write_result(file, TaskMessage.from_json(offer.message), sent)
            size = file.stat().st_size
            assert upload(link, offer.task, file, UploadStart(size, digest, size)).accepted
        return offer

    def rows(self, query: Select[Any]) -> list[Any]:
        return self.services.database.read(lambda at: list(at.execute(query)))

    def fold(self, kept: KeptUpdates) -> None:
        """What a relay does once the round is closed."""
        with closing(self.link(self.site.relay, self.site.door.url)) as link:
            message = replace(REPORT, wire="1.4", datasets={}, runtimes={})
            while (offer := parse_answer(CheckInAnswer, link.post("/checkin", message)).task) is None:
                threading.Event().wait(0.01)
            file = self.site.folder / "folded"
            request = parse_message(FoldRequest, offer.message, "task")
            digest = fold(request, offer.task, kept, file)
            size = file.stat().st_size
            upload(link, offer.task, file, UploadStart(size, digest, size))


@pytest.fixture
def serving(site: Site) -> Iterator[tuple[RelayServer, KeptUpdates]]:
    """The relay's server."""
    folder = site.folder / "state"
    folder.mkdir()
    certificate = ServerCertificate(folder, site.door.services.authority.ca_pem)
    (site.folder / "relay.crt").write_text(site.relay.certificate)
    (site.folder / "relay.key").write_text(key_pem(site.relay.key))
    shown = Credentials(site.folder / "relay.crt", site.folder / "relay.key")
    with closing(Link(site.door.url, pinned_context(certificate.ca_pem, shown))) as link:
        certificate.renew(link)
        assert certificate.name() == "localhost"
        kept = KeptUpdates(folder / "updates")
        intermediary = Intermediary(lambda: link, folder / "blobs")
        server = RelayServer(
            ("127.0.0.1", 0), certificate.context(), intermediary, Uploads(intermediary, kept, 10**9)
        )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, kept
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_round_through_a_relay_has_the_bits_of_the_flat_mean(
    site: Site, serving: tuple[RelayServer, KeptUpdates]
) -> None:
    relay, kept = serving
    round_ = Round(site, "flat-bits")
    sent = [update({"w": PARAMS["w"]}, seed=at, num_examples=5 + at) for at in range(3)]
    for device, each in zip(reversed(round_.devices), reversed(sent), strict=True):
        round_.send(device, relay, each)
    results: list[Any] = []
    engine_thread = threading.Thread(target=lambda: results.extend(round_.fleet.results()))
    engine_thread.start()
    round_.fold(kept)
    engine_thread.join()
    *answers, part = results
    assert [type(each) for each in answers] == [Answer] * 3 and isinstance(part, RelayPart)
    relayed, flat = round_.plan.strategy.start(3), presets.get("fedavg").start(3)
    assert isinstance(relayed, RelayedMeanFold)
    relayed.add_part(part)
    for at, each in enumerate(sent):
        flat.add(at, each)
    assert relayed.finish().delta["w"].tobytes() == flat.finish().delta["w"].tobytes()


def test_what_a_device_may_not_ask_the_coordinator_it_may_not_ask_through_its_relay(
    site: Site, serving: tuple[RelayServer, KeptUpdates]
) -> None:
    relay, _ = serving
    round_ = Round(site, "paths")
    device, other = round_.devices[:2]
    with closing(round_.link(device, f"https://localhost:{relay.server_address[1]}")) as link:
        for path in ("/relay/certificate", "/relay/tasks/x/accepted", "/nothing", "/releases/../relay/x"):
            with pytest.raises(ServerRefused) as refused:
                link.post(path, {})
            assert (refused.value.status, refused.value.code) == (404, "not_found")
        with closing(round_.link(other, f"https://localhost:{relay.server_address[1]}")) as foreign:
            task = parse_answer(CheckInAnswer, foreign.post("/checkin", REPORT)).task
        assert task is not None
        with pytest.raises(ServerRefused) as refused:
            link.post(f"/tasks/{task.task}/upload", UploadStart(10, "0" * 64, 10))
        assert refused.value.code == "not_yours"


def test_an_update_that_the_relay_rejects_counts_as_rejected_with_the_reason(
    site: Site, serving: tuple[RelayServer, KeptUpdates]
) -> None:
    relay, kept = serving
    round_ = Round(site, "rejecting")
    wrong = replace(update({"w": PARAMS["w"]}), num_steps=1)
    with pytest.raises(ServerRefused) as refused:
        round_.send(round_.devices[0], relay, wrong)
    assert refused.value.code == "wrong_steps"
    query = select(tasks.c.state, tasks.c.reason).where(
        tasks.c.run == "rejecting", tasks.c.device == round_.devices[0].id
    )
    (row,) = round_.rows(query)
    assert tuple(row) == ("rejected", "wrong_steps")
    assert kept.size_bytes() == 0


def test_updates_of_such_a_run_do_not_go_past_the_relay(site: Site) -> None:
    round_ = Round(site, "past")
    with closing(round_.link(round_.devices[0], site.door.url)) as link:
        task = parse_answer(CheckInAnswer, link.post("/checkin", REPORT)).task
        assert task is not None
        with pytest.raises(ServerRefused, match="go to the device's relay"):
            link.post(f"/tasks/{task.task}/upload", UploadStart(10, "0" * 64, 10))


def test_a_relay_that_has_lost_an_update_loses_its_part_of_the_round(
    site: Site, serving: tuple[RelayServer, KeptUpdates]
) -> None:
    relay, kept = serving
    round_ = Round(site, "losing")
    for at, device in enumerate(round_.devices):
        offer = round_.send(device, relay, update({"w": PARAMS["w"]}, seed=at))
    (site.folder / "state" / "updates" / offer.task / "update").write_bytes(b"damaged")
    results: list[Any] = []
    engine_thread = threading.Thread(target=lambda: results.extend(round_.fleet.results()))
    engine_thread.start()
    with pytest.raises(CannotFold, match="it has lost the update at position 2"):
        round_.fold(kept)
    (task,) = round_.rows(select(tasks.c.id).where(tasks.c.run == "losing", tasks.c.kind == "fold"))
    with closing(round_.link(site.relay, site.door.url)) as link:
        link.post(f"/tasks/{task.id}/decline", {"code": "failed", "words": "it has lost an update"})
    engine_thread.join()
    words = "relay relay did not pass it on: it has lost an update"
    assert [(type(each), each.reason) for each in results] == [(Silence, words)] * 3
    assert round_.rows(select(updates.c.device).where(updates.c.run == "losing")) == []
    told = select(events).where(events.c.run == "losing", events.c.event == "relay_absent")
    (absent,) = round_.rows(told)
    assert (absent.device, absent._mapping["values"]["updates"]) == (site.relay.id, 3)
