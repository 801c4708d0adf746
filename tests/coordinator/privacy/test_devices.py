"""Differential privacy on devices: what the ledger in the database holds, what it refuses, and what the operator API says of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import insert

import fedloop
from coordinator.context.services import Services
from coordinator.db import events, privacy, rounds
from coordinator.db import runs as rows
from coordinator.db.rounds import RoundRow
from coordinator.db.tables import devices
from coordinator.errors import UserError
from coordinator.fleets.device import DeviceFleet
from coordinator.privacy.mechanism import Mechanism
from coordinator.reports import run_report
from coordinator.rounds.closing import Closing
from coordinator.rounds.fleet import Model, Terms
from coordinator.rounds.plan import Task
from coordinator.rounds.private_round import Release
from coordinator.runs.privacy.devices import DeviceLedger, noise_in_sums
from coordinator.runs.service import RunService
from edge_client.relay.expected import Expected
from edge_client.wire import arrays
from edge_client.wire.device import CheckIn, TaskMessage, to_json
from edge_client.wire.privacy import NoiseTask
from strategies.params import Params, l2_norm
from strategies.privacy.noise.distributed import GroupNoise
from strategies.update import Aggregate, Update
from tests.support.databases import database_url
from tests.support.device_world import START, serving, sqlite
from tests.support.fake_devices import DEVICES, FakeDevices, FleetOf, answering
from tests.support.people import add_user, app_of, bearer, token_of
from tests.support.services import services_in

__all__ = ["database_url"]

LONG_SECONDS = 600.0
PRIVACY: dict[str, Any] = {"mechanism": "central", "clip_norm": 0.1, "noise_multiplier": 1.0}
MECHANISM = {
    "noise_multiplier": 1.0,
    "sampling": "none",
    "cohort": 3,
    "clients": 3,
    "rounds": 9,
    "delta": 1e-5,
    "accountant": "pld",
}


def experiment(rounds_: int, table: Mapping[str, Any] = PRIVACY) -> dict[str, Any]:
    return {
        "model": {"name": "logreg"},
        "data": {"dataset": "vibration", "input_shape": [8], "classes": 3},
        "federation": {"rounds": rounds_, "clients": 3, "clients_per_round": 3, "runtimes": {"torch": 1.0}},
        "local": {"epochs": 1, "batch_size": 32},
        "privacy": dict(table),
    }


def carry(services: Services, document: Mapping[str, Any], fleet_of: FleetOf = answering) -> Any:
    """The row of a run that was carried through over devices that are enrolled."""
    enrol(services, DEVICES)
    service = RunService(services, fleet_of)
    run = service.create(document)
    assert service.join(run, LONG_SECONDS)
    return services.database.read(partial(rows.find, run=run))


def enrol(services: Services, names: Sequence[str]) -> None:
    report = to_json(CheckIn("1.4", "test", {"torch": "2"}, 0, datasets={"vibration": 40}))
    known = {"device_group": "default", "state": "active", "enrolled_at": START, "report": report}
    at = [
        {"id": name, "name": name, "key_sha256": hashlib.sha256(name.encode()).hexdigest(), **known}
        for name in names
        if services.database.read(
            lambda at, name=name: at.execute(devices.select().where(devices.c.id == name)).first()
        )
        is None
    ]
    if at:
        services.commit(lambda connection: connection.execute(insert(devices), at))


def report_of(services: Services, run: str) -> dict[str, Any]:
    return services.database.read(lambda at: run_report.make_report(at, rows.require(at, run)))


def spent(rounds_: int, **changed: Any) -> float:
    asked = {"noise_multiplier": 1.0, "cohort": 3, "clients": 3, "sampling": "none"} | changed
    return fedloop.epsilon(rounds=rounds_, **asked).epsilon


@pytest.mark.slow
def test_runs_on_the_same_devices_compose_as_one(tmp_path: Path, database_url: str) -> None:
    with services_in(tmp_path / "home", database_url) as services:
        first, second = (carry(services, experiment(number)) for number in (2, 3))
        assert (first.state, first.error, second.state) == ("finished", None, "finished")
        assert first.params != second.params
        assert not any("earlier" in notice for notice in first.notices)
        (notice,) = [each for each in second.notices if each.startswith("privacy: ")]
        assert f"1 earlier run on 'vibration' may have spent epsilon {spent(2):.4g} of a device" in notice
        assert f"with all rounds of this one it may be {spent(5):.4g} (delta 1e-05)" in notice
        operator = bearer(app_of(services), token_of(services, add_user(services, "viewer")))
        shown = get(operator, f"/runs/{first.id}/privacy")
        assert (shown["rounds"], shown["rounds_left"], shown["epsilon"]) == (2, 0, pytest.approx(spent(2)))
        assert (shown["devices"], shown["adjacency"], shown["sampling"]) == (3, "replace_by_zero", "none")
        assert "nothing is claimed of how rounds get their clients" in shown["assumptions"]
        assert any("operating system's random numbers" in each for each in shown["assumptions"])
        assert any("statistics rounds" in each for each in shown["outside"])
        across = shown["across_runs"]
        assert across["epsilon"] == pytest.approx(spent(5)) and across["epsilon"] < spent(2) + spent(3)
        assert [(each["run"], each["rounds"]) for each in across["runs"]] == [(first.id, 2), (second.id, 3)]
        page = get(operator, f"/runs/{second.id}/privacy/devices?limit=2")
        assert [each["device"] for each in page["devices"]] == ["ada", "bob"] and page["next"] == "bob"
        (last,) = get(operator, f"/runs/{second.id}/privacy/devices?after=bob")["devices"]
        assert (last["rounds"], last["first_round"], last["last_round"]) == (3, 1, 3)
        assert last["epsilon"] == pytest.approx(spent(3), rel=1e-6)
        listed = get(operator, "/privacy/runs?limit=1")
        assert [each["run"] for each in listed["runs"]] == [second.id] and listed["next"] == second.id
        rest = get(operator, f"/privacy/runs?before={second.id}")
        (older,) = rest["runs"]
        assert (older["run"], older["state"], older["mechanism"]) == (first.id, "finished", "central")
        assert rest["next"] is None and older["budget"] is None and not older["ended_by_budget"]
        assert all(
            older[key] == shown[key] for key in ("epsilon", "delta", "rounds", "rounds_left", "charged_at")
        )
        device = get(operator, "/devices/eve/privacy")
        assert device["epsilon"] == last["epsilon_across_runs"] == pytest.approx(spent(5))
        assert [each["run"] for each in device["runs"]] == [second.id, first.id]
        assert "in 2 runs" in device["in_words"]
        # The report says the same, in the part that simulations have.
        assert report_of(services, first.id)["privacy"]["in_words"] == shown["in_words"]


def get(client: TestClient, path: str) -> Any:
    answer = client.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
def test_a_round_that_would_overspend_does_not_begin(tmp_path: Path) -> None:
    budget = spent(2) + 0.01
    with services_in(tmp_path / "home") as services:
        run = carry(services, experiment(4, {**PRIVACY, "budget": budget}))
        assert (run.state, run.round, run.error) == ("finished", 2, None)
        told = services.database.read(lambda at: events.since(at, 0, 1000, run.id))
        (ended,) = [each for each in told if each.event == "privacy_budget_spent"]
        assert ended.values == {"round": 2, "epsilon": pytest.approx(spent(2)), "budget": budget}
        operator = bearer(app_of(services), token_of(services, add_user(services, "viewer")))
        (listed,) = get(operator, "/privacy/runs")["runs"]
        assert listed["ended_by_budget"] and (listed["rounds"], listed["rounds_left"]) == (2, 0)
        assert (listed["rounds_planned"], listed["budget"]) == (4, budget)
        said = report_of(services, run.id)["privacy"]
        assert said["ended_by_budget"] and (said["rounds"], said["rounds_left"]) == (2, 0)
        refused = carry(services, experiment(4, {**PRIVACY, "budget": 0.1}))
        assert refused.state == "failed" and "does not suffice for one round" in refused.error
        refused = carry(services, experiment(4, {**PRIVACY, "delta": 0.4}))
        assert refused.state == "failed" and "privacy.delta = 0.4 is not below" in refused.error


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    [
        {"sampling": "poisson", "clipping": "adaptive"},
        {"mechanism": "ftrl", "minimum_separation": 1},
        {"mechanism": "ftrl", "minimum_separation": 1, "noise": "tree"},
    ],
    ids=["poisson, adaptive", "banded", "tree"],
)
def test_every_mechanism_trains_and_no_seed_tells_its_noise(tmp_path: Path, table: dict[str, Any]) -> None:
    document = experiment(2, {**PRIVACY, **table})
    with services_in(tmp_path / "home") as services:
        one, other = carry(services, document), carry(services, document)
        assert (one.state, one.error, one.round) == ("finished", None, 2)
        assert one.params != other.params  # of equal updates
        said = report_of(services, one.id)["privacy"]
        assert said["epsilon"] > 0 and said["rounds"] == 2
        known = services.database.read(partial(privacy.spent_by, names=DEVICES))
        assert {(each.run, each.device): each.rounds for each in known} == {
            (run.id, device): 2 for run in (one, other) for device in DEVICES
        }
        assert not list((services.settings.home / "privacy-keys").glob("*"))


BY_DEVICES: dict[str, dict[str, Any]] = {
    "local": {},
    "example": {"clip_norm": 1.0},
    "distributed": {"secure_aggregation": True, "group_size": 3},
}


class Recording(FakeDevices):
    """Keeps the messages of its tasks."""

    messages: list[TaskMessage]

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        type(self).messages.extend(task.message for task in tasks)
        super().submit(tasks, model, terms)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", BY_DEVICES)
def test_tasks_carry_the_noise_that_the_ledger_accounts_for(tmp_path: Path, mechanism: str) -> None:
    Recording.messages = []
    document = experiment(
        4, {**PRIVACY, "mechanism": mechanism, "minimum_separation": 2} | BY_DEVICES[mechanism]
    )
    with services_in(tmp_path / "home") as services:
        run = carry(services, document, lambda *given: Recording(*given[:2]))
        assert (run.state, run.error, run.round) == ("finished", None, 4)
        found = services.database.read(partial(privacy.find, run=run.id))
        assert found is not None and found.released is None
        planned = Mechanism.of_json(found.mechanism)
        # 4 rounds, two of them apart, are two of a device.
        expected = {
            "local": spent(2, noise_multiplier=0.5),
            # 40 rows in batches of 32: two steps an epoch
            "example": spent(4, cohort=32, clients=40, sampling="poisson"),
            "distributed": spent(2, accountant="rdp"),
        }[mechanism]
        assert found.epsilon == pytest.approx(expected, rel=0.02 if mechanism == "distributed" else 1e-5)
        assert found.epsilon >= expected - 1e-5 and planned.hides == (
            "row" if mechanism == "example" else "device"
        )
        (noise,) = {json.dumps(each.noise) for each in Recording.messages}
        if mechanism == "distributed":
            assert noise == "null"
            assert noise_in_sums(services, run.id) == GroupNoise("skellam", 0.1, 1.0, 16, 0.67)
        else:
            sent = NoiseTask.of(Recording.messages[0])
            assert sent is not None and (sent.mechanism, sent.noise_multiplier) == (mechanism, 1.0)
            assert sent.covers(40, 2) == (mechanism == "example") and not sent.covers(39, 2)
        assert {each.clip_norm for each in Recording.messages} == {0.0}
        known = services.database.read(partial(privacy.spent_by, names=DEVICES))
        assert {each.device: each.rounds for each in known} == dict.fromkeys(DEVICES, 4)
        said = report_of(services, run.id)["privacy"]
        assert not any("must be trusted" in each for each in said["outside"])
        assert any("adds" in each for each in said["assumptions"])


@pytest.mark.slow
def test_runs_that_hide_rows_do_not_add_up_with_those_that_hide_devices(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        central = carry(services, experiment(2))
        rows_ = carry(services, experiment(1, {**PRIVACY, "mechanism": "example"}))
        local = carry(services, experiment(2, {**PRIVACY, "mechanism": "local"}))
        operator = bearer(app_of(services), token_of(services, add_user(services, "viewer")))
        device = get(operator, "/devices/eve/privacy")
        # Two rounds of noise 1, and two of half of it.
        together = spent(1, noise_multiplier=(2 / 1 + 2 / 0.25) ** -0.5)
        assert device["epsilon"] == pytest.approx(together, rel=1e-5)
        assert device["of_rows"]["runs"] == 1
        assert device["of_rows"]["epsilon"] == pytest.approx(rows_of(services, rows_.id).epsilon, rel=1e-5)
        assert "any one row of any one device" in device["in_words"]
        across = get(operator, f"/runs/{local.id}/privacy")["across_runs"]
        assert [each["run"] for each in across["runs"]] == [central.id, local.id]
        distributed = {**PRIVACY, "mechanism": "distributed"} | BY_DEVICES["distributed"]
        last = carry(services, experiment(1, distributed))
        across = get(operator, f"/runs/{last.id}/privacy")["across_runs"]
        alone = get(operator, f"/runs/{last.id}/privacy")["epsilon"]
        assert max(together, alone) < across["epsilon"] < together + alone
        (notice,) = [each for each in last.notices if each.startswith("privacy: ")]
        assert "2 earlier runs" in notice


def rows_of(services: Services, run: str) -> privacy.LedgerRow:
    found = services.database.read(partial(privacy.find, run=run))
    assert found is not None
    return found


@pytest.mark.slow
def test_dp_sgd_on_devices_needs_to_know_their_rows(tmp_path: Path) -> None:
    document = experiment(1, {**PRIVACY, "mechanism": "example"})
    document["data"]["dataset"] = "unknown"
    with services_in(tmp_path / "home") as services:
        run = carry(services, document)
        assert run.state == "failed" and "none has said so of 'unknown'" in run.error


class Steep(FakeDevices):
    """Devices that do not clip, and claim any number of examples."""

    def _update(self, task: Task) -> Update:
        update = super()._update(task)
        delta = {name: value * np.float32(1e6) for name, value in update.delta.items()}
        return replace(update, delta=delta, num_examples=2**40)


@pytest.mark.slow
def test_a_device_that_does_not_clip_moves_the_model_no_further_than_the_norm(tmp_path: Path) -> None:
    little = {**PRIVACY, "noise_multiplier": 0.05, "clip_norm": 0.01}
    with services_in(tmp_path / "home") as services:
        steep = carry(services, experiment(1, little), lambda *given: Steep(*given[:2]))
        still = carry(services, experiment(1, {**little, "clip_norm": 1e-9}))
        models = [
            arrays.decode(services.blobs.require_intact(run.params).read_bytes()) for run in (steep, still)
        ]
        moved = l2_norm({name: value - models[1][name] for name, value in models[0].items()})
        # 27 values with noise of 0.05 · 0.01 / 3 each
        assert 0.001 < moved <= 0.01 + 6 * 27**0.5 * 0.05 * 0.01 / 3


class Losing(FakeDevices):
    """Ends the run in round 2, once its noise is drawn and its model is out for evaluation."""

    def model(self, params: Any, streams: Any) -> Any:
        ledger = self._services.database.read(partial(privacy.find, run=self.deployment.run))
        if ledger is not None and ledger.released is not None and ledger.released["round"] == 2:
            raise UserError("the run is ended here")
        return super().model(params, streams)


@pytest.mark.slow
def test_a_failed_run_goes_on_with_the_noise_that_it_had_drawn(tmp_path: Path) -> None:
    document = experiment(2) | {"devices": {"evaluate_every": 1}}
    with services_in(tmp_path / "home") as services:
        failed = carry(services, document, lambda *given: Losing(*given[:2]))
        assert (failed.state, failed.round, failed.error) == ("failed", 1, "the run is ended here")
        ledger = services.database.read(partial(privacy.find, run=failed.id))
        assert ledger is not None and ledger.released is not None
        kept = arrays.decode(services.blobs.require_intact(ledger.released["blob"]).read_bytes())
        before = arrays.decode(services.blobs.require_intact(failed.params).read_bytes())
        service = RunService(services, answering)
        service.resume(failed.id)
        assert service.join(failed.id, LONG_SECONDS)
        again = services.database.read(partial(rows.find, run=failed.id))
        assert again.state == "finished", again.error
        after = arrays.decode(services.blobs.require_intact(again.params).read_bytes())
        for name, value in after.items():
            assert np.array_equal(value, before[name] + kept[name])
        records = services.database.read(partial(rows.records, run=failed.id))
        assert [(each["round"], each["accepted"]) for each in records] == [(1, 3), (2, 3)]
        assert privacy_of(services, failed.id) == (2, None)


def privacy_of(services: Services, run: str) -> tuple[int, Any]:
    ledger = services.database.read(partial(privacy.find, run=run))
    assert ledger is not None
    return ledger.rounds, ledger.released


@pytest.mark.slow
def test_noise_that_later_rounds_take_back_needs_its_key(tmp_path: Path) -> None:
    document = experiment(3, {**PRIVACY, "mechanism": "ftrl", "minimum_separation": 1})
    document["devices"] = {"evaluate_every": 1}
    with services_in(tmp_path / "home") as services:
        failed = carry(services, document, lambda *given: Losing(*given[:2]))
        (services.settings.home / "privacy-keys" / failed.id).unlink()
        service = RunService(services, answering)
        service.resume(failed.id)
        assert service.join(failed.id, LONG_SECONDS)
        again = services.database.read(partial(rows.find, run=failed.id))
        assert (
            again.state == "failed" and "the key of the run's noise, is missing, and 2 rounds" in again.error
        )


@pytest.fixture
def ledger_of(tmp_path: Path, database_url: str) -> Any:
    with services_in(tmp_path / "home", database_url) as services:
        enrol(services, DEVICES)

        def create(connection: Any) -> None:
            rows.create(connection, "r", "r", experiment(9), [], START)
            privacy.open_ledger(connection, "r", MECHANISM)

        services.commit(create)
        yield services


def test_a_ledger_charges_a_round_and_its_devices_once(ledger_of: Services) -> None:
    ledger = DeviceLedger(ledger_of, "r", counts_draws=False)
    for number, names in ((1, ["ada"]), (1, ["ada", "bob"]), (3, ["ada"]), (2, ["eve"])):
        ledger.charge(number, spent(number), names)
    found = ledger_of.database.read(partial(privacy.find, run="r"))
    assert found is not None and (found.rounds, found.epsilon) == (3, spent(3))
    known = ledger_of.database.read(partial(privacy.spent_by, names=DEVICES))
    assert {each.device: (each.rounds, each.first_round, each.last_round) for each in known} == {
        "ada": (2, 1, 3),
        "bob": (1, 1, 1),
        "eve": (1, 2, 2),
    }


def test_a_kept_release_is_that_of_its_round_to_the_bit(ledger_of: Services) -> None:
    ledger = DeviceLedger(ledger_of, "r", counts_draws=False)
    delta: Params = {"w": np.array([0.1, -2.0]), "v": np.array(3.0)}
    figures = {"accepted": ["ada"], "rejections": {}, "silent": 0, "answers": 1, "bytes_up": 9, "selected": 1}
    figures |= {"bytes_down": 4, "population": 3}
    kept = ledger.keep(2, Release(Aggregate(delta, {}, 1, 10, 0.5), 0.25, figures))
    found = DeviceLedger(ledger_of, "r", counts_draws=False).find_release(2)
    assert found is not None and ledger.find_release(1) is ledger.find_release(3) is None
    for name, value in delta.items():
        assert (
            found.aggregate.delta[name].tobytes()
            == kept.aggregate.delta[name].tobytes()
            == value.astype(np.float32).tobytes()
        )
    assert (found.clip_norm, found.gathered().aggregated.accepted) == (0.25, ("ada",))
    ledger_of.blobs.keep_only(ledger_of.database.read(rows.blobs_in_use))
    assert ledger.find_release(2) is not None  # its blob is in use


def test_a_run_without_a_ledger_says_why(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        plain = {key: value for key, value in experiment(1).items() if key != "privacy"}
        for run, document in (("plain", plain), ("waiting", experiment(1))):
            services.commit(
                partial(rows.create, run=run, name=run, experiment=document, notices=[], now=START)
            )
        viewer = bearer(app_of(services), token_of(services, add_user(services, "viewer")))
        for run, code in (("plain", "not_private"), ("waiting", "not_prepared"), ("none", "unknown_run")):
            for path in ("privacy", "privacy/devices"):
                assert viewer.get(f"/api/v1/runs/{run}/{path}").json()["error"]["code"] == code


def test_devices_that_took_part_rest_and_a_round_may_have_none(tmp_path: Path) -> None:
    with sqlite(tmp_path) as database, serving(tmp_path, database) as world:
        deployment = world.start_run("r", minimum_separation=3)
        for name in ("a", "b"):
            world.enrol(name).check_in()
        mechanism = {**MECHANISM, "minimum_separation": 3, "bands": 3}
        world.services.commit(lambda at: privacy.open_ledger(at, "r", mechanism))
        fleet = DeviceFleet(world.services, deployment, patience_seconds=0)
        assert fleet.find_open_round(1) is None
        assert list(fleet.clients(1)) == ["a", "b"]
        DeviceLedger(world.services, "r", counts_draws=False).charge(1, 1.0, ["a"])
        for number, expected in ((2, ["b"]), (3, ["b"]), (4, ["a", "b"])):
            fleet.find_open_round(number)
            assert list(fleet.clients(1)) == expected
        DeviceLedger(world.services, "r", counts_draws=False).charge(2, 1.0, ["b"])
        fleet.find_open_round(3)
        assert list(fleet.clients(1)) == []
        params: Params = {"w": np.zeros(1, np.float32)}
        model = fleet.model(params, {})
        fleet.submit([], model, Terms(Expected({"delta/w": (1,)}, 100), Closing(1, 600.0), 0))
        assert list(fleet.results()) == []


def test_a_round_whose_noise_is_drawn_is_not_forgotten_with_its_run(ledger_of: Services) -> None:
    def end(connection: Any) -> None:
        opened = RoundRow("r", 1, "closed", 3, 3, Expected({}, 1), START, START + timedelta(minutes=1))
        rounds.open_round(connection, opened, "0" * 64)
        rows.end(connection, "r", "cancelled", START)

    def found(connection: Any) -> Any:
        return rounds.find_round(connection, "r", 1)

    ledger_of.commit(end)
    ledger_of.commit(partial(privacy.keep_release, run="r", released={"round": 1, "blob": "0" * 64}))
    assert ledger_of.commit(partial(rows.resume, run="r", now=START))
    assert ledger_of.database.read(found) is not None
    ledger_of.commit(partial(rows.end, run="r", state="cancelled", now=START))
    ledger_of.commit(partial(privacy.drop_release, run="r"))
    assert ledger_of.commit(partial(rows.resume, run="r", now=START))
    assert ledger_of.database.read(found) is None
