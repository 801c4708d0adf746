"""The daemon as a process: signals, SIGKILL, memory, one to a folder, a proxy between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from edge_client.outbox import Ledger, Outbox
from edge_client.state import State
from edge_client.transport.link import SILENCE_SECONDS
from tests.support import fake_coordinator
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.proxies import ConnectProxy

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SECONDS = 60


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator(hold=True).running() as fake:
        yield fake


def edge(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(folder, *arguments),
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def command(folder: Path, *arguments: str) -> list[str]:
    data = ["--set", "data.digits.kind=csv", "--set", "data.digits.path=/nowhere"]
    return [sys.executable, "-m", "tests.support.edge_daemon", "--state-dir", str(folder), *data, *arguments]


@contextmanager
def running(folder: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(folder, "run"), cwd=ROOT, env={**os.environ, **env}, text=True, stderr=-1
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(SECONDS)
        assert process.stderr is not None
        process.stderr.close()


def enrolled(coordinator: FakeCoordinator, folder: Path, **env: str) -> None:
    done = edge(folder, "enroll", coordinator.url, coordinator.token, **env)
    assert done.returncode == 0, done.stderr


def test_a_daemon_enrols_trains_and_ends_clean_on_sigterm(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    offer = coordinator.offer()
    with running(tmp_path) as process:
        coordinator.wait_for(lambda: offer.task in coordinator.accepted)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        log = process.stderr.read()
    assert all(
        f" {each}: " in log for each in ("starting", "fetching", "training", "delivering", "stopped")
    ), log
    assert json.loads(edge(tmp_path, "status", "--json").stdout)["running"] is False


def test_a_result_survives_sigkill_and_is_delivered_once(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    offer = coordinator.offer()
    coordinator.refusals["/tasks/"] = (503, "busy")
    with running(tmp_path) as process:
        while not stored(tmp_path):
            assert process.poll() is None
        process.kill()
    del coordinator.refusals["/tasks/"]
    with running(tmp_path, FEDLOOP_TEST_TRAINS_UNTIL="/nowhere") as process:
        coordinator.wait_for(lambda: offer.task in coordinator.accepted)
    assert coordinator.acceptances == [offer.task]


def stored(folder: Path) -> bool:
    state = State(folder)
    try:
        return bool(Outbox(state, 10**9).pending())
    finally:
        state.close()


def test_sigkill_in_mid_training_leaves_the_task_to_the_next_start(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    offer = coordinator.offer(lease_seconds=0.3)
    done = tmp_path / "done"
    with running(tmp_path, FEDLOOP_TEST_TRAINS_UNTIL=str(done)) as process:
        coordinator.wait_for(lambda: any(m.working_on == offer.task for _, m in coordinator.checkins))
        process.kill()
    done.touch()
    with running(tmp_path, FEDLOOP_TEST_TRAINS_UNTIL=str(done)):
        coordinator.wait_for(lambda: offer.task in coordinator.accepted)
    assert coordinator.declined == {}


def test_sigterm_in_mid_training_ends_at_once_and_keeps_the_task(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    offer = coordinator.offer(lease_seconds=0.3)
    with running(tmp_path, FEDLOOP_TEST_TRAINS_UNTIL="/nowhere") as process:
        coordinator.wait_for(lambda: any(m.working_on == offer.task for _, m in coordinator.checkins))
        process.terminate()
        assert process.wait(SECONDS) == 0
    state = State(tmp_path)
    held = state.task()
    state.close()
    assert held is not None and held.task == offer.task


def test_pause_stops_what_runs_and_resume_goes_on(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    first = coordinator.offer(lease_seconds=0.3)
    done = tmp_path / "done"
    with running(tmp_path, FEDLOOP_TEST_TRAINS_UNTIL=str(done)):
        coordinator.wait_for(lambda: any(m.working_on == first.task for _, m in coordinator.checkins))
        assert edge(tmp_path, "pause").returncode == 0
        coordinator.wait_for(lambda: first.task in coordinator.declined)
        done.touch()
        second = coordinator.offer()
        assert edge(tmp_path, "resume").returncode == 0
        coordinator.wait_for(lambda: second.task in coordinator.accepted)


def test_an_idle_daemon_is_woken_from_a_held_check_in(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    with running(tmp_path) as process:
        coordinator.wait_for(lambda: any(m.wait_seconds > 0 for _, m in coordinator.checkins))
        process.terminate()
        assert process.wait(SECONDS) == 0


@pytest.mark.parametrize("what", ["_check_in", "_blob", "_task"])
def test_a_coordinator_that_hangs_keeps_no_daemon_from_ending(
    coordinator: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        reached.set()
        go_on.wait(SECONDS)
        raise AssertionError("nobody waits for this any more")

    enrolled(coordinator, tmp_path)
    coordinator.offer()
    monkeypatch.setattr(fake_coordinator._Handler, what, hangs)
    try:
        with running(tmp_path) as process:
            assert reached.wait(SECONDS)
            process.send_signal(signal.SIGTERM)
            assert process.wait(SILENCE_SECONDS / 3) == 0
    finally:
        go_on.set()


def test_one_daemon_to_a_state_folder(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    with running(tmp_path) as process:
        coordinator.wait_for(lambda: len(coordinator.checkins) > 0)
        second = edge(tmp_path, "run")
        assert second.returncode == 2
        assert str(process.pid) in second.stderr


def test_a_revoked_daemon_ends_with_its_own_exit_code(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    coordinator.refusals["/checkin"] = (403, "revoked")
    done = edge(tmp_path, "run")
    assert done.returncode == 77
    assert "no longer accepts this device" in done.stderr


def test_everything_goes_through_the_proxy_of_the_environment(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    with ConnectProxy() as proxy:
        env = {"HTTPS_PROXY": proxy.url, "NO_PROXY": "", "no_proxy": ""}
        enrolled(coordinator, tmp_path, **env)
        offer = coordinator.offer()
        before = len(proxy.requests)
        with running(tmp_path, **env):
            coordinator.wait_for(lambda: offer.task in coordinator.accepted)
        assert before > 0 and len(proxy.requests) > before
        assert {line.split()[1] for line in proxy.requests} == {coordinator.url.removeprefix("https://")}


def test_no_proxy_names_hosts_that_are_reached_directly(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    with ConnectProxy() as proxy:
        enrolled(coordinator, tmp_path, HTTPS_PROXY=proxy.url, NO_PROXY="localhost")
        assert proxy.requests == []


def test_leaving_tells_the_coordinator_and_removes_the_key(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    assert edge(tmp_path, "leave").returncode == 2  # nobody to ask
    done = edge(tmp_path, "leave", "--yes")
    assert done.returncode == 0, done.stderr
    assert len(coordinator.left) == 1
    assert not (tmp_path / "identity").exists() and not (tmp_path / "identities").exists()
    assert edge(tmp_path, "run").returncode == 2


def test_the_ledger_shows_what_left(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    offer = coordinator.offer()
    with running(tmp_path):
        coordinator.wait_for(lambda: offer.task in coordinator.accepted)
        coordinator.wait_for(lambda: outcomes(tmp_path) == ["delivered"])
    (entry,) = json.loads(edge(tmp_path, "ledger", "--json").stdout)
    assert (entry["run_name"], entry["kind"], entry["outcome"]) == ("demo", "update", "delivered")
    shown = edge(tmp_path, "ledger", "--show", "1").stdout
    assert "delta/w" in shown and "(1000,)" in shown and "norm" in shown
    explained = json.loads(edge(tmp_path, "ledger", "--explain").stdout)
    assert explained["check-in"]["datasets"] == {"digits": 12}
    assert edge(tmp_path, "ledger", "--show", "9").returncode == 2
    assert edge(tmp_path, "ledger", "--wipe", "--yes").returncode == 0
    assert json.loads(edge(tmp_path, "ledger", "--json").stdout) == []


def outcomes(folder: Path) -> list[str]:
    state = State(folder)
    try:
        return [entry.outcome for entry in Ledger(state).entries()]
    finally:
        state.close()


def test_the_daemon_is_small_and_takes_no_framework(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    enrolled(coordinator, tmp_path)
    coordinator.hold = False
    coordinator.next_seconds = 60.0
    process = subprocess.Popen(
        [Path(sys.executable).with_name("fedloop-edge"), "--state-dir", str(tmp_path), "run"], cwd=ROOT
    )
    try:
        coordinator.wait_for(lambda: len(coordinator.checkins) > 0)
        assert psutil.Process(process.pid).memory_info().rss < 90_000_000
    finally:
        process.terminate()
        assert process.wait(SECONDS) == 0
