"""A queue of pretrainings that share a machine's slots by priority.

A slot holds one training process. Every `fedloop pretrain --slots N` decides for itself, by one function of all claims:

    1. it claims one slot for each of its processes, and waits until `allocate` assigns them to it and they are free
    2. it trains and polls the queue
    3. when `allocate` assigns its slots to another, its processes save their work and stop, and it waits again

There is no central scheduler, and no pretraining stops another's process. A claim is a file that its owner keeps locked: the
kernel releases the lock however the owner ends, so a killed owner's slots are free at once. The file name says whether it
holds slots, `00000012.waiting` or `00000012.running`: renaming is atomic and keeps the lock. A second lock, of the folder,
guards reading and renaming.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from coordinator.datacenter.job_worker import JobPreempted, Supervisor
from coordinator.errors import UserError

POLL_SECONDS = 0.2
"""Time between two polls of the queue; a poll opens one small file for each claim."""

Notify = Callable[[str], None]
T = TypeVar("T")

_LOCK, _NEW = ".lock", ".new"
_WAITING, _RUNNING = ".waiting", ".running"


@dataclass(frozen=True)
class Claim:
    """A pretraining in the queue.

    Attributes:
        number: position by arrival; kept while it is preempted and waits again.
        processes: slots that it needs, all at once.
        priority: higher values come first.
        running: whether it holds its slots.
        name, pid: its folder and its owner, for messages.
        slots: the number of slots on the machine, as its owner was configured.
    """

    number: int
    processes: int
    priority: int = 0
    running: bool = False
    name: str = ""
    pid: int = 0
    slots: int = 0

    def __str__(self) -> str:
        return f"{self.name} (priority {self.priority}, process {self.pid})"


def allocate(claims: Iterable[Claim], slots: int) -> frozenset[int]:
    """Numbers of the claims that should run: by priority, then by arrival, each that still fits.

    Whether a claim already runs makes no difference. So a small claim may use slots that a larger one before it cannot
    use yet, and is preempted when that one fits.
    """
    chosen, left = set(), slots
    for claim in sorted(claims, key=lambda claim: (-claim.priority, claim.number)):
        if claim.processes <= left:
            chosen.add(claim.number)
            left -= claim.processes
    return frozenset(chosen)


def may_start(claim: Claim, claims: Sequence[Claim], slots: int) -> bool:
    """Whether `claim` should run and enough slots are free."""
    used = sum(other.processes for other in claims if other.running and other.number != claim.number)
    return claim.number in allocate(claims, slots) and used + claim.processes <= slots


def waiting_reason(claim: Claim, claims: Sequence[Claim], slots: int) -> str:
    """A message that says which claims `claim` waits for."""
    chosen = allocate(claims, slots)
    others = [other for other in claims if other.number != claim.number]
    users = [other for other in others if other.running]
    state = "used by"
    if not users:
        users, state = [other for other in others if other.number in chosen], "about to be used by"
    message = f"waiting: {sum(user.processes for user in users)} of {slots} processes are {state} {_format_claims(users)}"
    leaving = [user for user in users if user.number not in chosen]
    if claim.number in chosen and leaving:
        message += f"; {', '.join(user.name for user in leaving)} will make room"
    return message


def _format_claims(claims: Iterable[Claim]) -> str:
    return ", ".join(map(str, claims))


def default_folder() -> Path:
    """The queue of this user on this machine, in the XDG state folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state).expanduser().absolute() / "fedloop" / "pretraining"


@dataclass(frozen=True)
class Queue:
    """A client of the machine's queue, for one pretraining.

    Attributes:
        folder: of the claims; on a local disk.
        slots: number of slots on the machine.
    """

    folder: Path
    slots: int
    priority: int = 0

    def check(self, processes: int, *, saves: bool) -> None:
        """Requires that a pretraining of so many processes can ever run; `saves`: it writes checkpoints.

        Raises:
            UserError: it never can.
        """
        if processes > self.slots:
            raise UserError(
                f"the plan needs {processes} processes at once, but --slots is {self.slots}; "
                "choose a plan with fewer processes, or more slots"
            )
        if not saves:
            raise UserError(
                "with --slots a pretraining must save its work when it is preempted, and this one has no "
                "checkpoints: set checkpoint.every above 0, and train by a plan rather than with [server]"
            )
        with self._locked():
            self._require_same_slots(self.claims())

    def run(
        self,
        name: str,
        processes: int,
        attempt: Callable[[Supervisor], T],
        notify: Notify = lambda message: None,
    ) -> T:
        """Calls `attempt` whenever it has slots, until one call is not preempted, and returns its result.

        `attempt` passes the supervisor to `jobs.run` or `jobs.resume`, and continues earlier attempts. Blocks;
        an exception, Ctrl-C too, removes the claim. `notify` receives why it waits or stops, also from another thread.

        Raises:
            UserError: others in the queue have another number of slots.
            OSError: the folder, or the claim in it, was removed.
        """
        with self._claimed(name, processes, notify) as entry:
            while True:
                entry.wait()
                try:
                    return attempt(entry.supervise)
                except JobPreempted:
                    if not entry.preempted:
                        raise
                finally:
                    entry.release()

    def claims(self) -> list[Claim]:
        """The claims of living owners; removes all others. The caller holds the lock."""
        claims = []
        for path in sorted(self.folder.glob("[0-9]*.*")):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    claims.append(Claim(**json.loads(file.read()), running=path.suffix == _RUNNING))
                else:
                    path.unlink()  # unlocked: its owner was killed
        return claims

    @contextmanager
    def _claimed(self, name: str, processes: int, notify: Notify) -> Iterator[_Entry]:
        new = self.folder / _NEW
        with self._locked():
            claims = self.claims()
            self._require_same_slots(claims)
            number = 1 + max((claim.number for claim in claims), default=0)
            claim = Claim(number, processes, self.priority, False, name, os.getpid(), self.slots)
            file = new.open("wb")
            fcntl.flock(file, fcntl.LOCK_EX)
            fields = {key: value for key, value in vars(claim).items() if key != "running"}
            file.write((json.dumps(fields) + "\n").encode())
            file.flush()
            entry = _Entry(self, claim, notify)
            new.rename(entry.path)
        try:
            yield entry
        finally:
            entry.path.unlink(missing_ok=True)
            file.close()

    def _require_same_slots(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            if claim.slots != self.slots:
                raise UserError(
                    f"--slots is {self.slots}, but {claim} shares {claim.slots} with others in {self.folder}; "
                    "give the same number, or wait until they have ended"
                )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the folder, for no longer than it takes to read a few small files."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / _LOCK).open("w")
        except OSError as error:
            raise UserError(f"--queue {self.folder}: cannot be written: {error.strerror}") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _Entry:
    """This process's claim in the queue.

    Attributes:
        preempted: whether the current attempt was told to stop.
    """

    def __init__(self, queue: Queue, claim: Claim, notify: Notify) -> None:
        self.preempted = False
        self._queue, self._claim, self._notify = queue, claim, notify

    @property
    def path(self) -> Path:
        return _path(self._queue.folder, self._claim)

    def wait(self) -> None:
        """Blocks until this claim holds its slots."""
        last = ""
        while True:
            with self._queue._locked():
                claims = self._queue.claims()
                if may_start(self._claim, claims, self._queue.slots):
                    self._rename(running=True)
                    self.preempted = False
                    break
                message = waiting_reason(self._claim, claims, self._queue.slots)
            if message != last:
                self._notify(message)
                last = message
            time.sleep(POLL_SECONDS)
        if last:
            self._notify(f"its turn: {self._claim.processes} of {self._queue.slots} processes")

    def release(self) -> None:
        """Releases the slots, after the attempt that used them has ended."""
        with self._queue._locked(), suppress(FileNotFoundError):
            self._rename(running=False)

    @contextmanager
    def supervise(self, stop: Callable[[], None]) -> Iterator[None]:
        """Polls the queue while the body runs, and calls `stop` once when `allocate` assigns its slots to others."""
        done = threading.Event()

        def poll() -> None:
            while not done.wait(POLL_SECONDS):
                if others := self._preempting_claims():
                    self.preempted = True
                    self._notify(f"making room for {_format_claims(others)}")
                    stop()
                    return

        thread = threading.Thread(target=poll, name="queue", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _preempting_claims(self) -> list[Claim]:
        """The claims that wait for its slots; empty if it keeps them, or the queue cannot be read."""
        with suppress(OSError, UserError), self._queue._locked():
            claims = self._queue.claims()
            chosen = allocate(claims, self._queue.slots)
            if all(claim.number != self._claim.number for claim in claims) or self._claim.number in chosen:
                return []
            return [claim for claim in claims if claim.number in chosen and not claim.running]
        return []

    def _rename(self, *, running: bool) -> None:
        claim = replace(self._claim, running=running)
        self.path.rename(_path(self._queue.folder, claim))
        self._claim = claim


def _path(folder: Path, claim: Claim) -> Path:
    return folder / f"{claim.number:08}{_RUNNING if claim.running else _WAITING}"
