"""Secure aggregation over the device API: the engine gets the sum, and what breaks the protocol is refused."""

from __future__ import annotations

import base64
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.fleets.secure.device import SecureDeviceFleet
from coordinator.rounds import intake, plan
from coordinator.rounds.closing import Closing
from coordinator.rounds.fleet import Answer, BlockSum, Measured, Result, Silence, Stopped, Terms
from coordinator.rounds.plan import LocalWork, RunPlan
from coordinator.scheduling.deployments import SecureSums
from edge_client.transport.signatures import DeviceKeys, sign
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage, TaskOffer
from edge_client.wire.secure import SecureTask
from strategies import presets, summation
from strategies.params import Params
from strategies.secagg.client import Client
from strategies.strategy import ClipNorm
from strategies.update import Update
from tests.support.databases import database, database_url
from tests.support.device_client import csr
from tests.support.device_world import Refused, TestDevice, World, serving

pytestmark = pytest.mark.slow

__all__ = ["database", "database_url"]

PARAMS: Params = {"w": np.linspace(-1, 1, 300, dtype=np.float32)}
NAMES = ("ada", "bob", "eve", "kim", "lee", "mia")
SUMS = SecureSums(seed=7, clip_norm=2.0, group_size=6, threshold=2 / 3, value_bits=28)


class Taking:
    """A device that takes part, one step after the other."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.name, self.world = name, world
        self.device: TestDevice = world.enrol(name)
        self.key = ec.generate_private_key(ec.SECP256R1())
        request = x509.load_pem_x509_csr(csr(self.key).encode())
        issued = world.services.authority.issue_device(request, name, world.clock())
        self.certificate = issued.public_bytes(serialization.Encoding.PEM).decode()
        rng = np.random.default_rng(number)
        self.update = Update({"w": rng.normal(0, 0.3, 300).astype(np.float32)}, 10 + number, 1, 0.5)
        self.device.check_in()
        self.got = 0

    def begin(self) -> None:
        self.offer: TaskOffer = self.device.lease()
        message = TaskMessage.from_json(self.offer.message)
        task = SecureTask.of(message)
        assert task is not None
        vector = task.vector({"w": (300,)})
        self.residues = vector.encode(self.update, np.random.default_rng(1))
        self.keys = DeviceKeys(self.world.services.authority.certificate)
        terms = task.terms(self.offer.run, message.round, message.base, vector)
        self.client = Client(
            terms, self.name, lambda content: sign(self.key, content), self.keys.verify, os.urandom
        )

    def post(self, stage: str, body: bytes = b"", **more: Any) -> Any:
        encoded = base64.b64encode(body).decode()
        return self.device._post(
            f"/tasks/{self.offer.task}/secure", {"stage": stage, "message": encoded, **more}
        )

    def exchange(self, stage: str, body: bytes = b"", **more: Any) -> bytes:
        """The answer once there is one."""
        while (answer := self.post(stage, body, wait_seconds=5.0, **more))["message"] is None:
            pass
        for device, pem in answer["certificates"].items():
            self.keys.add(device, pem)
        message = base64.b64decode(answer["message"])
        self.got += len(message)
        return message

    def share(self) -> bytes:
        """Takes part up to the shares; returns the masked update."""
        self.begin()
        listed = self.exchange("keys", self.client.advertise_keys(), certificate=self.certificate)
        shares = self.exchange("shares", self.client.share_keys(listed))
        return self.client.mask_input(shares, self.residues)

    def finish(self) -> None:
        survivors = self.exchange("input")
        confirmations = self.exchange("confirmation", self.client.confirm_survivors(survivors))
        self.exchange("reveal", self.client.reveal_shares(confirmations))

    def take_part(self) -> None:
        masked = self.share()
        assert self.device.upload(self.offer.task, masked).accepted
        self.finish()


class Round:
    """A round of run `r` whose devices are one group."""

    def __init__(self, world: World, names: Sequence[str] = NAMES) -> None:
        self.world = world
        self.devices = {name: Taking(world, name, number) for number, name in enumerate(names)}
        self.fleet = self.make_fleet(world.start_run("r", secure=SUMS))
        strategy = presets.get("fedavg")
        self.run_plan = RunPlan(
            7, 3, strategy, LocalWork(4, 0.1, None, 1), ("w",), Closing(len(names)), outlier_factor=0.0
        )
        self.terms = Terms(
            intake.make_expected(PARAMS, {}, 1000, 12),
            Closing(len(names), 600),
            len(names),
            summation.of(strategy),
        )
        self.submit(self.fleet)
        self._results: queue.Queue[list[Result] | BaseException] = queue.Queue()

    def make_fleet(self, deployment: Any) -> SecureDeviceFleet:
        return SecureDeviceFleet(self.world.services, deployment, SUMS, patience_seconds=0)

    def submit(self, fleet: SecureDeviceFleet) -> None:
        model = fleet.model(PARAMS, {})
        there = fleet.find_open_round(1)
        tasks = there.tasks if there else plan.make_tasks(tuple(self.devices), 1, model.base, self.run_plan)
        fleet.submit(tasks, model, self.terms)

    def play(self, fleet: SecureDeviceFleet | None = None) -> None:
        """The thread of the run begins to collect results."""
        played = fleet or self.fleet

        def collect() -> None:
            try:
                self._results.put(list(played.results()))
            except BaseException as error:
                self._results.put(error)

        threading.Thread(target=collect, daemon=True).start()

    def results(self) -> list[Result]:
        found = self._results.get(timeout=60)
        if isinstance(found, BaseException):
            raise found
        return found

    def each(self, act: Any, names: Sequence[str]) -> None:
        """Has these devices do something at the same time."""
        failed: list[BaseException] = []

        def run(name: str) -> None:
            try:
                act(self.devices[name])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if failed:
            raise failed[0]

    def expected_sum(self, names: Sequence[str]) -> Any:
        """The sum of these devices' clipped updates, weighted by their examples, up to the limit of 12."""
        clip = ClipNorm(SUMS.clip_norm)
        updates = {name: self.devices[name].update for name in names}
        return sum(
            min(each.num_examples, 12) * np.asarray(clip.apply(each, {})[0].delta["w"], np.float64)
            for each in updates.values()
        )


@pytest.fixture
def world(tmp_path: Path, database: Any) -> Iterator[World]:
    # Devices report 100 examples each.
    with serving(tmp_path, database, certificates=True) as made:
        yield made


def sum_of(results: Sequence[Result]) -> BlockSum:
    (found,) = [each for each in results if isinstance(each, BlockSum)]
    return found


def accepted(results: Sequence[Result]) -> list[str]:
    answers = [each for each in results if isinstance(each, Answer)]
    assert all(isinstance(each.verdict, Measured) and each.verdict.norm == 0 for each in answers)
    return sorted(each.task.message.client for each in answers)


def silent(results: Sequence[Result]) -> dict[str, str]:
    return {each.task.message.client: each.reason for each in results if isinstance(each, Silence)}


def check_sum(made: Round, results: Sequence[Result], names: Sequence[str]) -> None:
    assert accepted(results) == sorted(names)
    found = sum_of(results).partial
    np.testing.assert_allclose(found.delta["w"], made.expected_sum(names), rtol=0, atol=1e-5)
    assert found.weight == sum(min(made.devices[name].update.num_examples, 12) for name in names)


def test_the_engine_gets_the_sum_of_all_and_no_update(world: World) -> None:
    made = Round(world)
    made.play()
    made.each(Taking.take_part, NAMES)
    results = made.results()
    check_sum(made, results, NAMES)
    assert not silent(results)
    answers = {each.task.message.client: each for each in results if isinstance(each, Answer)}
    assert {name: each.received_bytes for name, each in answers.items()} == {
        name: each.got for name, each in made.devices.items()
    }
    blobs = {path.read_bytes()[:4] for path in (world.services.settings.home / "blobs").iterdir()}
    assert len(blobs) == 2 and b"FSA1" in blobs  # the params, and masked updates


def test_a_device_that_leaves_at_either_place_is_left_behind(world: World) -> None:
    """One after its secrets are shared, one after its masked update counts: both say so, so that nobody waits for a lease."""
    made = Round(world)
    made.play()

    def take_part(device: Taking) -> None:
        masked = device.share()
        if device.name != "ada":
            assert device.device.upload(device.offer.task, masked).accepted
        if device.name in ("ada", "bob"):
            device.device.decline(device.offer.task, "failed", "it was restarted")
        else:
            device.finish()

    made.each(take_part, NAMES)
    results = made.results()
    check_sum(made, results, NAMES[1:])
    assert silent(results) == {"ada": "it was restarted"}


def test_a_device_that_is_silent_has_dropped_out_when_its_time_is_over(world: World) -> None:
    made = Round(world)
    made.play()
    gone, confirmed = threading.Barrier(len(NAMES)), threading.Barrier(len(NAMES) - 1)

    def take_part(device: Taking) -> None:
        masked = device.share()
        if device.name == "ada":
            gone.wait()
            return
        assert device.device.upload(device.offer.task, masked).accepted
        gone.wait()
        if device.name == "bob":
            world.clock.pass_seconds(world.services.settings.lease_seconds + 1)
            world.services.signals.notify("run:r")
        survivors = device.exchange("input")
        if device.name == "eve":
            confirmed.wait()
            world.clock.pass_seconds(world.services.settings.lease_seconds + 1)
            world.services.signals.notify("run:r")
            return
        signed = device.client.confirm_survivors(survivors)
        device.post("confirmation", signed)
        confirmed.wait()
        confirmations = device.exchange("confirmation", signed)
        device.exchange("reveal", device.client.reveal_shares(confirmations))

    made.each(take_part, NAMES)
    results = made.results()
    check_sum(made, results, NAMES[1:])
    assert silent(results) == {"ada": "it was silent for longer than its lease"}


def test_below_the_threshold_there_is_no_sum_and_the_devices_are_told(world: World) -> None:
    made = Round(world)
    made.play()
    stayed: list[str] = []

    def take_part(device: Taking) -> None:
        device.begin()
        if device.name in NAMES[:3]:
            device.device.decline(device.offer.task, "failed", "no rows")
            return
        with pytest.raises(Refused) as refused:
            device.exchange("keys", device.client.advertise_keys(), certificate=device.certificate)
        assert refused.value.code in ("secure_ended", "round_closed") and "3 of 6" in str(refused.value)
        stayed.append(device.name)

    made.each(take_part, NAMES)
    results = made.results()
    assert not [each for each in results if isinstance(each, BlockSum | Answer)]
    assert len(silent(results)) == 6 and sorted(stayed) == sorted(NAMES[3:])


def test_two_devices_have_no_sum_and_are_told_at_once(world: World) -> None:
    made = Round(world, NAMES[:2])
    made.play()
    assert set(silent(made.results()).values()) == {"its group has no sum: 2 clients, expected 3 or more"}
    assert made.devices["ada"].device.check_in().task is None


def test_a_fleet_that_is_made_anew_goes_on_from_the_rows(world: World) -> None:
    made = Round(world)
    made.play()
    masked: dict[str, bytes] = {}
    made.each(lambda device: masked.update({device.name: device.share()}), NAMES)
    made.fleet.stop()
    with pytest.raises(Stopped):
        made.results()
    again = made.make_fleet(next(iter(world.services.deployments.active())))
    made.submit(again)
    made.play(again)

    def go_on(device: Taking) -> None:
        assert device.device.upload(device.offer.task, masked[device.name]).accepted
        device.finish()

    made.each(go_on, NAMES)
    check_sum(made, made.results(), NAMES)
    assert sum_of(list(again.results())).partial.weight == sum_of(list(again.results())).partial.weight


class TestRefused:
    """What a device, or somebody in its place, tries."""

    @pytest.fixture
    def made(self, world: World) -> Round:
        made = Round(world)
        for device in made.devices.values():
            device.begin()
        return made

    def test_another_devices_certificate(self, made: Round) -> None:
        ada, bob = made.devices["ada"], made.devices["bob"]
        with pytest.raises(Refused) as refused:
            ada.post("keys", ada.client.advertise_keys(), certificate=bob.certificate)
        assert refused.value.code == "foreign_identity"

    def test_keys_without_a_certificate(self, made: Round) -> None:
        ada = made.devices["ada"]
        with pytest.raises(Refused) as refused:
            ada.post("keys", ada.client.advertise_keys())
        assert refused.value.code == "malformed"

    def test_a_later_stage_first(self, made: Round) -> None:
        with pytest.raises(Refused) as refused:
            made.devices["ada"].post("shares", b"x")
        assert refused.value.code == "secure_stage"

    def test_another_devices_task(self, made: Round) -> None:
        ada, bob = made.devices["ada"], made.devices["bob"]
        ada.offer = bob.offer
        with pytest.raises(Refused) as refused:
            ada.post("keys", ada.client.advertise_keys(), certificate=ada.certificate)
        assert refused.value.code == "not_yours"

    def test_an_update_in_the_open(self, made: Round) -> None:
        ada = made.devices["ada"]
        message = TaskMessage.from_json(ada.offer.message)
        with pytest.raises(Refused) as refused:
            ada.device.upload(ada.offer.task, encode_result(message, ada.update))
        assert refused.value.code in ("malformed", "oversized")

    def test_a_masked_update_before_the_shares(self, made: Round) -> None:
        ada = made.devices["ada"]
        with pytest.raises(Refused) as refused:
            ada.device.upload(ada.offer.task, b"FSA1\x04" + bytes(100))
        assert refused.value.code == "secure_refused"

    def test_a_second_message_of_a_stage(self, made: Round) -> None:
        made.play()
        other: list[Refused] = []

        def take_part(device: Taking) -> None:
            listed = device.exchange("keys", device.client.advertise_keys(), certificate=device.certificate)
            shares = device.client.share_keys(listed)
            device.post("shares", shares)
            if device.name == "ada":
                with pytest.raises(Refused) as refused:
                    device.post("shares", shares[:-1] + b"x")
                other.append(refused.value)
            masked = device.client.mask_input(device.exchange("shares", shares), device.residues)
            assert device.device.upload(device.offer.task, masked).accepted
            device.finish()

        made.each(take_part, NAMES)
        check_sum(made, made.results(), NAMES)
        assert other[0].code in ("duplicate", "secure_refused")

    def test_keys_that_the_device_has_not_signed(self, made: Round) -> None:
        """The server of the group refuses them, tells the device why, and goes on without it."""
        made.play()
        told: list[str] = []

        def take_part(device: Taking) -> None:
            if device.name != "ada":
                listed = device.exchange(
                    "keys", device.client.advertise_keys(), certificate=device.certificate
                )
                shares = device.exchange("shares", device.client.share_keys(listed))
                masked = device.client.mask_input(shares, device.residues)
                assert device.device.upload(device.offer.task, masked).accepted
                device.finish()
                return
            keys = bytearray(device.client.advertise_keys())
            keys[30] ^= 1  # within the first public key
            with pytest.raises(Refused) as refused:
                device.exchange("keys", bytes(keys), certificate=device.certificate)
            told.append(str(refused.value))

        made.each(take_part, NAMES)
        device = made.devices["ada"]
        device.device.decline(device.offer.task, "failed", "it was refused")
        check_sum(made, made.results(), NAMES[1:])
        assert "not signed" in told[0]
