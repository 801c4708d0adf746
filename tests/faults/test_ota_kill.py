"""SIGKILL of a daemon at each step of an install, as a power cut would: it starts with a model that works, then completes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_client import failpoints
from edge_client.ota import transitions
from tests.support.long import extended
from tests.support.ota import World, world
from tests.support.processes import HANGS_SECONDS

pytestmark = pytest.mark.slow

BEFORE_FLIP = (
    "install.trusted",
    "install.begun",
    "install.manifest",
    "install.part:2",
    "install.fetched",
    "install.tested",
    "install.flipping",
)
AFTER_FLIP = ("install.flipped",)


@pytest.fixture
def ota(tmp_path: Path) -> Iterator[World]:
    """Version 1 runs, version 2 is offered."""
    with world(tmp_path) as made:
        made.publish(1)
        made.install(made.roll_out(1))
        made.lasts()
        made.publish(2, "second")
        made.coordinator.offers = (made.roll_out(2),)
        made.coordinator.next_seconds = 0.2
        yield made


@contextmanager
def started(ota: World, failpoint: str = "") -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.support.edge_daemon", "--state-dir", str(ota.state_dir), "run"]
    with (ota.home / "daemon.log").open("ab") as log:
        daemon = subprocess.Popen(
            command, env={**os.environ, failpoints.VARIABLE: failpoint}, stdout=log, stderr=log
        )
    try:
        yield daemon
    finally:
        daemon.kill()
        daemon.wait()


def killed_at(ota: World, failpoint: str) -> None:
    """The daemon runs until it is killed there."""
    with started(ota, failpoint) as daemon:
        assert daemon.wait(HANGS_SECONDS) == -signal.SIGKILL, (ota.home / "daemon.log").read_text()


def completes(ota: World, version: int = 2) -> None:
    """A daemon that is started again gets there, and tells it."""
    heard = len(ota.coordinator.checkins)

    def reported() -> bool:
        reports = [each for _, message in ota.coordinator.checkins[heard:] for each in message.releases]
        return any((each.version, each.standing) == (version, "active") for each in reports)

    with started(ota) as daemon:
        ota.coordinator.wait_for(reported)
        assert daemon.poll() is None
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(HANGS_SECONDS) == 0
    assert ota.runs() == version


@pytest.mark.parametrize("failpoint", [BEFORE_FLIP[-1], *extended(*BEFORE_FLIP[:-1])])
def test_killed_before_the_flip_the_old_version_runs_and_the_install_completes(
    ota: World, failpoint: str
) -> None:
    killed_at(ota, failpoint)
    assert ota.runs() == 1
    completes(ota)


@pytest.mark.parametrize("failpoint", AFTER_FLIP)
def test_killed_after_the_flip_the_new_version_runs_on_trial(ota: World, failpoint: str) -> None:
    killed_at(ota, failpoint)
    assert ota.runs() == 2
    assert ota.pointer.trial_starts == 0
    completes(ota)
    assert ota.pointer.trial_starts == 0, "the daemon that completed it ended in order"


@pytest.mark.extended
def test_killed_at_every_start_it_goes_back_and_tries_that_version_no_more(ota: World) -> None:
    killed_at(ota, "install.flipped")
    for _ in range(transitions.TRIAL_STARTS):
        killed_at(ota, "install.proving")
        assert ota.runs() == 2
    killed_at(ota, "install.proving")
    killed_at(ota, "install.turning")
    assert ota.runs() == 2
    killed_at(ota, "install.turned")
    assert ota.runs() == 1
    completes(ota, version=1)
    failure = ota.pointer.failure(2)
    assert failure is not None and failure.code == "crash_loop"


@pytest.mark.extended
def test_killed_on_the_way_back_it_runs_the_one_or_the_other(ota: World) -> None:
    completes(ota)
    back = ota.roll_out(1, "rollout-2", action="roll_back")
    ota.coordinator.offers = (back,)
    killed_at(ota, "install.turning")
    assert ota.runs() == 2
    killed_at(ota, "install.turned")
    assert ota.runs() == 1
    completes(ota, version=1)


@pytest.mark.extended
def test_killed_at_any_moment_it_has_a_model_that_works(ota: World) -> None:
    """Not only where we thought of it."""
    for wait_seconds in (0.4, 0.9, 1.4):
        with started(ota) as daemon:
            heard = len(ota.coordinator.checkins)
            ota.coordinator.wait_for(lambda heard=heard: len(ota.coordinator.checkins) > heard)
            time.sleep(wait_seconds)
            daemon.kill()
        assert ota.runs() in (1, 2)
    completes(ota)


def test_every_failpoint_of_an_install_is_tried() -> None:
    tried = {each.partition(":")[0] for each in (*BEFORE_FLIP, *AFTER_FLIP)}
    starts_and_ways_back = {"install.proving", "install.turning", "install.turned"}
    lasting = {"install.proved"}  # a minute after the start; what is written there changes nothing that runs
    assert tried | starts_and_ways_back | lasting == set(failpoints.NAMES)
