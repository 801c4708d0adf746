"""Trains a job on several hosts, with those that are there.

    1. form     start a member on every host (`models.pretrain.hosts.member`) and wait until they are ready; allocate
                processes to them (`models.pretrain.hosts.allocation`)
    2. train    as one generation, which meets at a rendezvous on its first host and resumes from the last checkpoint
    3. again    when a host is lost, all members end and the next generation forms without it; when a host is back
                and more processes fit, the generation saves its work and the next one has it

A generation has a fixed set of hosts. If only a process dies, the agents restart the processes without a new generation.
"""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.files import write_durably
from edge_client.processes.process import Report
from models.pretrain.hosts.allocation import Allocation, Limits
from models.pretrain.hosts.connection import Event, Member
from models.pretrain.hosts.hostfile import HostSettings, remote_command
from models.pretrain.hosts.protocol import ALIVE_SECONDS, MEMBER_SILENT_SECONDS, TOKEN
from models.pretrain.recovery.statuses import PREEMPTED, REFUSED, STOPPED, UNREACHABLE

FORM_SECONDS = 60.0
"""How long a generation after the first waits for hosts that neither answer nor fail."""

START_SECONDS = 600.0
"""How long to wait for enough hosts."""

POLL_SECONDS = 0.2

RETRY_SECONDS = 5.0
"""Between attempts to reach a lost host."""

LEFT_SECONDS = 60.0
"""Before a host is asked again whose member received a signal to stop."""

GRACE_SECONDS = 60.0
"""For a step and a checkpoint."""


MOST_LOSSES = 10
"""A host that was lost so often is not tried again."""

ABORT_SECONDS = 10.0
"""For killing the processes of a host."""


class Lost(Exception):
    """A host of the generation is lost; the message says how."""


@dataclass
class _Host:
    """A host as the launcher sees it.

    Attributes:
        member: its current one.
        ready: whether it can train.
        suspect: it did not reach the others, and is not ready before it does.
        last_message: when it last said something.
        retry: when to try again.
        losses: how often generations have lost it.
        problem: why it is not there.
    """

    name: str
    member: Member | None = None
    ready: bool = False
    suspect: bool = False
    last_message: float = 0.0
    retry: float = 0.0
    losses: int = 0
    problem: str = ""


@dataclass
class _Generation:
    """Hosts that train together.

    Attributes:
        ended: statuses of the agents that have ended, by host.
        asked: when it was asked to save its work and stop; 0: it was not.
    """

    allocation: Allocation
    ended: dict[str, int] = field(default_factory=dict)
    asked: float = 0.0

    @property
    def names(self) -> list[str]:
        return list(self.allocation.ranks)

    def remaining(self) -> list[str]:
        """The hosts that still train."""
        return [name for name in self.names if name not in self.ended]


@dataclass
class Launcher:
    """Runs one job. `stopping`, which a signal handler may set, has it save its work and end.

    Attributes:
        environment: variables for every host.
    """

    job: Path
    settings: HostSettings
    limits: Limits
    report: Report
    environment: Mapping[str, str]
    stopping: bool = False
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _token: str = field(default_factory=lambda: secrets.token_hex(16))
    _run: str = field(default_factory=lambda: secrets.token_hex(8))
    _endpoint: str = ""
    _told: float = 0.0
    _generations: int = 0

    def __post_init__(self) -> None:
        self._hosts = {host.name: _Host(host.name) for host in self.settings.hosts}

    def run(self) -> int:
        """Trains to the end; returns an exit status, those of `models.pretrain.recovery.elastic`."""
        write_durably(self.job.parent / TOKEN, self._token.encode())
        try:
            while True:
                allocation = self._form()
                if allocation is None:
                    return PREEMPTED if self.stopping else REFUSED
                self._announce(allocation)
                generation = _Generation(allocation)
                try:
                    status = self._train(generation)
                except Lost as lost:
                    self.report(stage="pretrain", note=str(lost))
                    status = None
                self._end(generation)
                if status is not None:
                    return status
                self._generations += 1
        finally:
            self._close_all()
            (self.job.parent / TOKEN).unlink(missing_ok=True)

    def _form(self) -> Allocation | None:
        """The hosts and plan of the next generation; None if there can be none, with the reason reported."""
        begun, self._endpoint = time.monotonic(), ""
        full = self.limits.allocate(self.settings.hosts)
        while not self.stopping:
            self._start_members()
            self._next_event()
            ready, waited = self._allocate_ready(), time.monotonic() - begun
            if ready is not None and full is not None and ready.processes == full.processes:
                return ready
            missing = [host for host in self._hosts.values() if not host.ready]
            reasons = "; ".join(f"host {host.name}: {host.problem or 'no answer'}" for host in missing)
            if self._generations == 0 and any(host.problem for host in missing):
                self.report(error=reasons)
                return None
            pending = any(host.member for host in missing)
            if self._generations and ready is not None and (not pending or waited > FORM_SECONDS):
                return ready
            exhausted = not pending and all(host.losses >= MOST_LOSSES for host in missing)
            if waited > START_SECONDS or exhausted:
                self.report(error=f"too few hosts for the plan: {reasons}")
                return None
        return None

    def _announce(self, allocation: Allocation) -> None:
        where = ", ".join(f"{ranks} on {name}" for name, ranks in allocation.ranks.items())
        if self._generations:
            self.report(stage="pretrain", status="restarting", statuses=[])
        self.report(stage="pretrain", note=f"training with {allocation.plan}: {where}")

    def _train(self, generation: _Generation) -> int | None:
        """Trains a generation; returns an exit status, or None if another generation follows.

        Raises:
            Lost: a host is lost.
        """
        self._send(generation.names[0], serve=True)
        while generation.remaining():
            self._start_members()
            event = self._next_event()
            if event is not None and event.member.host in generation.names:
                status = self._hear(event, generation)
                if status is not None:
                    return status
            self._require_heard(generation.remaining())
            if not generation.asked and self._should_end(generation):
                generation.asked = time.monotonic()
                for name in generation.names:
                    self._send(name, stop=True)
            if generation.asked and time.monotonic() - generation.asked > GRACE_SECONDS:
                break
        if set(generation.ended.values()) == {0}:
            return 0
        return PREEMPTED if self.stopping else None

    def _should_end(self, generation: _Generation) -> bool:
        """Whether to save and stop: this command or one of its hosts received a signal, or more processes could train."""
        grown = self._allocate_ready()
        grows = grown is not None and grown.processes > generation.allocation.processes
        return self.stopping or any(generation.ended.values()) or (grows and bool(self._endpoint))

    def _hear(self, event: Event, generation: _Generation) -> int | None:
        """Acts on an event of a member of the generation; returns an exit status if the training ends with it.

        Raises:
            Lost: the member's host is lost.
        """
        name, line = event.member.host, event.line
        if line is None:
            if name not in generation.ended:
                generation.ended[name] = event.status
                if not generation.asked:
                    raise self._lost(name, f"is lost: {self._hosts[name].problem}")
        elif "ended" in line:
            generation.ended[name] = status = int(line["ended"])
            if status == UNREACHABLE and not generation.asked:
                raise self._lost(name, "does not reach the others", suspect=True)
            if status not in (0, PREEMPTED, STOPPED) and not generation.asked:
                return status
        elif "endpoint" in line:
            self._endpoint = line["endpoint"]
            for each in generation.names:
                self._send(each, start=self._fleet(each, generation.allocation))
        elif "unreachable" in line:
            if line["unreachable"] == self._endpoint:
                raise self._lost(name, f"does not reach {self._endpoint}", suspect=True)
        elif "alive" not in line and "ready" not in line:
            self.report(**line, **({"host": name} if {"error", "note"} & set(line) else {}))
        return None

    def _fleet(self, name: str, allocation: Allocation) -> dict[str, Any]:
        """Fields of the `models.pretrain.recovery.elastic.Fleet` of a host."""
        return {
            "ranks": allocation.ranks[name],
            "hosts": len(allocation.ranks),
            "endpoint": self._endpoint,
            "run": self._run,
            "address": next(host.address for host in self.settings.hosts if host.name == name),
        }

    def _end(self, generation: _Generation) -> None:
        """Ends what remains of a generation: no two train at once. Members stay, except those that do not answer."""
        for name in generation.remaining():
            self._send(name, abort=True)
        deadline = time.monotonic() + ABORT_SECONDS
        while remaining := [name for name in generation.remaining() if self._hosts[name].member]:
            event = self._next_event()
            if event is not None and event.line is not None and "ended" in event.line:
                generation.ended[event.member.host] = int(event.line["ended"])
            if time.monotonic() > deadline:
                for name in remaining:
                    self._close(self._hosts[name])

    def _require_heard(self, names: Iterable[str]) -> None:
        for name in names:
            if time.monotonic() - self._hosts[name].last_message > MEMBER_SILENT_SECONDS:
                raise self._lost(name, f"has said nothing for {MEMBER_SILENT_SECONDS:.0f} s")

    def _lost(self, name: str, how: str, *, suspect: bool = False) -> Lost:
        host = self._hosts[name]
        host.losses += 1
        host.suspect = suspect
        self._close(host)
        return Lost(f"host {name} {how}")

    def _allocate_ready(self) -> Allocation | None:
        return self.limits.allocate([host for host in self.settings.hosts if self._hosts[host.name].ready])

    def _start_members(self) -> None:
        """Starts members on hosts without one, on those that did not reach the others only to see whether they now do."""
        for settings in self.settings.hosts:
            host = self._hosts[settings.name]
            if host.member or time.monotonic() < host.retry or host.losses >= MOST_LOSSES:
                continue
            if host.suspect and not self._endpoint:
                continue
            command = remote_command(self.settings, settings, "-m", "models.pretrain.hosts.member")
            host.member, host.ready, host.problem = Member(host.name, command, self._events), False, ""
            host.last_message = time.monotonic()
            host.member.send(
                environment=dict(self.environment),
                job=str(self.job),
                token=self._token,
                address=settings.address,
                reach=self._endpoint,
            )

    def _next_event(self) -> Event | None:
        """The next event of a current member, after noting what it says of its host; tells members that we are here."""
        if time.monotonic() - self._told > ALIVE_SECONDS:
            self._told = time.monotonic()
            for name in self._hosts:
                self._send(name, alive=True)
        try:
            event = self._events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return None
        host = self._hosts[event.member.host]
        if event.member is not host.member:
            return None
        host.last_message = time.monotonic()
        if event.line is None:
            host.problem = host.problem or event.member.said or f"its member ended with status {event.status}"
            wait = LEFT_SECONDS if event.status == PREEMPTED else RETRY_SECONDS
            host.member, host.ready, host.retry = None, False, time.monotonic() + wait
        elif "error" in event.line and not host.ready:
            host.problem = str(event.line["error"])
        elif "ready" in event.line:
            host.ready, host.suspect = True, False
        return event

    def _send(self, name: str, **line: Any) -> None:
        member = self._hosts[name].member
        if member is not None:
            member.send(**line)

    def _close(self, host: _Host) -> None:
        """Ends the member of a host, and all its processes."""
        member, host.member, host.ready = host.member, None, False
        if member is not None:
            member.close()

    def _close_all(self) -> None:
        for host in self._hosts.values():
            self._close(host)
