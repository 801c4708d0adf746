"""The worker pool with real processes: errors arrive in words, nothing leaks between batches, nothing outlives it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from coordinator.errors import UserError
from coordinator.workers.pool import (
    DIED,
    JOBS_PER_WORKER,
    PoolJob,
    WorkerDied,
    WorkerPool,
)
from edge_client.processes.channel import Frame

pytestmark = pytest.mark.fresh_workers

HANGS_SECONDS = 60
"""A process that has not ended by then never will."""


def preparing(folder: Path, samples: int = 3, **data: Any) -> dict[str, Any]:
    """A job that makes `samples` rows for each of 2 clients, and answers with what it found."""
    described = {
        "dataset": f"synthetic(shape=[2], classes=2, samples={samples})", "path": None, "label": "label",
        "site": None, "split": None, "features": None, "length": None, "vocab": None, "partition": "iid",
        "public_samples": 0,
    } | data  # fmt: skip
    return {
        "kind": "prepare",
        "folder": str(folder),
        "seed": 7,
        "data": described,
        "clients": 2,
        "data_dir": None,
    }


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    with WorkerPool(2, tmp_path_factory.mktemp("pool") / "workers.log") as running:
        yield running


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[tuple[WorkerPool, psutil.Process]]:
    """A pool of one worker, and that worker."""
    before = set(psutil.Process().children())
    with WorkerPool(1, tmp_path / "workers.log") as running:
        (worker,) = set(psutil.Process().children()) - before
        yield running, worker


def below() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def ended(pids: list[int], seconds: float = HANGS_SECONDS) -> list[bool]:
    """For each process whether it ends within `seconds`."""
    answers = []
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            answers.append(True)
            continue
        try:
            answers.append(bool(select.select([handle], [], [], seconds)[0]))
        finally:
            os.close(handle)
    return answers


# Jobs


def test_every_job_has_its_own_reply(pool: WorkerPool, tmp_path: Path) -> None:
    jobs = [PoolJob(i, preparing(tmp_path / str(i), samples=i)) for i in range(1, 12)]
    replies = {job.key: reply.values["examples"] for job, reply in pool.run(jobs)}
    assert replies == {i: [i, i] for i in range(1, 12)}


def test_jobs_are_drawn_only_when_a_worker_is_free_for_one(pool: WorkerPool, tmp_path: Path) -> None:
    """So that a round that is left early has not begun the clients it would not have waited for."""
    drawn: list[int] = []

    def source() -> Iterator[PoolJob]:
        for i in range(100):
            drawn.append(i)
            yield PoolJob(i, preparing(tmp_path / str(i)))

    replies = pool.run(source())
    next(replies)
    replies.close()  # type: ignore[attr-defined]
    assert len(drawn) <= 2 * JOBS_PER_WORKER + 1


def test_replies_of_an_abandoned_batch_do_not_leak_into_the_next(pool: WorkerPool, tmp_path: Path) -> None:
    for turn in range(5):
        replies = pool.run(
            [PoolJob(("old", i), preparing(tmp_path / f"{turn}-old-{i}", samples=2)) for i in range(4)]
        )
        next(replies)
        replies.close()  # type: ignore[attr-defined]
        jobs = [PoolJob(("new", i), preparing(tmp_path / f"{turn}-new-{i}", samples=5)) for i in range(4)]
        got = [(job.key, reply.values["examples"]) for job, reply in pool.run(jobs)]
        assert sorted(got) == [(("new", i), [5, 5]) for i in range(4)]


def test_an_error_of_an_abandoned_batch_does_not_leak_either(pool: WorkerPool, tmp_path: Path) -> None:
    jobs = [
        PoolJob(0, preparing(tmp_path / "fine")),
        *(PoolJob(i, preparing(tmp_path, dataset="nothing")) for i in range(1, 4)),
    ]
    replies = pool.run(jobs)
    with pytest.raises(UserError):
        list(replies)
    assert pool.run_one(preparing(tmp_path / "next", samples=4)).values["examples"] == [4, 4]


def test_a_mistake_in_the_data_arrives_as_the_users_error(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        pool.run_one(preparing(tmp_path, dataset="csv", path=str(tmp_path / "none.csv")))
    assert str(tmp_path / "none.csv") in str(caught.value)
    assert "failed: " not in str(caught.value)  # as our own failures say


def test_a_batch_without_jobs_ends_at_once(pool: WorkerPool) -> None:
    assert list(pool.run([])) == []


# What goes wrong


def test_our_own_failure_is_reported_in_a_line_and_logged_in_full(
    lone: tuple[WorkerPool, psutil.Process], tmp_path: Path
) -> None:
    running, _ = lone
    with pytest.raises(UserError, match="prepare failed: KeyError: 'folder'"):
        running.run_one({"kind": "prepare"})
    assert "Traceback" in (tmp_path / "workers.log").read_text()


def test_a_worker_that_cannot_apply_a_broadcast_fails_each_job_with_the_reason(
    lone: tuple[WorkerPool, psutil.Process], tmp_path: Path
) -> None:
    running, _ = lone
    running.broadcast({"kind": "open", "folder": str(tmp_path / "nowhere"), "model": {}})
    for _ in range(2):
        with pytest.raises(UserError, match="open failed: FileNotFoundError"):
            running.run_one(preparing(tmp_path / "work"))


# A worker that dies

KILLER = """
import os, signal


def load():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killer(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job that ends each worker that runs it."""
    folder = tmp_path_factory.mktemp("killer")
    (folder / "killer.py").write_text(KILLER)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return preparing(folder / "work", dataset="killer:load")


def killing(process: psutil.Process, jobs: list[PoolJob]) -> Iterator[PoolJob]:
    """The jobs; the process is killed once it has the first one."""
    process.send_signal(signal.SIGSTOP)  # so that it does not answer before it is killed
    yield jobs[0]
    process.kill()
    yield from jobs[1:]


def numbered(folder: Path, count: int = 6) -> list[PoolJob]:
    return [PoolJob(i, preparing(folder / str(i), samples=i + 1)) for i in range(count)]


def examples(replies: Iterable[tuple[PoolJob, Frame]]) -> dict[int, list[int]]:
    return {job.key: reply.values["examples"] for job, reply in replies}


ALL = {i: [i + 1, i + 1] for i in range(6)}


def test_the_job_of_a_worker_killed_at_work_is_done_by_another(
    lone: tuple[WorkerPool, psutil.Process], tmp_path: Path
) -> None:
    running, worker = lone
    assert examples(running.run(killing(worker, numbered(tmp_path)))) == ALL


@pytest.mark.parametrize("more", [0, 1])
def test_only_with_a_worker_for_every_core_does_each_stay_on_its_own(tmp_path: Path, more: int) -> None:
    cores = os.sched_getaffinity(0)
    before = set(psutil.Process().children())
    with WorkerPool(len(cores) + more, tmp_path / "workers.log") as running:
        jobs = [PoolJob(at, preparing(tmp_path / f"{at}")) for at in range(2 * (len(cores) + more))]
        for at in range(len(jobs)):
            (tmp_path / f"{at}").mkdir()
        assert len(list(running.run(jobs))) == len(jobs)
        (parent,) = set(psutil.Process().children()) - before
        found = [each.cpu_affinity() for each in parent.children()]
    expected = [[core] for core in cores] if not more else [list(cores)] * len(found)
    assert sorted(found) == expected


def test_a_worker_killed_at_rest_is_replaced_with_the_next_job(
    lone: tuple[WorkerPool, psutil.Process], tmp_path: Path
) -> None:
    running, worker = lone
    running.run_one(preparing(tmp_path / "work"))
    worker.kill()
    assert ended([worker.pid]) == [True]
    assert running.run_one(preparing(tmp_path / "more", samples=4)).values["examples"] == [4, 4]


def test_the_one_that_replaces_it_has_heard_what_the_others_have(
    lone: tuple[WorkerPool, psutil.Process], tmp_path: Path
) -> None:
    running, worker = lone
    running.broadcast({"kind": "open", "folder": str(tmp_path / "nowhere"), "model": {}})
    worker.kill()
    with pytest.raises(UserError, match="open failed: FileNotFoundError"):
        running.run_one(preparing(tmp_path / "work"))


def test_a_job_that_ends_its_workers_is_reported_with_the_end_of_the_log(
    killer: dict[str, Any], tmp_path: Path
) -> None:
    with WorkerPool(1, tmp_path / "workers.log") as running:
        with pytest.raises(UserError):
            running.run_one({"kind": "prepare"})  # leaves a traceback in the log
        with pytest.raises(WorkerDied) as caught:
            running.run_one(killer)
    reason = str(caught.value)
    assert f"a worker process ended with signal 9; the end of {tmp_path / 'workers.log'}:" in reason
    assert "KeyError: 'folder'" in reason


def test_a_job_that_ends_its_workers_may_be_given_up_and_the_others_are_done(
    killer: dict[str, Any], tmp_path: Path
) -> None:
    with WorkerPool(2, tmp_path / "workers.log") as running:
        replies = list(running.run([PoolJob("killer", killer, may_die=True), *numbered(tmp_path)]))
    given_up = [reply.values for job, reply in replies if job.key == "killer"]
    assert given_up == [{DIED: "signal 9"}]
    assert examples(each for each in replies if each[0].key != "killer") == ALL


def forked(pool_of_two: WorkerPool, folder: Path) -> tuple[psutil.Process, list[psutil.Process]]:
    """The process that workers are forked from, and the workers."""
    assert examples(pool_of_two.run(numbered(folder))) == ALL  # so that they are there
    servers = [each for each in psutil.Process().children() if each.children()]
    server = max(servers, key=lambda each: each.create_time())  # not that of the fixture
    return server, server.children()


def test_one_of_several_killed_at_work_is_replaced_and_the_other_goes_on(tmp_path: Path) -> None:
    with WorkerPool(2, tmp_path / "workers.log") as running:
        server, (first, second) = forked(running, tmp_path)
        assert examples(running.run(killing(second, numbered(tmp_path)))) == ALL
        assert first in server.children()
        assert len(server.children()) == 2


def test_where_the_process_is_killed_that_forks_workers_all_start_anew(tmp_path: Path) -> None:
    with WorkerPool(2, tmp_path / "workers.log") as running:
        server, workers = forked(running, tmp_path)
        server.kill()
        assert ended([each.pid for each in workers]) == [True, True]
        another, others = forked(running, tmp_path)
        assert another.pid != server.pid and len(others) == 2
    assert not any(each.is_running() for each in [another, *others])


# What is left behind


def test_closing_ends_and_reaps_every_worker(tmp_path: Path) -> None:
    before = below()
    with WorkerPool(2, tmp_path / "workers.log") as running:
        list(running.run(PoolJob(i, preparing(tmp_path / str(i))) for i in range(4)))
        workers = below() - before
        assert len(workers) == 3  # and the one that they were forked from
    assert not any(worker.is_running() for worker in workers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "workers.log"]


def test_a_pool_can_be_closed_before_its_workers_are_there(tmp_path: Path) -> None:
    before = below()
    WorkerPool(2, tmp_path / "workers.log", ["json.tool"]).close()
    assert below() == before


def test_a_failed_import_is_reported_with_the_first_job(tmp_path: Path) -> None:
    with (
        WorkerPool(2, tmp_path / "workers.log", ["no_such_module"]) as running,
        pytest.raises(WorkerDied, match=r"exit code 1(.|\n)*No module named 'no_such_module'"),
    ):
        running.run_one(preparing(tmp_path / "work"))


def test_nothing_is_forked_where_an_import_has_started_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        WorkerPool(2, tmp_path / "workers.log", ["threaded"]) as running,
        pytest.raises(WorkerDied, match="an imported module has started threads"),
    ):
        running.run_one(preparing(tmp_path / "work"))


# Says who its workers are, then does what it is asked to until somebody kills it.
PARENT = """
import sys, psutil
from pathlib import Path
from coordinator.workers.pool import PoolJob, WorkerPool
from tests.coordinator.test_pool import preparing

folder, how = Path(sys.argv[1]), sys.argv[2]
pool = WorkerPool(2, folder / "workers.log")
if how != "starting":
    list(pool.run([PoolJob(i, preparing(folder / str(i))) for i in range(8)]))
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
if how == "working":
    list(pool.run([PoolJob(i, preparing(folder / str(i), dataset="endless:load")) for i in range(4)]))
sys.stdin.read()
"""
ENDLESS = """
import os
from pathlib import Path


def load():
    with open(os.environ["STARTED"], "w") as pipe:
        pipe.write("x")
    while True:
        pass
"""


@pytest.mark.parametrize("how", ["starting", "idle", "working"])
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path, how: str) -> None:
    """Whether they are still being started, wait for a job, or are in one that never ends."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    started = tmp_path / "started"
    os.mkfifo(started)
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, tmp_path, how],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "STARTED": str(started)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 3 or how == "starting"
        if how == "working":
            with started.open() as pipe:  # opens when a worker opens the other end
                assert pipe.read(1) == "x"
    finally:
        parent.kill()
        parent.communicate()
    assert workers and all(ended(workers))
