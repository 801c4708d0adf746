"""The daemon over its models' life: self-tests in a child, trials, falls, offers, and what it tells."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from edge_client.commands import cli
from edge_client.config import ReleaseOptions
from edge_client.daemon.host_environment import release_reports as reports
from edge_client.data import DataConfig
from edge_client.ota import self_test, slots, transitions
from edge_client.ota.errors import Postponed, Rejected
from edge_client.ota.releases import CHECK_SECONDS, Releases
from edge_client.ota.self_test import SelfTestJob
from edge_client.wire.device import ReleaseOffer
from tests.support import released
from tests.support.edge import Clock, daemon
from tests.support.ota import MODEL, World, world

pytestmark = pytest.mark.slow

TRIAL_SECONDS = ReleaseOptions().trial_seconds


@pytest.fixture
def ota(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


@pytest.fixture
def two(ota: World) -> World:
    """Version 2 runs, on trial; version 1 is in the other slot."""
    for version, kind in ((1, "first"), (2, "second")):
        ota.publish(version, kind)  # type: ignore[arg-type]
        ota.install(ota.roll_out(version), run_self_test=passes)
    return ota


def passes(job: SelfTestJob, check_cancelled: Any = None) -> self_test.SelfTestResult:
    return self_test.SelfTestResult(1.0)


def releases(ota: World, clock: Clock | None = None, run_self_test: Any = self_test.run) -> Releases:
    return Releases(ota.config, (clock or Clock()).now, random.Random(1), run_self_test)


def flip(path: Path) -> None:
    """One bit changes on the disk, and nothing says so."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# -- the child --


def test_a_runtime_that_crashes_is_a_failure_of_the_version_not_of_the_daemon(tmp_path: Path) -> None:
    folder = released.release_folder(tmp_path / "a", 1)

    def crash() -> None:
        for child in psutil.Process().children():
            if "edge_client.ota.self_test_worker" in child.cmdline():
                os.kill(child.pid, signal.SIGSEGV)

    with pytest.raises(Rejected, match="SIGSEGV") as raised:
        self_test.run(SelfTestJob(folder, 2**20), crash)
    assert raised.value.code == "crashed"
    assert list(tmp_path.glob(".*")) == []


def test_a_self_test_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    folder = released.release_folder(tmp_path / "a", 1)
    with pytest.raises(Rejected) as raised:
        self_test.run(SelfTestJob(folder, 2**20), seconds=0.0)
    assert raised.value.code == "too_slow"
    assert not [
        each for each in psutil.Process().children() if "edge_client.ota.self_test_worker" in each.cmdline()
    ]


def test_a_machine_that_can_start_no_process_says_nothing_about_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = released.release_folder(tmp_path / "a", 1)
    monkeypatch.setattr(self_test.sys, "executable", str(tmp_path / "none"))
    with pytest.raises(Postponed, match="no process can be started") as raised:
        self_test.run(SelfTestJob(folder, 2**20))
    assert raised.value.code == "self_test_broken"
    assert list(tmp_path.glob(".*")) == []


def test_a_self_test_that_somebody_kills_says_nothing_about_the_version(tmp_path: Path) -> None:
    folder = released.release_folder(tmp_path / "a", 1)

    def kill() -> None:
        for child in psutil.Process().children():
            child.kill()

    with pytest.raises(Postponed) as raised:
        self_test.run(SelfTestJob(folder, 2**20), kill)
    assert raised.value.code == "self_test_broken"


def test_data_that_cannot_be_read_costs_the_evaluation_only(tmp_path: Path) -> None:
    folder = released.release_folder(tmp_path / "a", 1)
    data = DataConfig("csv", tmp_path / "missing.csv", {"label": "label"})
    found = self_test.run(SelfTestJob(folder, 2**20, data=data))
    assert found.golden_accuracy == 0.9375
    assert found.evaluation is None
    assert "missing.csv" in found.note


# -- trials --


def test_a_version_that_lasts_has_proved_itself(two: World) -> None:
    clock = Clock()
    models = releases(two, clock, passes)
    assert models.begin() == []
    models.maintain()
    assert two.pointer.trial_starts == 1
    clock.seconds += TRIAL_SECONDS
    models.maintain()
    assert two.pointer.trial_starts is None


def test_a_daemon_that_never_lasts_falls_back(two: World) -> None:
    for _ in range(transitions.TRIAL_STARTS):
        assert releases(two, run_self_test=passes).begin() == []
        assert two.runs() == 2
    (words,) = releases(two, run_self_test=passes).begin()
    assert "digits:2 is no longer used" in words and "(crash_loop); version 1 runs again" in words
    assert two.runs() == 1
    assert [(each.version, each.standing) for each in reports(two.state_dir)] == [
        (1, "active"),
        (2, "rolled_back"),
    ]


@pytest.mark.parametrize("name", ["model.tflite", "manifest.json"])
def test_a_slot_that_rotted_is_left_for_the_other_and_fetched_anew(two: World, name: str) -> None:
    """What the disk did to a file is not held against the version, and the next check-in tells."""
    two.lasts()
    folder = slots.active_folder(two.state_dir, MODEL)
    assert folder is not None
    flip(folder / name)
    models = releases(two)
    (words,) = models.begin()
    assert words == "digits:2 was damaged on this device's disk; version 1 runs"
    assert [(each.version, each.standing, each.code) for each in reports(two.state_dir)] == [
        (1, "active", ""),
        (2, "installing", "damaged"),
    ]
    models.update_offers([ReleaseOffer("rollout-2", MODEL, 2)])
    (again,) = models.offers()
    assert "digits:2 runs" in models.install(two.who.device, two.link, again.offer, lambda: None)
    assert two.runs() == 2


def test_the_other_slot_that_rotted_is_not_gone_back_to(two: World) -> None:
    flip(slots.slot_folder(two.state_dir, MODEL, "a") / "model.tflite")
    (words,) = releases(two).begin()
    assert words == "digits:1 was damaged on this device's disk; version 2 runs"
    assert (two.runs(), two.pointer.spare) == (2, None)


def test_with_both_slots_rotten_the_daemon_goes_on_and_fetches_anew(two: World) -> None:
    for name in ("a", "b"):
        flip(two.pointer_file.with_name(name) / "model.tflite")
    models = releases(two)
    assert len(models.begin()) == 2
    assert two.runs() is None
    (report,) = reports(two.state_dir)
    assert (report.version, report.standing, report.code) == (2, "installing", "damaged")
    models.update_offers([ReleaseOffer("rollout-2", MODEL, 2)])
    (again,) = models.offers()
    models.install(two.who.device, two.link, again.offer, lambda: None)
    assert two.runs() == 2


def test_a_rubbish_pointer_changes_nothing_that_runs(two: World) -> None:
    before = reports(two.state_dir)
    two.pointer_file.write_bytes(b"\0" * 4096)
    assert reports(two.state_dir) == before
    (words,) = releases(two).begin()
    assert "restored from its copy" in words
    assert two.runs() == 2


def test_rot_is_found_while_the_daemon_runs(two: World) -> None:
    clock = Clock()
    models = releases(two, clock)
    models.begin()
    folder = slots.active_folder(two.state_dir, MODEL)
    assert folder is not None
    flip(folder / "model.tflite")
    clock.seconds += CHECK_SECONDS
    (words,) = models.maintain()
    assert "version 1 runs" in words


def test_nothing_is_written_over_the_one_version_that_is_left(two: World) -> None:
    two.lasts()
    folder = slots.active_folder(two.state_dir, MODEL)
    assert folder is not None
    flip(folder / "model.tflite")
    two.publish(3)
    offer = two.roll_out(3)
    with pytest.raises(Postponed) as raised:
        two.install(offer)
    assert (raised.value.code, two.runs()) == ("damaged", 1)
    two.install(offer)
    assert two.runs() == 3


@pytest.mark.parametrize("code", ["too_slow", "memory"])
def test_a_busy_hour_does_not_cost_a_version_that_proved_itself(two: World, code: str) -> None:
    slots.write(two.state_dir, transitions.finish_trial(two.pointer))

    def busy(*_: Any) -> self_test.SelfTestResult:
        raise Rejected(code, "not now")

    assert releases(two, run_self_test=busy).begin() == []
    assert two.runs() == 2


def test_restarts_by_a_person_are_no_crash_loop(two: World) -> None:
    for _ in range(transitions.TRIAL_STARTS + 2):
        models = releases(two, run_self_test=passes)
        assert models.begin() == []
        models.end()
    assert two.runs() == 2
    assert two.pointer.trial_starts == 0


def test_a_full_disk_keeps_no_daemon_from_starting(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock = Clock()
    models = releases(two, clock, passes)
    with monkeypatch.context() as patched:
        patched.setattr(slots, "write_durably", full)
        (words,) = models.begin()
        assert "No space left" in words
        clock.seconds += TRIAL_SECONDS
        models.maintain()
        models.end()
    assert two.pointer.trial_starts == 0
    models.maintain()
    assert two.pointer.trial_starts is None


def test_want_of_memory_at_this_hour_says_nothing_about_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fits within what this device allows, and the machine has not so much free just now."""
    folder = released.release_folder(tmp_path / "a", 1, memory_bytes=2**60)
    with pytest.raises(Postponed) as raised:
        self_test.run(SelfTestJob(folder, 2**20))
    assert raised.value.code == "self_test_broken"
    assert "memory" in raised.value.message


def test_an_evaluation_that_somebody_kills_costs_the_evaluation_only(tmp_path: Path) -> None:
    """The kernel, where the machine has no memory left, or a person."""
    result = {"passed": {"golden_accuracy": 0.5}, "at": "candidate"}
    killed = self_test.interpret(result, -signal.SIGKILL, timed_out=False, seconds=1.0, stderr="")
    assert (killed.golden_accuracy, killed.note) == (0.5, "the evaluation was interrupted")
    with pytest.raises(Rejected, match="SIGSEGV"):
        self_test.interpret(result, -signal.SIGSEGV, timed_out=False, seconds=1.0, stderr="")


def test_nothing_is_installed_while_a_version_is_on_trial(two: World) -> None:
    """What is written is the slot that the version on trial would go back to; and the next one may not even be there."""
    clock = Clock()
    models = releases(two, clock, passes)
    models.begin()
    two.publish(3)
    offer = two.roll_out(3)
    two.coordinator.refusals = {f"/releases/targets/{MODEL}/3": (404, "not_found")}
    models.update_offers([offer])
    (held,) = models.offers()
    assert held.not_before == clock.now() + TRIAL_SECONDS
    words = models.install(two.who.device, two.link, offer, lambda: None)
    assert "version 2 is on trial" in words and "(on_trial)" in words
    assert reports(two.state_dir)[-1].code == "on_trial"
    for _ in range(transitions.TRIAL_STARTS + 1):
        models = releases(two, clock, passes)
        models.begin()
        models.update_offers([offer])
        models.install(two.who.device, two.link, offer, lambda: None)
    assert two.runs() == 1


def test_the_next_version_is_installed_when_the_trial_is_over(two: World) -> None:
    clock = Clock()
    models = releases(two, clock, passes)
    models.begin()
    two.publish(3)
    models.update_offers([two.roll_out(3)])
    clock.seconds += TRIAL_SECONDS
    models.maintain()
    (due,) = models.offers()
    assert due.not_before <= clock.now()
    assert "digits:3 runs" in models.install(two.who.device, two.link, due.offer, lambda: None)


def test_the_version_before_needs_no_other_trial_on_the_way_back(two: World) -> None:
    """Else a power cut or two on the way would leave the device with the one that it was told to leave."""
    models = releases(two, run_self_test=passes)
    models.begin()
    back = two.roll_out(1, "back", action="roll_back")
    models.install(two.who.device, two.link, back, lambda: None)
    for _ in range(transitions.TRIAL_STARTS + 1):
        assert releases(two, run_self_test=passes).begin() == []
    assert two.runs() == 1


def test_a_version_that_passes_not_at_this_hour_keeps_its_slot(two: World) -> None:
    def busy(*_: Any) -> self_test.SelfTestResult:
        raise Rejected("memory", "not now")

    models = releases(two, run_self_test=busy)
    back = two.roll_out(1, "back", action="roll_back")
    assert "not installed now" in models.install(two.who.device, two.link, back, lambda: None)
    spare = two.pointer.spare
    assert spare is not None and (spare.version, spare.proved) == (1, True)


# -- offers --


@pytest.mark.parametrize("status", [500, 403])
def test_releases_that_cannot_be_read_keep_no_device_from_its_work(ota: World, status: int) -> None:
    ota.publish(1)
    ota.coordinator.offers = (ota.roll_out(1),)
    ota.coordinator.refusals = {"/releases": (status, "broken")}
    made = daemon(ota.state_dir)
    made.ticks(lambda: any("refuses" in line or "broken" in line for line in made.reported))
    requested = len(ota.coordinator.checkins)
    task = ota.coordinator.offer()
    made.ticks(lambda: task.task in ota.coordinator.accepted)
    assert len(ota.coordinator.checkins) > requested
    ota.coordinator.refusals = {}
    made.ticks(lambda: ota.runs() == 1)


def test_offers_that_are_no_news_are_not_taken_up(two: World) -> None:
    models = releases(two)
    assert models.update_offers([ReleaseOffer("rollout-2", MODEL, 2)]) == []
    assert models.offers() == ()
    (note,) = models.update_offers([ReleaseOffer("r", "../../etc", 2)])
    assert "not a model's name" in note
    models.update_offers([ReleaseOffer("r", MODEL, 3)])
    assert [each.offer.version for each in models.offers()] == [3]
    models.update_offers([])
    assert models.offers() == ()


def test_failures_are_retried_at_growing_intervals(two: World) -> None:
    clock = Clock()
    models = releases(two, clock)
    offer = ReleaseOffer("rollout-3", MODEL, 3)
    waits = []
    for _ in range(8):
        models.update_offers([offer])
        assert "ignored" in models.install(two.who.device, two.link, offer, lambda: None)
        (again,) = models.offers()
        waits.append(again.not_before - clock.now())
    assert 5 <= waits[0] <= 15
    assert max(waits) > 60


def test_another_rollout_hears_that_the_version_failed_here(two: World) -> None:
    offer = ReleaseOffer("first", MODEL, 3)
    slots.write(two.state_dir, transitions.record_failure(two.pointer, offer, "self_test", "wrong"))
    models = releases(two)
    models.update_offers([replace(offer, rollout="second")])
    assert models.offers() == ()
    assert [(each.rollout, each.code) for each in reports(two.state_dir)][1] == ("second", "self_test")


# -- the daemon --


def test_the_daemon_installs_what_it_is_offered_and_says_so(ota: World) -> None:
    ota.publish(1)
    ota.coordinator.offers = (ota.roll_out(1),)
    made = daemon(ota.state_dir)
    made.ticks(lambda: any(message.releases for _, message in ota.coordinator.checkins))
    (report,) = ota.coordinator.checkins[-1][1].releases
    assert (report.model, report.version, report.standing) == (MODEL, 1, "active")
    assert any("digits:1 runs" in line for line in made.reported)
    shown = CliRunner().invoke(cli.app, ["--state-dir", str(ota.state_dir), "status"])
    assert "model digits: version 1 in slot a, on trial" in shown.stdout


def test_the_daemon_trains_first_and_installs_then(ota: World) -> None:
    ota.publish(1)
    ota.coordinator.offers = (ota.roll_out(1),)
    task = ota.coordinator.offer()
    made = daemon(ota.state_dir)
    made.ticks(lambda: ota.runs() == 1)
    assert ota.coordinator.acceptances == [task.task]
    order = [line.split(":")[0] for line in made.reported if line.startswith("STATUS=")]
    assert (
        order.index("STATUS=training") < order.index("STATUS=delivering") < order.index("STATUS=installing")
    )


def test_a_paused_device_installs_nothing(ota: World) -> None:
    ota.publish(1)
    ota.coordinator.offers = (ota.roll_out(1),)
    made = daemon(ota.state_dir)
    made.executor.state.set_paused(True)
    made.ticks(lambda: len(ota.coordinator.checkins) >= 3)
    assert ota.runs() is None
    made.executor.state.set_paused(False)
    made.ticks(lambda: ota.runs() == 1)


def test_a_device_that_leaves_keeps_no_model(ota: World) -> None:
    ota.publish(1)
    ota.install(ota.roll_out(1), run_self_test=passes)
    daemon(ota.state_dir).executor.wipe()
    assert slots.models(ota.state_dir) == ()
