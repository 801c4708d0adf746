"""Federated statistics: in simulation they equal those of the pooled rows, and the command shows them."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.db import events
from coordinator.db import runs as rows
from coordinator.errors import UserError
from coordinator.fleets.statistics import Patience, StatisticsFleet
from coordinator.reports.statistics import make_report, stability_index
from coordinator.runs import statistics_run
from coordinator.runs.service import RunService
from edge_client.data.statistics import moments
from edge_client.wire import schema as schemas
from edge_client.wire.device import to_json
from edge_client.wire.statistics import ColumnStatistics, StatisticsRequest, StatisticsResult
from edge_client.wire.strict import parse_message
from tests.support.cli import assert_refused, run_here
from tests.support.device_world import Refused, TestDevice, World, serving, sqlite
from tests.support.fake_devices import answering
from tests.support.services import services_in

SITES = {"north": 300, "south": 150, "east": 60, "tiny": 9}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """`age` is higher at every next site; the ward `unique-N` is of one row."""
    rng = np.random.default_rng(5)
    rows = []
    for index, (site, count) in enumerate(SITES.items()):
        for number in range(count):
            age = "" if rng.random() < 0.1 else f"{rng.normal(40 + 10 * index, 5):.3f}"
            ward = f"unique-{index}" if number == 0 else ["icu", "er"][rng.integers(2)]
            rows.append(
                [age, ward, site, "test" if number % 5 == 1 else "train", ["no", "yes"][rng.integers(2)]]
            )
    path = tmp_path / "tables" / "t.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["age", "ward", "site", "split", "y"], *rows])
    return path


def settings(path: Path) -> list[str]:
    values = ["data.dataset=csv", f"data.path={path}", "data.label=y", "data.partition=natural"]
    return [part for value in values for part in ("--set", value)]


def test_statistics_of_a_simulation_are_those_of_the_pooled_training_rows(
    table: Path, tmp_path: Path
) -> None:
    done = run_here("statistics", *settings(table), "--json", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads((tmp_path / "out" / "statistics.json").read_text()) == report

    rows = list(csv.DictReader(table.open()))
    reported = [row for row in rows if row["split"] == "train" and row["site"] != "tiny"]
    ages = np.array([float(row["age"]) for row in reported if row["age"]])
    named = run_here("statistics", *settings(table), "--set", "data.dataset=patients", "--json")
    assert json.loads(named.stdout) == report
    pool = report["pooled"]
    assert pool["rows"] == len(reported)
    age = pool["columns"]["age"]
    assert age["count"] == len(ages)
    assert age["mean"] == pytest.approx(ages.mean(), rel=1e-9)
    assert age["deviation"] == pytest.approx(ages.std(), rel=1e-9)
    assert report["sites"]["tiny"]["rows"] is None
    assert set(report["sites"]) == set(SITES)
    south = [row for row in reported if row["site"] == "south"]
    assert report["sites"]["south"]["columns"]["age"]["missing"] == pytest.approx(
        sum(not row["age"] for row in south) / len(south)
    )
    assert report["sites"]["east"]["columns"]["age"]["mean_difference"] > 1
    assert report["sites"]["east"]["columns"]["age"]["drift"] > 0.25 > report["sites"]["north"]["label_drift"]


def test_a_quantity_to_predict_is_shown_as_a_column_of_numbers(table: Path) -> None:
    text = table.read_text().replace("age,ward,site,split,y", "age,ward,site,split,z").splitlines()
    rng = np.random.default_rng(2)
    costs = rng.normal(500, 100, len(text) - 1).round(4)
    costs[0], costs[-1] = 77777.125, -77777.125
    rows = [f"{line},{cost}" for line, cost in zip(text[1:], costs, strict=True)]
    table.write_text("\n".join([f"{text[0]},cost", *rows]))
    asked = [*settings(table), "--set", "data.label=cost", "--set", "data.task=regression", "--set", "data.exclude=['z']"]  # fmt: skip

    done = run_here("statistics", *asked, "--json")

    assert done.returncode == 0, done.stderr
    report, trained = json.loads(done.stdout), []
    for row in csv.DictReader(table.open()):
        if row["split"] == "train" and row["site"] != "tiny":
            trained.append(float(row["cost"]))
    cost = report["pooled"]["columns"]["cost"]
    assert (report["quantity"], report["pooled"]["labels"]["classes"]) == ("cost", {})
    assert (cost["count"], cost["mean"]) == (len(trained), pytest.approx(np.mean(trained), rel=1e-6))
    assert cost["deviation"] == pytest.approx(np.std(trained), rel=1e-6)
    assert all(count == 0 or count >= 10 for count in cost["histogram"]) and sum(cost["histogram"]) > 300
    assert report["sites"]["south"]["label_drift"] == report["sites"]["south"]["columns"]["cost"]["drift"]
    assert "77777" not in done.stdout
    assert f"{cost['mean']:.4g} ± {cost['deviation']:.4g}" in run_here("statistics", *asked).stdout


def test_no_single_row_is_in_what_is_shown(table: Path) -> None:
    shown = (
        run_here("statistics", *settings(table)).stdout
        + run_here("statistics", *settings(table), "--json").stdout
    )
    assert "unique" not in shown
    ages = sorted(float(row["age"]) for row in csv.DictReader(table.open()) if row["age"])
    for extreme in (*ages[:3], *ages[-3:]):
        assert str(extreme) not in shown


def test_statistics_are_of_tables() -> None:
    assert_refused(run_here("statistics"), "data.dataset = 'digits'", "data.path")


def test_drift_is_none_between_equal_shares_and_grows() -> None:
    even = {"a": 0.5, "b": 0.5}
    assert stability_index(even, even, 0.01) == 0
    near, far = (
        stability_index({"a": 0.6, "b": 0.4}, even, 0.01),
        stability_index({"a": 0.95, "b": 0.05}, even, 0.01),
    )
    assert 0 < near < 0.1 < 0.25 < far


def test_a_column_of_another_kind_at_one_site_has_no_drift() -> None:
    numbers = StatisticsResult(
        20, 10, {"a": ColumnStatistics("number", 20, mean=1.0, squares=4.0)}, {"0": 20}
    )
    texts = StatisticsResult(20, 10, {"a": ColumnStatistics("category", 20, categories={"n": 20})}, {"0": 20})
    report = make_report({"a": numbers, "b": numbers, "c": texts}, {"d": "forbidden"})
    assert report["pooled"]["columns"]["a"]["count"] == 40
    assert report["sites"]["c"]["columns"]["a"]["drift"] is None
    assert report["silent"] == {"d": "forbidden"}
    assert moments(numbers)["a"] == (20, 1.0, pytest.approx(0.2**0.5))


def test_gaps_are_no_values_of_a_column_of_texts() -> None:
    wards = ColumnStatistics("category", 40, categories={"icu": 25, "": 15})
    report = make_report({"a": StatisticsResult(40, 10, {"ward": wards}, {"0": 40})})
    ward = report["pooled"]["columns"]["ward"]
    assert (ward["count"], ward["missing"], ward["categories"]) == (25, 15 / 40, {"icu": 25})


# Devices, through the database and the device API.

REQUEST = StatisticsRequest(minimum_count=10)
REPORTED = StatisticsResult(
    40, 10, {"age": ColumnStatistics("number", 40, mean=50.0, squares=400.0, low=45.0, high=55.0)}, {"0": 40}
)
PATIENCE = Patience(least=2, devices_seconds=0.0, answers_seconds=600.0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    home, tables = tmp_path / "home", tmp_path / "tables"
    home.mkdir()
    tables.mkdir(exist_ok=True)
    with sqlite(home) as database, serving(home, database, allow_paths=(tables,)) as made:
        yield made


def asking(
    world: World, device: TestDevice, result: StatisticsResult = REPORTED
) -> dict[str, StatisticsResult]:
    """What a statistics round gets while `device` answers its task."""
    got: list[dict[str, StatisticsResult]] = []
    fleet = StatisticsFleet(world.services, world.services.deployments.active()[0])
    thread = threading.Thread(target=lambda: got.append(fleet.ask(0, REQUEST, PATIENCE)))
    thread.start()
    while (offer := device.check_in(wire="1.4", runtimes={}, models=()).task) is None:
        threading.Event().wait(0.01)
    assert (offer.kind, offer.params, offer.blobs) == ("statistics", None, [])
    assert parse_message(StatisticsRequest, offer.message, "message") == REQUEST
    small = replace(result, labels={"0": 37, "1": 3})
    with pytest.raises(Refused, match="malformed"):
        device.report_statistics(offer.task, to_json(small))
    for _ in range(2):  # the first answer was lost
        device.report_statistics(offer.task, to_json(result))
    thread.join()
    return got[0]


def test_devices_without_a_model_get_one_request_and_small_counts_are_refused(world: World) -> None:
    device, old = world.enrol("a"), world.enrol("b")
    world.start_run("r", kind="statistics", runtimes=())
    old.check_in(wire="1.3")
    device.check_in(wire="1.4", runtimes={}, models=())
    assert asking(world, device) == {"a": REPORTED}
    assert old.check_in(wire="1.3").task is None

    again = StatisticsFleet(world.services, world.services.deployments.active()[0])
    assert again.ask(0, REQUEST, PATIENCE) == {"a": REPORTED}
    assert device.check_in(wire="1.4").task is None


def test_a_device_that_cannot_train_but_report_is_not_listed_as_blocked(world: World) -> None:
    device = world.enrol("a")
    world.start_run("r")
    device.check_in(wire="1.4", runtimes={}, models=())
    assert asking(world, device) == {"a": REPORTED}
    requested = world.services.database.read(lambda at: events.first(at, "r", "statistics_requested"))
    assert requested is not None and requested._mapping["values"]["blocked"] == []


def test_devices_that_decline_or_cannot_be_asked_are_listed_as_silent(world: World) -> None:
    device, old = world.enrol("a"), world.enrol("b")
    world.start_run("r", kind="statistics", runtimes=())
    old.check_in(wire="1.3")
    device.check_in(wire="1.4")
    fleet = StatisticsFleet(world.services, world.services.deployments.active()[0])
    thread = threading.Thread(target=lambda: fleet.ask(0, REQUEST, PATIENCE))
    thread.start()
    while (offer := device.check_in(wire="1.4").task) is None:
        threading.Event().wait(0.01)
    device.decline(offer.task, "opted_out", "the owner of this device does not let it report statistics")
    thread.join()
    report = world.services.database.read(lambda at: statistics_run.read_report(at, "r"))
    assert report["silent"]["the a"] == "the owner of this device does not let it report statistics"
    assert report["silent"]["the b"].startswith("it was not asked: it speaks wire 1.3, statistics tasks need")
    assert set(report["silent"]) == {"the a", "the b"}
    assert report["sites"] == {}


def test_a_statistics_run_of_too_few_devices_fails_and_is_no_training_run(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        service = RunService(services, answering)
        devices = {"patience_seconds": 0, "evaluate_seconds": 1}
        run = service.create_statistics({"data": {"dataset": "patients"}, "devices": devices})
        assert service.join(run, 60)
        row = services.database.read(lambda at: rows.require(at, run))
        assert (row.state, row.kind) == ("failed", "statistics")
        assert "0 of 0 devices" in row.error
        assert services.database.read(lambda at: rows.newest(at, 10)) == []
        with pytest.raises(UserError, match=r"data\.datset"):
            service.create_statistics({"data": {"datset": "patients"}})


def trained(world: World, table: Path, devices: Mapping[str, StatisticsResult]) -> Any:
    """The row of a run on the coordinator's `table`, whose devices hold rows called `patients` and report this before round 1; their
    training is made up."""
    document = {
        "data": {"dataset": "patients", "path": str(table), "label": "y", "scale": "federated"},
        "model": {"name": "logreg"},
        "federation": {"rounds": 1, "clients_per_round": max(1, len(devices)), "runtimes": {"torch": 1.0}},
        "local": {"epochs": 1},
        "devices": {"patience_seconds": 60 if devices else 0},
    }
    service = RunService(world.services, answering)
    run = service.create(document)
    reporters = {name: world.enrol(name) for name in devices}
    waiting = dict(devices)
    while waiting:
        for name, device in reporters.items():
            offer = device.check_in(wire="1.4", datasets={"patients": 100}, wait_seconds=0.2).task
            if offer is not None and name in waiting:
                assert (offer.kind, offer.dataset) == ("statistics", "patients") and offer.schema is not None
                device.report_statistics(offer.task, to_json(waiting.pop(name)))
    assert service.join(run, 120)
    return world.services.database.read(lambda at: rows.require(at, run))


@pytest.mark.slow
def test_a_run_with_federated_scale_is_scaled_by_the_statistics_of_devices(world: World, table: Path) -> None:
    ages = np.array([10.0] * 10 + [30.0] * 30)
    reported = {
        name: StatisticsResult(
            len(part),
            10,
            {"age": ColumnStatistics("number", len(part), mean=part.mean(), squares=0.0)},
            other_labels=len(part),
        )
        for name, part in (("ada", ages[:10]), ("bob", ages[10:]))
    }
    row = trained(world, table, reported)
    assert (row.state, row.error) == ("finished", None)
    assert "scaled by the means and deviations of 2 devices" in " ".join(row.notices)
    schema = schemas.from_document(row.prepared["data"]["schema"])
    (age,) = (column for column in schema.columns if column.name == "age")
    assert (age.mean, age.deviation) == (ages.mean(), pytest.approx(ages.std()))
    assert schema.scale == "federated"
    sent = world.services.blobs.path(row.prepared["schema"]["sha256"]).read_bytes()
    assert schemas.from_json(sent) == schema


@pytest.mark.slow
def test_a_cancelled_run_stops_waiting_for_devices(world: World, table: Path) -> None:
    service = RunService(world.services, answering)
    document = {
        "data": {"dataset": "csv", "path": str(table), "label": "y"},
        "model": {"name": "logreg"},
        "federation": {"runtimes": {"torch": 1.0}},
        "devices": {"patience_seconds": 80_000},
    }
    run = service.create(document)

    def waits() -> list[Any]:
        events_so_far = world.services.database.read(lambda at: events.since(at, 0, 100, run))
        return [each for each in events_so_far if each.event == "round_waiting"]

    while not waits():
        assert not service.join(run, 0.01)
    service.cancel(run)
    assert service.join(run, 60)
    assert world.services.database.read(lambda at: rows.require(at, run)).state == "cancelled"


@pytest.mark.slow
def test_without_two_devices_the_coordinators_own_table_scales_and_the_run_says_so(
    world: World, table: Path
) -> None:
    row = trained(world, table, {})
    assert row.state == "finished"
    assert "0 devices reported statistics, 2 are needed" in " ".join(row.notices)
    (age,) = (each for each in row.prepared["data"]["schema"]["columns"] if each["name"] == "age")
    own = [
        float(each["age"])
        for each in csv.DictReader(table.open())
        if each["age"] and each["split"] == "train"
    ]
    assert age["mean"] == pytest.approx(np.mean(own))
