"""Runs on a fleet of devices: prepared, carried through, taken up again, cancelled, and what they leave."""

from __future__ import annotations

import errno
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.commands.summaries import run_summary, show_report
from coordinator.context.services import Services
from coordinator.db import events
from coordinator.db import runs as rows
from coordinator.errors import NothingLearnt, Refusal, UserError
from coordinator.reports import run_report
from coordinator.rounds.fleet import (
    Answer,
    Model,
    Silence,
)
from coordinator.rounds.plan import Task
from coordinator.runs import live_preparation
from coordinator.runs.live_run import LiveRun
from coordinator.runs.service import RunService
from coordinator.scheduling.deployments import Deployment
from edge_client.train.class_scores import class_scores
from edge_client.wire.device import EvaluationResult
from strategies.update import Update
from tests.support.databases import database_url
from tests.support.fake_devices import FakeDevices, FleetOf, answering
from tests.support.services import services_in

__all__ = ["database_url"]

DIGITS: dict[str, Any] = {
    "model": {"name": "logreg"},
    "federation": {"rounds": 3, "clients_per_round": 2, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 1},
}
UNKNOWN: dict[str, Any] = {**DIGITS, "data": {"dataset": "vibration", "input_shape": [8], "classes": 3}}
LONG_SECONDS = 600.0


def service_of(services: Services, fleet_of: FleetOf = answering) -> RunService:
    return RunService(services, fleet_of)


def carried(services: Services, document: dict[str, Any], fleet_of: FleetOf = answering) -> Any:
    """The row of a run that was carried through."""
    service = service_of(services, fleet_of)
    run = service.create(document)
    assert service.join(run, LONG_SECONDS)
    return row_of(services, run)


def row_of(services: Services, run: str) -> Any:
    return services.database.read(partial(rows.find, run=run))


def events_of(services: Services, run: str) -> list[Any]:
    return list(services.database.read(lambda at: events.since(at, 0, 1000, run)))


def report_of(services: Services, run: str) -> dict[str, Any]:
    return services.database.read(lambda at: run_report.make_report(at, rows.find(at, run)))


@pytest.mark.slow
def test_a_run_goes_through_its_rounds_and_its_report_is_that_of_a_simulation(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        run = carried(services, DIGITS)
        assert (run.state, run.round, run.error) == ("finished", 3, None)
        names = [row.event for row in events_of(services, run.id)]
        assert names == [
            "run_created",
            "run_started",
            *["round_started", "round_committed"] * 3,
            "run_finished",
        ]
        report = report_of(services, run.id)
        assert [row["round"] for row in report["rounds"]] == [1, 2, 3]
        assert all(row["accepted"] == 2 for row in report["rounds"])
        assert report["final"]["test_rows"] == 359
        assert any("own held-out rows of 'digits' (seed 7)" in notice for notice in report["notices"])
        assert report["final"]["model_sha256"] == run.params
        assert report["data"]["classes"] == 10


@pytest.mark.slow
def test_a_run_with_model_classes_has_a_model_for_each_and_scores_its_part(tmp_path: Path) -> None:
    memory = {"full": 900, "half": 450.5, "quarter": 0}
    document = {
        **DIGITS,
        "model": {"name": "mlp", "hidden": [8]},
        "strategy": {"name": "heterofl", "memory_mib": memory},
    }
    with services_in(tmp_path / "home") as services:
        run = carried(services, document)
        assert (run.state, run.error) == ("finished", None)
        full, half, quarter = live_preparation.read(run.prepared).classes
        assert [each.memory_bytes for each in (full, half, quarter)] == [900 << 20, 901 << 19, 0]
        assert (full.model.options, full.model.divisors) == ({"hidden": [8]}, {})
        assert (quarter.model.options, quarter.model.divisors) == ({"hidden": [2]}, {"hidden.0": 0.25})
        assert half.shapes["fc.weight"] == (10, 4)
        report = report_of(services, run.id)
        classes = report["device_classes"]
        assert classes["full"]["test_accuracy"] == report["final"]["test_accuracy"]
        assert classes["quarter"]["test_loss"] > 0 and classes["quarter"]["params"] == 65 * 2 + 30
        assert "quarter: 0 clients of width 0.25, 160 params" in run_summary(report, None)


@pytest.mark.slow
def test_a_run_that_was_left_is_taken_up_again_and_ends_with_the_same_model(tmp_path: Path) -> None:
    with services_in(tmp_path / "undisturbed") as services:
        undisturbed = carried(services, DIGITS)

    fleets: list[FakeDevices] = []

    def stopping(services: Services, deployment: Deployment, patience: float) -> FakeDevices:
        fleets.append(FakeDevices(services, deployment, stops_at=2))
        return fleets[0]

    with services_in(tmp_path / "home") as services:
        service = service_of(services, stopping)
        run = service.create(DIGITS)
        while not fleets:
            assert not service.join(run, 0.05), row_of(services, run).error
        assert fleets[0].waiting.wait(LONG_SECONDS)
        services.signals.close()
        assert service.join(run, LONG_SECONDS)
        left = row_of(services, run)
        assert (left.state, left.round) == ("running", 1)

    with services_in(tmp_path / "home") as services:
        services.database.write(lambda at: drop_open_round(at, run)).result()
        service = service_of(services)
        service.start()
        assert service.join(run, LONG_SECONDS)
        again = row_of(services, run)
        assert (again.state, again.round) == ("finished", 3)
        assert again.params == undisturbed.params
        assert "run_resumed" in [row.event for row in events_of(services, run)]


def drop_open_round(connection: Any, run: str) -> None:
    """The fake fleet does not reopen rounds; the real one is tested with its own."""
    from sqlalchemy import delete

    from coordinator.db.tables import rounds

    connection.execute(delete(rounds).where(rounds.c.run == run, rounds.c.state != "committed"))


@pytest.mark.slow
def test_data_that_only_devices_hold_is_scored_by_the_devices(tmp_path: Path) -> None:
    document = {**UNKNOWN, "devices": {"evaluate_every": 2}}
    with services_in(tmp_path / "home") as services:
        run = carried(services, document)
        assert (run.state, run.error) == ("finished", None)
        assert any("vibration" in notice for notice in run.notices)
        first, second, third = report_of(services, run.id)["rounds"]
        assert first["test_accuracy"] is None
        assert second["test_accuracy"] == pytest.approx((2 + 3 + 4) / 30)
        assert third["per_site"]["north"] == {
            "test_rows": 20,
            "test_accuracy": (3 + 4) / 20,
            "test_loss": 0.5,
            "devices": 2,
        }
        assert third["per_site"]["eve"]["test_rows"] == 10


class BeyondAllBounds(FakeDevices):
    """Devices whose figures are finite one by one and add up to infinity."""

    def evaluate(self, number: int, model: Model, seconds: float) -> dict[str, EvaluationResult]:
        honest = super().evaluate(number, model, seconds)
        return {name: replace(each, loss_sum=1.7e308) for name, each in honest.items()}

    def _update(self, task: Task) -> Update:
        return replace(super()._update(task), train_loss=1.7e308)


@pytest.mark.slow
def test_no_figure_of_a_device_fails_a_run(tmp_path: Path, database_url: str) -> None:
    document = {**UNKNOWN, "devices": {"evaluate_every": 1}}
    with services_in(tmp_path / "home", database_url) as services:
        run = carried(services, document, lambda *given: BeyondAllBounds(*given[:2]))
        assert (run.state, run.round, run.error) == ("finished", 3, None)
        row = report_of(services, run.id)["rounds"][0]
        assert (row["train_loss"], row["test_loss"]) == (1e6, 20.0)
        assert row["per_site"]["eve"]["test_loss"] == 20.0


@pytest.mark.slow
def test_nothing_is_made_of_a_model_that_the_disk_has_damaged(tmp_path: Path, database_url: str) -> None:
    """Changed in the middle of a round, after devices fetched it: the next model would be built on it."""
    home, damaged = tmp_path / "home", threading.Event()

    class Damaging(FakeDevices):
        def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence]:
            yield from super().results(excluded)
            if self._tasks[0].message.round == 2:
                path = home / "blobs" / self._tasks[0].message.base
                path.write_bytes(path.read_bytes()[:-1] + b"?")
                damaged.set()

    with services_in(home, database_url) as services:
        service = service_of(services, lambda *given: Damaging(*given[:2]))
        run = service.create(UNKNOWN)
        assert damaged.wait(LONG_SECONDS)
        services.signals.close()
        assert service.join(run, LONG_SECONDS)
        assert row_of(services, run).round == 1


@pytest.mark.slow
def test_a_run_in_which_every_device_declined_ends_with_an_error(tmp_path: Path) -> None:
    class Declining(FakeDevices):
        def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence]:
            for task in self._tasks:
                yield Silence(task, "out of memory", 1.0)

    with services_in(tmp_path) as services:
        row = carried(
            services, DIGITS, lambda services, deployment, patience: Declining(services, deployment)
        )
        assert row.state == "finished"
        with pytest.raises(
            NothingLearnt, match=r"of 6 clients selected, 6 sent no update .* fedloop device why"
        ):
            show_report(report_of(services, row.id), tmp_path, as_json=False)


@pytest.mark.slow
def test_a_run_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    document = {**DIGITS, "model": {"name": "no_such_package:build"}}
    with services_in(tmp_path / "home", allow_code=("no_such_package:build",)) as services:
        run = carried(services, document)
        assert run.state == "failed"
        assert "no_such_package" in run.error
        assert "\n" not in run.error
        assert events_of(services, run.id)[-1].event == "run_failed"


@pytest.mark.slow
def test_a_run_waits_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.runs.service._AGAIN_SECONDS", 0.0)
    errors = [OSError(errno.ENOSPC, "No space left on device")]

    def full_once(services: Services, deployment: Deployment, patience: float) -> FakeDevices:
        if errors:
            raise errors.pop()
        return FakeDevices(services, deployment)

    with services_in(tmp_path / "home") as services:
        run = carried(services, UNKNOWN, full_once)
        assert (run.state, run.round) == ("finished", 3)


@pytest.mark.slow
def test_only_blobs_that_a_row_needs_are_left(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        run = carried(services, DIGITS)
        left = {path.name for path in (tmp_path / "home" / "blobs").iterdir()}
        schema = (run.prepared or {})["schema"]["sha256"]
        assert left == {run.params, run.strategy_state, schema}


@pytest.mark.slow
def test_a_cancelled_run_ends_and_cannot_be_cancelled_twice(tmp_path: Path) -> None:
    fleets: list[FakeDevices] = []

    def stopping(services: Services, deployment: Deployment, patience: float) -> FakeDevices:
        fleets.append(FakeDevices(services, deployment, stops_at=1))
        return fleets[0]

    with services_in(tmp_path / "home") as services:
        service = service_of(services, stopping)
        run = service.create(UNKNOWN)
        while not fleets:
            assert not service.join(run, 0.05), row_of(services, run).error
        assert fleets[0].waiting.wait(LONG_SECONDS)
        service.cancel(run)
        assert service.join(run, LONG_SECONDS)
        assert row_of(services, run).state == "cancelled"
        assert services.deployments.active() == ()
        with pytest.raises(Refusal) as caught:
            service.cancel(run)
        assert (caught.value.status, caught.value.code) == (409, "run_ended")


@pytest.mark.slow
def test_a_cancelled_run_is_resumed_to_the_same_model(tmp_path: Path) -> None:
    """Also without what its folder held, and with its open round drawn anew."""
    fleets: list[FakeDevices] = []

    def stopping_once(services: Services, deployment: Deployment, patience: float) -> FakeDevices:
        fleets.append(FakeDevices(services, deployment, stops_at=None if fleets else 2))
        return fleets[-1]

    with services_in(tmp_path / "home") as services:
        undisturbed = carried(services, DIGITS)
        service = service_of(services, stopping_once)
        run = service.create(DIGITS)
        while not fleets:
            assert not service.join(run, 0.05), row_of(services, run).error
        assert fleets[0].waiting.wait(LONG_SECONDS)
        service.cancel(run)
        service.resume(run)
        assert service.join(run, LONG_SECONDS)
        again = row_of(services, run)
        assert (again.state, again.round, again.error) == ("finished", 3, None)
        assert again.params == undisturbed.params
        names = [row.event for row in events_of(services, run)]
        assert names.index("run_cancelled") < names.index("run_taken_up") < names.index("run_finished")
        with pytest.raises(Refusal, match="is finished; only a failed or cancelled run") as caught:
            service.resume(run)
        assert (caught.value.status, caught.value.code) == (409, "not_resumable")


def test_an_asynchronous_run_that_was_cancelled_is_not_resumed(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        experiment = {"federation": {"mode": "async"}}
        make = partial(
            rows.create, run="r", name="r", experiment=experiment, notices=[], now=services.clock()
        )
        services.database.write(make).result()
        service = service_of(services)
        service.cancel("r")
        with pytest.raises(Refusal, match="asynchronous") as caught:
            service.resume("r")
        assert (caught.value.status, caught.value.code) == (409, "not_resumable")


def test_a_wrong_experiment_makes_no_run(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        with pytest.raises(UserError, match=r"local.lr"):
            service_of(services).create({"local": {"lr": -1}})
        assert services.database.read(rows.live) == []


def test_an_unknown_run_cannot_be_cancelled(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services, pytest.raises(Refusal) as caught:
        service_of(services).cancel("nobody")
    assert caught.value.status == 404


@pytest.mark.slow
def test_a_run_ends_early_and_keeps_its_best_model(tmp_path: Path) -> None:
    """The fake devices report the same loss after every round, so that the first one is the best."""
    document = {
        **UNKNOWN,
        "devices": {"evaluate_every": 1},
        "federation": {**UNKNOWN["federation"], "rounds": 5, "early_stop": 2, "keep": "best"},
    }
    first_only = {**document, "federation": {**document["federation"], "rounds": 1}}
    with services_in(tmp_path / "home") as services:
        run, first = carried(services, document), carried(services, first_only)
        assert (run.state, run.round, run.error) == ("finished", 3, None)
        assert run.params == first.params
        report = report_of(services, run.id)
        assert (report["final"]["round"], report["final"]["stopped_early"]) == (1, True)
        assert report["final"]["test_accuracy"] == report["rounds"][0]["test_accuracy"]
        assert report["final"]["model_sha256"] == run.params
        left = {path.name for path in (tmp_path / "home" / "blobs").iterdir()}
        assert left == {run.params, run.strategy_state, first.strategy_state}


@pytest.mark.slow
def test_a_best_model_that_was_merged_with_frozen_params_leaves_one_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merged(run: LiveRun) -> str:
        return services.blobs.put_arrays({"merged": np.ones(3, np.float32)}).sha256

    monkeypatch.setattr(LiveRun, "_final_model", merged)
    keep = {"devices": {"evaluate_every": 1}, "federation": {**UNKNOWN["federation"], "keep": "best"}}
    with services_in(tmp_path / "home") as services:
        run = carried(services, {**UNKNOWN, **keep})
        assert (run.state, run.best["round"], run.best["params"]) == ("finished", 1, run.params)
        left = {path.name for path in (tmp_path / "home" / "blobs").iterdir()}
        assert left == {run.params, run.strategy_state}
        assert report_of(services, run.id)["final"]["round"] == 1


@pytest.mark.slow
def test_devices_that_count_their_classes_give_the_final_model_figures(tmp_path: Path) -> None:
    y = np.arange(10, dtype=np.int32) % 2
    logits = np.stack([np.zeros(10), np.where(np.arange(10) < 7, 2 * y - 1, 1 - 2 * y)], axis=1)

    class Counting(FakeDevices):
        def evaluate(self, number: int, model: Model, seconds: float) -> dict[str, EvaluationResult]:
            scores = class_scores(logits.astype(np.float32), y)
            honest = super().evaluate(number, model, seconds)
            return {name: replace(each, correct=7, scores=scores) for name, each in honest.items()}

    data = {**UNKNOWN["data"], "classes": 2, "positive": "0"}
    with services_in(tmp_path / "home") as services:
        by_auc = {**UNKNOWN["federation"], "keep": "best", "metric": "auc"}
        document = {**UNKNOWN, "data": data, "devices": {"evaluate_every": 1}, "federation": by_auc}
        run = carried(services, document, lambda *given: Counting(*given[:2]))
        report = report_of(services, run.id)
        figures = report["final"]["metrics"]
        assert (figures["positive"], figures["rows"], figures["devices"]) == ("0", 30, 3)
        assert figures["confusion"] == [[12, 3], [6, 9]]
        assert (figures["sensitivity"], figures["specificity"]) == (12 / 15, 9 / 15)
        assert report["per_site"]["north"]["metrics"]["confusion"] == [[8, 2], [4, 6]]
        assert report["rounds"][0]["test_metric"] == figures["auc"]
        assert report["final"]["round"] == 1
        quantities = carried(services, {**document, "federation": {**by_auc, "metric": "r2"}})
        assert quantities.error == (
            'federation.keep = "best" compares r2 (federation.metric) of the rounds, but it is a figure of data.task = '
            "'regression', and the data is for 'classification'"
        )
        show_report(report, tmp_path, as_json=False)
        wrong = carried(services, {**document, "data": {**data, "positive": "ill"}})
        assert (wrong.state, wrong.error) == (
            "failed",
            "data.positive = 'ill' is no class of the data; expected 0 or 1",
        )


@pytest.mark.slow
def test_a_run_that_keeps_the_best_model_does_so_after_it_was_left(tmp_path: Path) -> None:
    federation = {**DIGITS["federation"], "keep": "best", "metric": "f1"}
    document = {**DIGITS, "federation": federation, "evaluation": {"every": 2}}
    with services_in(tmp_path / "undisturbed") as services:
        undisturbed = carried(services, document)
        report = report_of(services, undisturbed.id)
        rows = {row["round"]: row["test_metric"] for row in report["rounds"]}
        scored = [value for value in rows.values() if value is not None]
        assert [number for number, value in rows.items() if value is None] == [
            number for number in rows if number % 2 and number != max(rows)
        ]
        assert rows[report["final"]["round"]] == max(scored)
        assert report["final"]["metrics"]["f1"] == max(scored)
        assert sum(map(sum, report["final"]["metrics"]["confusion"])) == 359

    fleets: list[FakeDevices] = []

    def stopping(services: Services, deployment: Deployment, patience: float) -> FakeDevices:
        fleets.append(FakeDevices(services, deployment, stops_at=3))
        return fleets[0]

    with services_in(tmp_path / "home") as services:
        service = service_of(services, stopping)
        run = service.create(document)
        while not fleets:
            assert not service.join(run, 0.05), row_of(services, run).error
        assert fleets[0].waiting.wait(LONG_SECONDS)
        services.signals.close()
        assert service.join(run, LONG_SECONDS)

    with services_in(tmp_path / "home") as services:
        services.database.write(lambda at: drop_open_round(at, run)).result()
        service = service_of(services)
        service.start()
        assert service.join(run, LONG_SECONDS)
        assert row_of(services, run).params == undisturbed.params
        assert report_of(services, run)["final"] == report["final"]


@pytest.mark.parametrize("key", [{"early_stop": 2}, {"keep": "best"}])
def test_a_run_that_nobody_scores_cannot_end_by_its_scores(tmp_path: Path, key: dict[str, Any]) -> None:
    document = {**UNKNOWN, "federation": {**UNKNOWN["federation"], **key}}
    with (
        services_in(tmp_path / "home") as services,
        pytest.raises(
            UserError,
            match=r"federation\.(early_stop|keep) = .* no rows of its own .* devices\.evaluate_every = 1",
        ),
    ):
        service_of(services).create(document)
