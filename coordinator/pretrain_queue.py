"""Pretrainings that share a machine's slots by priority: who waits, who runs, who makes room.

A slot is for one process that trains. Every `fedloop pretrain` that was told how many there are decides for itself,
by one function of everybody's claims:

    1. it claims as many slots as it has processes, and waits until `allocate` gives them to it and they are free
    2. it trains, and looks at the queue meanwhile
    3. when `allocate` gives its slots to another, its processes save their work and stop, and it waits again

Nobody is in charge, and nobody stops a process of another. A claim is a file which its owner keeps locked: the kernel
lets go of it however the owner ends, so a killed owner's slots are free at once. Its name says whether it holds slots,
`00000012.waiting` or `00000012.running`: renaming is atomic, and keeps the lock. Reading and renaming are done under
one more lock, of the folder.
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

from coordinator.errors import UserError
from coordinator.jobs import Beside, JobPreempted

POLL_SECONDS = 0.2
"""Between two looks at the queue; a look opens one small file a claim."""

Say = Callable[[str], None]
T = TypeVar("T")

_LOCK, _NEW = ".lock", ".new"
_WAITING, _RUNNING = ".waiting", ".running"


@dataclass(frozen=True)
class Claim:
    """A pretraining in the queue.

    Attributes:
        number: the order in which they came; kept while it makes room and waits again.
        processes: slots that it needs, all at once.
        priority: the higher comes first.
        running: whether it holds its slots.
        name, pid: its folder and its owner, for a person.
        slots: how many there are on the machine, as its owner was told.
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
    """Numbers of the claims that are to run: the highest priority first, then who came first, each that still fits.

    Who runs already makes no difference. So a small claim may use what a larger one before it has to leave idle,
    and makes room when that one fits.
    """
    given, left = set(), slots
    for claim in sorted(claims, key=lambda claim: (-claim.priority, claim.number)):
        if claim.processes <= left:
            given.add(claim.number)
            left -= claim.processes
    return frozenset(given)


def may_start(claim: Claim, claims: Sequence[Claim], slots: int) -> bool:
    """Whether `claim` is to run, and those that are not have made enough room."""
    used = sum(other.processes for other in claims if other.running and other.number != claim.number)
    return claim.number in allocate(claims, slots) and used + claim.processes <= slots


def why_waiting(claim: Claim, claims: Sequence[Claim], slots: int) -> str:
    """What `claim` waits for, in words."""
    chosen = allocate(claims, slots)
    others = [other for other in claims if other.number != claim.number]
    users = [other for other in others if other.running]
    words = "used by"
    if not users:
        users, words = [other for other in others if other.number in chosen], "about to be used by"
    said = (
        f"waiting: {sum(user.processes for user in users)} of {slots} processes are {words} {_listed(users)}"
    )
    leaving = [user for user in users if user.number not in chosen]
    if claim.number in chosen and leaving:
        said += f"; {', '.join(user.name for user in leaving)} will make room"
    return said


def _listed(claims: Iterable[Claim]) -> str:
    return ", ".join(map(str, claims))


def default_folder() -> Path:
    """The queue of this user on this machine, where XDG keeps the state of programs."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state).expanduser().absolute() / "fedloop" / "pretraining"


@dataclass(frozen=True)
class Queue:
    """The machine's slots, and the priority of a pretraining that is to have some of them.

    Attributes:
        folder: of the claims; on a disk of this machine.
    """

    folder: Path
    slots: int
    priority: int = 0

    def check(self, processes: int, *, saves: bool) -> None:
        """Whether a pretraining of so many processes can have its turn; `saves`: it writes checkpoints.

        Raises:
            UserError: it cannot.
        """
        if processes > self.slots:
            raise UserError(
                f"the plan needs {processes} processes at once, but --slots is {self.slots}; "
                "give a plan of fewer processes, or more slots"
            )
        if not saves:
            raise UserError(
                "with --slots a pretraining saves its work when it makes room for another, and this one has no "
                "checkpoints: set checkpoint.every above 0, and train by a plan rather than with [server]"
            )
        with self._locked():
            self._agreed(self.claims())

    def run(
        self, name: str, processes: int, attempt: Callable[[Beside], T], say: Say = lambda words: None
    ) -> T:
        """What `attempt` returns, which is made whenever there are slots, until it has not had to make room.

        `attempt` passes on what it gets to `jobs.run` or `jobs.resume`, and takes up what it began before. Blocks;
        an exception, Ctrl-C too, ends the claim. `say` hears why it waits or stops, also from another thread.

        Raises:
            UserError: others in the queue were told another number of slots.
            OSError: the folder, or the claim in it, is gone.
        """
        with self._joined(name, processes, say) as place:
            while True:
                place.wait()
                try:
                    return attempt(place.beside)
                except JobPreempted:
                    if not place.asked:
                        raise
                finally:
                    place.release()

    def claims(self) -> list[Claim]:
        """All whose owners live; what others have left is removed. To be called under the lock."""
        found = []
        for path in sorted(self.folder.glob("[0-9]*.*")):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(Claim(**json.loads(file.read()), running=path.suffix == _RUNNING))
                else:
                    path.unlink()  # nobody holds it: its owner was killed
        return found

    @contextmanager
    def _joined(self, name: str, processes: int, say: Say) -> Iterator[_Place]:
        new = self.folder / _NEW
        with self._locked():
            claims = self.claims()
            self._agreed(claims)
            number = 1 + max((claim.number for claim in claims), default=0)
            claim = Claim(number, processes, self.priority, False, name, os.getpid(), self.slots)
            file = new.open("wb")
            fcntl.flock(file, fcntl.LOCK_EX)
            fields = {key: value for key, value in vars(claim).items() if key != "running"}
            file.write((json.dumps(fields) + "\n").encode())
            file.flush()
            place = _Place(self, claim, say)
            new.rename(place.path)
        try:
            yield place
        finally:
            place.path.unlink(missing_ok=True)
            file.close()

    def _agreed(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            if claim.slots != self.slots:
                raise UserError(
                    f"--slots is {self.slots}, but {claim} shares {claim.slots} with others in {self.folder}; "
                    "give the same number, or wait until they have ended"
                )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; never held for longer than it takes to read a few small files."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / _LOCK).open("w")
        except OSError as error:
            raise UserError(f"--queue {self.folder}: cannot be written: {error.strerror}") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _Place:
    """A claim in the queue, of this process.

    Attributes:
        asked: whether what runs was asked to make room.
    """

    def __init__(self, queue: Queue, claim: Claim, say: Say) -> None:
        self.asked = False
        self._queue, self._claim, self._say = queue, claim, say

    @property
    def path(self) -> Path:
        return _path(self._queue.folder, self._claim)

    def wait(self) -> None:
        """Returns as the holder of its slots."""
        said = ""
        while True:
            with self._queue._locked():
                claims = self._queue.claims()
                if may_start(self._claim, claims, self._queue.slots):
                    self._rename(running=True)
                    self.asked = False
                    break
                words = why_waiting(self._claim, claims, self._queue.slots)
            if words != said:
                self._say(words)
                said = words
            time.sleep(POLL_SECONDS)
        if said:
            self._say(f"its turn: {self._claim.processes} of {self._queue.slots} processes")

    def release(self) -> None:
        """Its slots are for others; to be called when what used them has ended."""
        with self._queue._locked(), suppress(FileNotFoundError):
            self._rename(running=False)

    @contextmanager
    def beside(self, stop: Callable[[], None]) -> Iterator[None]:
        """Looks at the queue while the body runs, and calls `stop` once when others are to have its slots."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(POLL_SECONDS):
                if before := self._overtaken():
                    self.asked = True
                    self._say(f"making room for {_listed(before)}")
                    stop()
                    return

        thread = threading.Thread(target=look, name="queue", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _overtaken(self) -> list[Claim]:
        """Those that wait for its slots; none where it keeps them, or the queue cannot be read."""
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
