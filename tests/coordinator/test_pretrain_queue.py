"""Which claims run, wait or are preempted, and that a killed owner's slots are free."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.datacenter import job_worker, jobs, pretrain_queue
from coordinator.datacenter.job_worker import JobFailed, JobPreempted, Supervisor
from coordinator.datacenter.pretrain_queue import (
    Claim,
    Queue,
    allocate,
    may_start,
    waiting_reason,
)
from coordinator.errors import UserError
from tests.support.processes import HANGS_SECONDS

SLOTS = st.integers(1, 8)
CLAIMS = st.lists(
    st.builds(Claim, st.just(0), processes=st.integers(1, 8), priority=st.integers(-2, 2)), max_size=8
).map(lambda claims: [replace(claim, number=number) for number, claim in enumerate(claims, 1)])

OWNER = """
import sys, time
from pathlib import Path
from coordinator.datacenter.pretrain_queue import Queue
def attempt(supervisor):
    print("runs", flush=True)
    time.sleep(600)
Queue(Path(sys.argv[1]), int(sys.argv[2])).run("owner", int(sys.argv[3]), attempt, lambda words: print(words, flush=True))
"""


@given(CLAIMS, SLOTS)
def test_allocations_fit_the_slots(claims: list[Claim], slots: int) -> None:
    chosen = allocate(claims, slots)
    assert sum(claim.processes for claim in claims if claim.number in chosen) <= slots


@given(CLAIMS, SLOTS)
def test_a_claim_waits_only_for_those_before_it(claims: list[Claim], slots: int) -> None:
    """A claim runs just when it fits beside those of higher priority and those of the same that came earlier."""
    chosen = allocate(claims, slots)
    for claim in claims:
        before = sum(
            other.processes
            for other in claims
            if other.number in chosen and (other.priority, -other.number) > (claim.priority, -claim.number)
        )
        assert (claim.number in chosen) == (before + claim.processes <= slots)


@given(CLAIMS, SLOTS)
def test_the_first_of_the_highest_always_runs(claims: list[Claim], slots: int) -> None:
    possible = [claim for claim in claims if claim.processes <= slots]
    chosen = allocate(claims, slots)
    if possible:
        first = max(possible, key=lambda claim: (claim.priority, -claim.number))
        assert first.number in chosen
    else:
        assert not chosen


@given(st.data(), CLAIMS, SLOTS)
def test_the_choice_depends_on_claims_alone(data: st.DataObject, claims: list[Claim], slots: int) -> None:
    """Not on the order in which they are read, nor on who runs."""
    others = [
        replace(claim, running=data.draw(st.booleans())) for claim in data.draw(st.permutations(claims))
    ]
    assert allocate(others, slots) == allocate(claims, slots)


@given(st.data(), SLOTS)
def test_whatever_the_order_of_events_slots_suffice_and_everybody_ends(
    data: st.DataObject, slots: int
) -> None:
    """Owners act one at a time, in any order: come, start when they may, stop when overtaken, end."""
    waiting = data.draw(CLAIMS)
    waiting = [claim for claim in waiting if claim.processes <= slots]
    claims: dict[int, Claim] = {}
    for _ in range(10 * len(waiting) + 10):
        moves: list[Claim] = []
        for claim in claims.values():
            chosen = claim.number in allocate(claims.values(), slots)
            starts = not claim.running and may_start(claim, list(claims.values()), slots)
            if starts or (claim.running and not chosen):
                moves.append(replace(claim, running=starts))
        running = [claim for claim in claims.values() if claim.running]
        assert sum(claim.processes for claim in running) <= slots
        if waiting and (not moves or data.draw(st.booleans())):
            claim = waiting.pop(0)
            claims[claim.number] = claim
        elif moves:
            move = data.draw(st.sampled_from(moves))
            claims[move.number] = move
        elif running:  # nobody else can do anything, so who runs has all the time it needs
            del claims[data.draw(st.sampled_from(running)).number]
        else:
            break
    for claim in itertools.chain(claims.values(), waiting):
        raise AssertionError(f"{claim} waits for ever")


def test_the_message_names_who_holds_the_slots_and_who_is_preempted() -> None:
    running = Claim(1, 2, name="runs/a", pid=11, running=True)
    mine = Claim(2, 2, priority=5)
    assert waiting_reason(mine, [running, mine], 3) == (
        "waiting: 2 of 3 processes are used by runs/a (priority 0, process 11); runs/a will make room"
    )
    later = replace(mine, priority=0)
    assert "make room" not in waiting_reason(later, [running, later], 3)
    assert waiting_reason(running, [replace(running, running=False), mine], 3).startswith(
        "waiting: 2 of 3 processes are about to be used by"
    )


def test_a_claim_that_could_never_run_is_refused(tmp_path: Path) -> None:
    queue = Queue(tmp_path, 2)
    queue.check(2, saves=True)
    with pytest.raises(UserError, match="needs 4 processes at once, but --slots is 2"):
        queue.check(4, saves=True)
    with pytest.raises(UserError, match="no checkpoints"):
        queue.check(2, saves=False)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        Queue(tmp_path / "file" / "queue", 2).check(1, saves=True)


def test_a_higher_priority_preempts_and_both_return_results(tmp_path: Path) -> None:
    """In two threads of this process: the files and locks are the same as between processes."""
    begun, waits_again, messages = threading.Event(), threading.Event(), list[str]()
    order: list[str] = []

    def report(message: str) -> None:
        messages.append(message)
        if message.startswith("waiting"):
            waits_again.set()

    def low(supervisor: Supervisor) -> str:
        order.append("low starts")
        if begun.is_set():
            return "low"
        stop = threading.Event()
        with supervisor(stop.set):
            begun.set()
            assert stop.wait(HANGS_SECONDS)
        order.append("low stops")
        raise JobPreempted("pretrain", "", tmp_path)

    def high(supervisor: Supervisor) -> str:
        order.append("high")
        assert waits_again.wait(HANGS_SECONDS)
        return "high"

    with running(lambda: Queue(tmp_path, 2).run("low", 2, low, report)) as results:
        assert begun.wait(HANGS_SECONDS)
        assert Queue(tmp_path, 2, priority=1).run("high", 1, high) == "high"
    assert results == ["low"]
    assert order == ["low starts", "low stops", "high", "low starts"]
    assert messages[0].startswith("making room for high (priority 1")
    assert messages[-1] == "its turn: 2 of 2 processes"
    assert files(tmp_path) == []


def test_an_attempt_stopped_by_someone_else_is_not_repeated(tmp_path: Path) -> None:
    def attempt(supervisor: Supervisor) -> None:
        raise JobPreempted("pretrain", "by an operator", tmp_path)

    with pytest.raises(JobFailed, match="by an operator"):
        Queue(tmp_path, 2).run("a", 1, attempt)
    assert files(tmp_path) == []


def test_the_slots_of_a_killed_owner_are_free_at_once(tmp_path: Path) -> None:
    with owner(tmp_path, slots=2, processes=2) as killed:
        assert killed() == "runs"
        with owner(tmp_path, slots=2, processes=1) as waiting:
            assert waiting().startswith("waiting: 2 of 2 processes are used by owner")
            assert files(tmp_path) == ["00000001.running", "00000002.waiting"]
            killed.send(signal.SIGKILL)
            assert waiting().startswith("its turn")
            assert waiting() == "runs"
            assert files(tmp_path) == ["00000002.running"]
            with owner(tmp_path, slots=2, processes=1) as small:
                assert small() == "runs"  # without waiting


def test_ctrl_c_while_waiting_leaves_the_queue(tmp_path: Path) -> None:
    with owner(tmp_path, slots=2, processes=2) as first:
        assert first() == "runs"
        with owner(tmp_path, slots=2, processes=1) as waiting:
            assert waiting().startswith("waiting")
            waiting.send(signal.SIGINT)
            assert waiting.ended() != 0
            assert files(tmp_path) == ["00000001.running"]


def test_all_in_a_queue_have_the_same_number_of_slots(tmp_path: Path) -> None:
    with owner(tmp_path, slots=2, processes=2) as first:
        assert first() == "runs"
        with pytest.raises(UserError, match=r"--slots is 4, but owner .* shares 2 with others"):
            Queue(tmp_path, 4).check(2, saves=True)
        with pytest.raises(UserError, match="give the same number"):
            Queue(tmp_path, 4).run("other", 2, lambda supervisor: None)
        first.send(signal.SIGKILL)
        first.ended()
    Queue(tmp_path, 4).check(2, saves=True)


def test_the_queue_is_among_the_users_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert pretrain_queue.default_folder() == tmp_path / "fedloop" / "pretraining"


@pytest.mark.parametrize(
    ("worker", "outcome"),
    [
        ("time.sleep(600)", JobPreempted),  # the signal kills it before it listens
        ("signal.signal(15, signal.SIG_IGN); say(); say()", {"a": 1}),  # it was nearly done
        (
            "raise SystemExit(3)",
            JobPreempted,
        ),  # others died first: it is tried again, and fails alone or not at all
    ],
)
def test_a_stopped_worker_is_preempted_or_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, outcome: object
) -> None:
    result = tmp_path / "job" / "result.json"
    program = (
        "import signal, time\n"
        "say = lambda: print('{}', flush=True)\n"
        f"open({str(result)!r}, 'w').write('{{\"a\": 1}}')\n" + worker.replace("; ", "\n")
    )
    # stopped at its first line, or at once if it prints none
    monkeypatch.setattr(
        job_worker, "_command", lambda stage, processes, path: [sys.executable, "-c", program]
    )
    stops: list[Callable[[], None]] = []

    @contextmanager
    def supervisor(stop: Callable[[], None]) -> Iterator[None]:
        stops.append(stop)
        if "say" not in worker:
            stop()
        yield

    job = jobs.DatacenterJob("check", {}, {})
    if isinstance(outcome, dict):
        assert jobs.run(job, tmp_path / "job", lambda line: stops[0](), supervisor=supervisor) == outcome
    else:
        with pytest.raises(JobPreempted):
            jobs.run(job, tmp_path / "job", supervisor=supervisor)
        record = jobs.read(tmp_path / "job")
        assert record is not None and record.state == "preempted"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("0*"))


class Owner:
    """A process with a claim; called, the next line that it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.send = process.send_signal

    def __call__(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ended(self) -> int:
        return self._process.wait(HANGS_SECONDS)


@contextmanager
def owner(folder: Path, slots: int, processes: int) -> Iterator[Owner]:
    command = [sys.executable, "-P", "-c", OWNER, str(folder), str(slots), str(processes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield Owner(process)
        finally:
            process.kill()


@contextmanager
def running(work: Callable[[], object]) -> Iterator[list[object]]:
    """`work` in a thread, and on the way out what it returned."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    yield results
    thread.join(HANGS_SECONDS)
