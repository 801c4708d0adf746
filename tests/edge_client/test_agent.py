"""The daemon against a coordinator over real TLS; only training and time are ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.errors import Stopped, UserError
from edge_client.train.interpreter import installed_kind
from edge_client.train.process import TrainingFailed
from edge_client.transport import identity
from edge_client.wire import arrays
from tests.support.edge import daemon, enrolled
from tests.support.fake_coordinator import FakeCoordinator


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().running() as fake:
        yield fake


def test_a_device_that_is_not_enrolled_says_how(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not enrolled; run `fedloop-edge enroll"):
        daemon(tmp_path)


def test_an_enrolled_device_checks_in_trains_and_delivers(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    who = enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.accepted)
    device, message = coordinator.checkins[0]
    assert device == who.device
    assert (message.datasets, message.runtimes) == ({"digits": 12}, {"litert": "2.3.0"})
    assert message.release_runtime == installed_kind()
    assert list(arrays.decode(coordinator.accepted[offer.task])) == ["delta/w"]
    assert edge.training.jobs[0].params.read_bytes() == coordinator.blobs[offer.params.sha256]
    assert (tmp_path / "rules" / offer.run).read_bytes() == b"state 1"
    assert not any((tmp_path / "work").iterdir())


def test_the_clients_rule_finds_its_state_again(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    offers = [coordinator.offer(round=number) for number in (1, 2)]
    edge.ticks(lambda: len(coordinator.accepted) == len(offers))
    assert [job.state_in is not None for job in edge.training.jobs] == [False, True]


def test_a_rejected_result_leaves_the_rules_state_as_it_was(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    offer = coordinator.offer()
    coordinator.refusals[f"/tasks/{offer.task}/upload"] = (422, "non_finite")
    edge.ticks(lambda: any(entry.outcome for entry in edge.executor.ledger.entries()))
    assert not (tmp_path / "rules" / offer.run).exists()
    assert edge.executor.outbox.pending() == []
    assert "non_finite" in edge.executor.ledger.entries()[0].outcome


def test_a_result_for_a_closed_round_is_dropped_with_its_reason(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    offer = coordinator.offer()
    coordinator.refusals["/tasks/"] = (409, "round_closed")
    edge.ticks(lambda: bool(edge.training.jobs) and not edge.executor.outbox.pending())
    edge.ticks(lambda: bool(edge.executor.ledger.entries()))
    assert "round_closed" in edge.executor.ledger.entries()[0].outcome
    assert offer.task not in coordinator.accepted


def test_an_evaluate_task_sends_sums_only(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path, ("labels.site=berlin",))
    offer = coordinator.offer(kind="evaluate")
    edge.ticks(lambda: offer.task in coordinator.accepted)
    assert json.loads(coordinator.accepted[offer.task]) == {
        "base": offer.params.sha256,
        "rows": 5,
        "labels": 5,
        "correct": 4,
        "loss_sum": 1.5,
        "quantity": None,
        "site": "berlin",
        "scores": None,
    }


@pytest.mark.parametrize(("least", "is_sent"), [(5, True), (6, False)])
def test_sums_of_few_quantities_stay_on_the_device(
    coordinator: FakeCoordinator, tmp_path: Path, least: int, is_sent: bool
) -> None:
    """The labels of few rows follow from their sums. Training reports those of five rows."""
    sums = {"absolute_sum": 2.0, "label_sum": 0.5, "label_square_sum": 4.0}
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path, (f"statistics.minimum_count={least}",))
    edge.training.quantity = {"quantity": sums}
    offer = coordinator.offer(kind="evaluate")
    edge.ticks(lambda: offer.task in coordinator.accepted)
    sent = json.loads(coordinator.accepted[offer.task])
    assert (sent["quantity"], sent["loss_sum"]) == (sums if is_sent else None, 1.5)


@pytest.mark.parametrize(("minimum_count", "is_counted"), [(2, True), (3, False)])
def test_classes_of_fewer_rows_than_the_owner_allows_are_not_counted(
    coordinator: FakeCoordinator, tmp_path: Path, minimum_count: int, is_counted: bool
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path, (f"statistics.minimum_count={minimum_count}",))
    offer = coordinator.offer(kind="evaluate")
    edge.ticks(lambda: any(entry.outcome for entry in edge.executor.ledger.entries()))
    reported = json.loads(coordinator.accepted[offer.task])
    assert (reported["correct"], reported["scores"] is not None) == (4, is_counted)
    if is_counted:
        assert reported["scores"]["confusion"] == [[2, 1], [0, 2]]
    (entry,) = edge.executor.ledger.entries()
    assert json.loads(edge.executor.ledger.payload(entry)) == reported


STATISTICS: dict[str, object] = {
    "kind": "statistics",
    "params": None,
    "artifact": None,
    "manifest": None,
    "message": {"minimum_count": 10},
}


def test_statistics_are_reported_within_the_owners_limit_and_are_on_the_ledger(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path, ("labels.site=berlin", "statistics.minimum_count=20"))
    offer = coordinator.offer(**STATISTICS, runtime="torch")  # which this device lacks, and does not need
    edge.ticks(lambda: offer.task in coordinator.accepted)
    reported = json.loads(coordinator.accepted[offer.task])
    assert reported == {"rows": 40, "minimum_count": 20, "site": "berlin"}
    edge.ticks(lambda: bool(edge.executor.ledger.entries()[0].outcome))
    (entry,) = edge.executor.ledger.entries()
    assert (entry.kind, entry.outcome, entry.treated) == (
        "statistics",
        "delivered",
        "counts below 20 withheld",
    )
    assert json.loads(edge.executor.ledger.payload(entry)) == reported


@pytest.mark.parametrize(
    ("changes", "sets", "code"),
    [
        (STATISTICS, ("statistics.allowed=false",), "opted_out"),
        (STATISTICS | {"message": {"minimum_count": "few"}}, (), "failed"),
        ({"dataset": "faces"}, (), "no_data"),
        ({"runtime": "torch"}, (), "wrong_runtime"),
        ({"artifact": None}, (), "bad_artifact"),
        ({}, ('opt_out=["demo"]',), "opted_out"),
    ],
)
def test_a_task_that_cannot_be_done_is_given_back(
    coordinator: FakeCoordinator, tmp_path: Path, changes: dict[str, object], sets: tuple[str, ...], code: str
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path, sets)
    offer = coordinator.offer(**changes)
    edge.ticks(lambda: offer.task in coordinator.declined)
    assert coordinator.declined[offer.task].code == code
    assert edge.training.jobs == []


def test_a_failed_training_is_declined_with_its_code(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    edge.training.failure = TrainingFailed("limits", "it took more than 1 GB")
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.declined)
    assert coordinator.declined[offer.task].code == "limits"
    assert coordinator.declined[offer.task].words == "it took more than 1 GB"
    assert len(edge.training.jobs) == 1


def test_pausing_stops_a_running_task_and_gives_it_back(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)

    def pause() -> bool:
        edge.executor.state.set_paused(True)
        return True

    edge.training.busy = pause
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.declined)
    assert coordinator.declined[offer.task].code == "ineligible"
    edge.ticks(lambda: coordinator.checkins[-1][1].ineligible == ("paused by hand",))


def test_conditions_are_looked_at_again_during_training(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)

    def on_battery() -> bool:
        edge.conditions[:] = ["on battery"]
        edge.clock.seconds += 1.0
        return True

    edge.training.busy = on_battery
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.declined)
    assert coordinator.declined[offer.task].words == "on battery"


def test_opting_out_stops_what_runs_and_nothing_leaves(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)

    def opts_out() -> bool:
        edge.executor.state.set_opted_out("demo", True)
        edge.clock.seconds += 1.0
        return True

    edge.training.busy = opts_out
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.declined)
    assert coordinator.declined[offer.task].code == "opted_out"
    assert edge.executor.ledger.entries() == []


def test_a_task_nobody_wants_any_more_is_stopped(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    coordinator.stop = True
    edge.training.busy = lambda: True
    offer = coordinator.offer(lease_seconds=0.1)
    edge.ticks(lambda: bool(edge.training.jobs))
    assert edge.executor.state.task() is None
    assert offer.task not in coordinator.declined
    assert any(message.working_on == offer.task for _, message in coordinator.checkins)


def test_a_task_in_hand_is_resumed_after_a_restart(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    first = daemon(tmp_path)
    first.training.busy = lambda: bool(first.agent.end()) or True
    offer = coordinator.offer()
    first.ticks(lambda: bool(first.training.jobs))
    again = daemon(tmp_path)
    again.ticks(lambda: offer.task in coordinator.accepted)
    assert coordinator.declined == {}


def test_a_task_in_hand_that_was_given_up_is_dropped_after_a_restart(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    first = daemon(tmp_path)
    first.training.busy = lambda: bool(first.agent.end()) or True
    coordinator.offer()
    first.ticks(lambda: bool(first.training.jobs))
    coordinator.stop = True
    again = daemon(tmp_path)
    again.ticks(lambda: again.executor.state.task() is None)
    assert again.training.jobs == []


def test_a_finished_result_waits_for_the_network_and_counts_once(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    offer = coordinator.offer()
    coordinator.refusals["/tasks/"] = (503, "busy")
    edge.ticks(lambda: len(edge.executor.outbox.pending()) == 1)
    again = daemon(tmp_path)
    del coordinator.refusals["/tasks/"]
    again.ticks(lambda: offer.task in coordinator.accepted)
    assert again.training.jobs == []
    assert coordinator.acceptances == [offer.task]
    assert [entry.outcome for entry in again.executor.ledger.entries()] == ["delivered"]


def test_an_upload_that_was_cut_goes_on_where_it_stopped(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    edge.training.size = 200_000
    coordinator.cut_upload_at = 500_000
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.accepted)
    assert arrays.decode(coordinator.accepted[offer.task])["delta/w"].shape == (200_000,)
    assert len(coordinator.received[offer.task]) == coordinator.started[offer.task]["size_bytes"]


def test_a_download_that_was_cut_goes_on_where_it_stopped(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    coordinator.cut_download_at = 30_000
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.accepted)
    assert coordinator.ranges == ["bytes=30000-"]


def test_a_deflated_upload_is_the_same_result(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path, ("deflate_uploads=true",))
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.accepted)
    assert coordinator.started[offer.task]["encoding"] == "deflate"
    entry = edge.executor.ledger.entries()[0]
    assert edge.executor.ledger.payload(entry) == coordinator.accepted[offer.task]


def test_failures_are_retried_ever_later_and_less_at_once(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    coordinator.refusals["/checkin"] = (503, "busy")
    edge.ticks(lambda: len(edge.wake.slept) > 30)
    assert max(edge.wake.slept) < 60.1
    assert sum(edge.wake.slept[20:]) > sum(edge.wake.slept[:10])


def test_a_revoked_device_stops_and_says_so(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    coordinator.refusals["/checkin"] = (403, "revoked")
    with pytest.raises(Stopped, match="revoked"):
        edge.agent.run()
    assert edge.training.closed


def test_a_certificate_is_renewed_at_two_thirds_of_its_life(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    coordinator.device_days = (-25.0, 5.0)
    before = enrolled(coordinator, tmp_path)
    coordinator.device_days = (-0.01, 30.0)
    edge = daemon(tmp_path)
    edge.ticks(lambda: coordinator.renewals == 1 and len(coordinator.checkins) > 2)
    after = identity.load(tmp_path)
    assert after is not None
    assert after.device == before.device
    assert after.fingerprint != before.fingerprint
    assert coordinator.renewals == 1


def test_an_expired_certificate_is_renewed_without_showing_it(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    coordinator.device_days = (-60.0, -20.0)
    enrolled(coordinator, tmp_path)
    coordinator.device_days = (-0.01, 30.0)
    edge = daemon(tmp_path)
    edge.ticks(lambda: len(coordinator.checkins) > 0)
    assert coordinator.renewals == 1


def test_a_certificate_the_coordinator_calls_expired_is_renewed(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    coordinator.refusals["/checkin"] = (401, "expired")
    edge.ticks(lambda: coordinator.renewals == 1)
    del coordinator.refusals["/checkin"]
    edge.ticks(lambda: len(coordinator.checkins) > 0)


def test_a_refused_renewal_of_an_expired_certificate_stops_the_daemon(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    coordinator.device_days = (-60.0, -20.0)
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    coordinator.refusals["/renew"] = (403, "revoked")
    with pytest.raises(Stopped, match="no longer renews this device's certificate"):
        edge.agent.run()


def test_a_clock_45_days_ahead_renews_nothing_and_works(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    before = enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    edge.clock.wall_error = 45 * 86_400.0
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.accepted)
    assert coordinator.renewals == 0
    after = identity.load(tmp_path)
    assert after is not None and after.fingerprint == before.fingerprint
    assert "1080 h ahead of" in (tmp_path / "status.json").read_text()


def test_a_coordinator_of_the_future_is_reported_as_a_wrong_clock(tmp_path: Path) -> None:
    with FakeCoordinator().running() as sound:
        enrolled(sound, tmp_path)
        with replace_server(sound, (1.0, 365.0)).running() as late:
            move(tmp_path, late.url)
            edge = daemon(tmp_path)
            edge.clock.wall_error = -86_400.0
            edge.agent.tick()
            status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "unreachable"
    assert "this machine's clock is 24 h behind the coordinator's; set it" in status["words"]
    assert identity.load(tmp_path) is not None


def replace_server(fake: FakeCoordinator, days: tuple[float, float]) -> FakeCoordinator:
    return replace(fake, server_days=days)


def move(folder: Path, url: str) -> None:
    path = folder / "identity" / "server.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "url": url}))


def test_files_of_a_run_go_when_it_is_over(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    offer = coordinator.offer()
    edge.ticks(lambda: offer.task in coordinator.accepted)
    assert any((tmp_path / "blobs").iterdir())
    edge.clock.wall_error = 0.0
    edge.executor.forget(edge.clock.wall() + 601.0, held=False)
    assert not any((tmp_path / "blobs").iterdir())
    assert (tmp_path / "rules" / offer.run).exists()
