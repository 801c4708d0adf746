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

from edge_client import cli
from edge_client.connectors import DataConfig
from edge_client.ota import proof, slots
from edge_client.ota.proof import Question
from edge_client.ota.releases import TRIAL_SECONDS, Releases, reports
from edge_client.ota.trouble import PutOff, Unfit
from edge_client.wire.device import ReleaseOffer
from tests.support import released
from tests.support.edge import Clock, daemon
from tests.support.ota import MODEL, World, world


@pytest.fixture
def ota(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


@pytest.fixture
def two(ota: World) -> World:
    """Version 2 runs, on trial; version 1 is in the other slot."""
    for version, kind in ((1, "first"), (2, "second")):
        ota.publish(version, kind)  # type: ignore[arg-type]
        ota.install(ota.roll_out(version), prove=passes)
    return ota


def passes(question: Question, going: Any = None) -> proof.Proof:
    return proof.Proof(1.0)


def releases(ota: World, clock: Clock | None = None, prove: Any = proof.prove) -> Releases:
    return Releases(ota.config, (clock or Clock()).now, random.Random(1), prove)


def spoil(ota: World) -> None:
    """The active slot's file is damaged on disk."""
    folder = slots.active_folder(ota.state_dir, MODEL)
    assert folder is not None
    (folder / "model.tflite").write_bytes(b"no model")


# -- the child --


def test_a_runtime_that_crashes_is_a_failure_of_the_version_not_of_the_daemon(tmp_path: Path) -> None:
    folder = released.release_folder(tmp_path / "a", 1)

    def crash() -> None:
        for child in psutil.Process().children():
            if "edge_client.ota.proof" in child.cmdline():
                os.kill(child.pid, signal.SIGSEGV)

    with pytest.raises(Unfit, match="SIGSEGV") as told:
        proof.prove(Question(folder, 2**20), crash)
    assert told.value.code == "crashed"
    assert list(tmp_path.glob(".*")) == []


def test_a_self_test_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    folder = released.release_folder(tmp_path / "a", 1)
    with pytest.raises(Unfit) as told:
        proof.prove(Question(folder, 2**20), seconds=0.0)
    assert told.value.code == "too_slow"
    assert not [each for each in psutil.Process().children() if "edge_client.ota.proof" in each.cmdline()]


def test_a_machine_that_can_start_no_process_says_nothing_about_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = released.release_folder(tmp_path / "a", 1)
    monkeypatch.setattr(proof.sys, "executable", str(tmp_path / "none"))
    with pytest.raises(PutOff, match="no process can be started") as told:
        proof.prove(Question(folder, 2**20))
    assert told.value.code == "self_test_broken"
    assert list(tmp_path.glob(".*")) == []


def test_a_self_test_that_somebody_kills_says_nothing_about_the_version(tmp_path: Path) -> None:
    folder = released.release_folder(tmp_path / "a", 1)

    def kill() -> None:
        for child in psutil.Process().children():
            child.kill()

    with pytest.raises(PutOff) as told:
        proof.prove(Question(folder, 2**20), kill)
    assert told.value.code == "self_test_broken"


def test_data_that_cannot_be_read_costs_the_evaluation_only(tmp_path: Path) -> None:
    folder = released.release_folder(tmp_path / "a", 1)
    data = DataConfig("csv", tmp_path / "missing.csv", {"label": "label"})
    found = proof.prove(Question(folder, 2**20, data=data))
    assert found.golden_accuracy == 0.9375
    assert found.evaluation is None
    assert "missing.csv" in found.note


# -- trials --


def test_a_version_that_lasts_has_proved_itself(two: World) -> None:
    clock = Clock()
    models = releases(two, clock, passes)
    assert models.begin() == []
    models.tend()
    assert two.pointer.trial_starts == 1
    clock.seconds += TRIAL_SECONDS
    models.tend()
    assert two.pointer.trial_starts is None


def test_a_daemon_that_never_lasts_falls_back(two: World) -> None:
    for _ in range(slots.TRIAL_STARTS):
        assert releases(two, prove=passes).begin() == []
        assert two.pointer.running == slots.Slot(2, "rollout-2", 1.0)
    (words,) = releases(two, prove=passes).begin()
    assert "digits:2 is not used any more" in words and "(crash_loop); version 1 runs again" in words
    assert two.runs() == 1
    assert [(each.version, each.standing) for each in reports(two.state_dir)] == [
        (1, "active"),
        (2, "rolled_back"),
    ]


def test_a_slot_that_was_damaged_falls_back_at_the_next_start(two: World) -> None:
    spoil(two)
    (words,) = releases(two).begin()
    assert "(bad_artifact); version 1 runs again" in words
    assert two.runs() == 1


def test_with_both_slots_damaged_there_is_no_model_and_the_daemon_goes_on(two: World) -> None:
    spoil(two)
    two.pointer_file.with_name("a").joinpath("model.tflite").unlink()
    assert len(releases(two).begin()) == 2
    assert two.runs() is None
    assert [each.standing for each in reports(two.state_dir)] == ["rolled_back"]
    two.publish(3)
    two.install(two.roll_out(3), prove=passes)
    assert two.runs() == 3


@pytest.mark.parametrize("code", ["too_slow", "memory"])
def test_a_busy_hour_does_not_cost_a_version_that_proved_itself(two: World, code: str) -> None:
    slots.write(two.state_dir, slots.proved(two.pointer))

    def busy(*_: Any) -> proof.Proof:
        raise Unfit(code, "not now")

    assert releases(two, prove=busy).begin() == []
    assert two.runs() == 2


def test_restarts_by_a_person_are_no_crash_loop(two: World) -> None:
    for _ in range(slots.TRIAL_STARTS + 2):
        models = releases(two, prove=passes)
        assert models.begin() == []
        models.end()
    assert two.pointer.running == slots.Slot(2, "rollout-2", 1.0)
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
        models.tend()
        models.end()
    assert two.pointer.trial_starts == 0
    models.tend()
    assert two.pointer.trial_starts is None


def test_want_of_memory_at_this_hour_says_nothing_about_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fits within what this device allows, and the machine has not so much free just now."""
    folder = released.release_folder(tmp_path / "a", 1, memory_bytes=2**60)
    with pytest.raises(PutOff) as told:
        proof.prove(Question(folder, 2**20))
    assert told.value.code == "self_test_broken"
    assert "memory" in told.value.words


def test_an_evaluation_that_somebody_kills_costs_the_evaluation_only(tmp_path: Path) -> None:
    """The kernel, where the machine has no memory left, or a person."""
    told = {"passed": {"golden_accuracy": 0.5}, "at": "candidate"}
    killed = proof.judged(told, -signal.SIGKILL, late=False, seconds=1.0, said="")
    assert (killed.golden_accuracy, killed.note) == (0.5, "the evaluation broke off")
    with pytest.raises(Unfit, match="SIGSEGV"):
        proof.judged(told, -signal.SIGSEGV, late=False, seconds=1.0, said="")


# -- offers --


@pytest.mark.parametrize("status", [500, 403])
def test_releases_that_cannot_be_read_keep_no_device_from_its_work(ota: World, status: int) -> None:
    ota.publish(1)
    ota.coordinator.offers = (ota.roll_out(1),)
    ota.coordinator.refusals = {"/releases": (status, "broken")}
    made = daemon(ota.state_dir)
    made.ticks(lambda: any("refuses" in line or "broken" in line for line in made.told))
    asked = len(ota.coordinator.checkins)
    task = ota.coordinator.offer()
    made.ticks(lambda: task.task in ota.coordinator.accepted)
    assert len(ota.coordinator.checkins) > asked
    ota.coordinator.refusals = {}
    made.ticks(lambda: ota.runs() == 1)


def test_offers_that_are_no_news_are_not_taken_up(two: World) -> None:
    models = releases(two)
    assert models.heard([ReleaseOffer("rollout-2", MODEL, 2)]) == []
    assert models.offers() == ()
    (note,) = models.heard([ReleaseOffer("r", "../../etc", 2)])
    assert "no model's name" in note
    models.heard([ReleaseOffer("r", MODEL, 3)])
    assert [each.offer.version for each in models.offers()] == [3]
    models.heard([])
    assert models.offers() == ()


def test_what_failed_is_tried_again_later_and_later(two: World) -> None:
    clock = Clock()
    models = releases(two, clock)
    offer = ReleaseOffer("rollout-3", MODEL, 3)
    waits = []
    for _ in range(8):
        models.heard([offer])
        assert "ignored" in models.install(two.who.device, two.link, offer, lambda: None)
        (again,) = models.offers()
        waits.append(again.not_before - clock.now())
    assert 5 <= waits[0] <= 15
    assert max(waits) > 60


def test_another_rollout_hears_that_the_version_failed_here(two: World) -> None:
    offer = ReleaseOffer("first", MODEL, 3)
    slots.write(two.state_dir, slots.failed(two.pointer, offer, "self_test", "wrong"))
    models = releases(two)
    models.heard([replace(offer, rollout="second")])
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
    assert any("digits:1 runs" in line for line in made.told)
    shown = CliRunner().invoke(cli.app, ["--state-dir", str(ota.state_dir), "status"])
    assert "model digits: version 1 in slot a, on trial" in shown.stdout


def test_the_daemon_trains_first_and_installs_then(ota: World) -> None:
    ota.publish(1)
    ota.coordinator.offers = (ota.roll_out(1),)
    task = ota.coordinator.offer()
    made = daemon(ota.state_dir)
    made.ticks(lambda: ota.runs() == 1)
    assert ota.coordinator.acceptances == [task.task]
    order = [line.split(":")[0] for line in made.told if line.startswith("STATUS=")]
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
    ota.install(ota.roll_out(1), prove=passes)
    daemon(ota.state_dir).executor.wipe()
    assert slots.models(ota.state_dir) == ()
