"""The device fleet of an asynchronous run: devices get tasks as they become free, and a round takes updates as they come.

    begin      opens the round, stops devices whose model is too old    rows of rounds and tasks
    results    keeps devices at work; once enough updates wait in       rows of tasks
               the run's buffer, the round takes them and closes

A task stays open when its round is over, and its offer names the model that it started from. The device API accepts an update
whenever it comes; between two rounds it waits for the next one. What a round took is stored, so a process that continues it
aggregates the same updates.

A device gets one task of a round at most. If no device is at work and none is left that has not trained this round's model,
the round waits as long as `devices.patience_seconds` for another device, then takes what there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from time import monotonic

from sqlalchemy import Connection

from coordinator import failpoints
from coordinator.context.services import Services
from coordinator.db import answers, buffers, rounds
from coordinator.db.buffers import EndedAnswer
from coordinator.db.rounds import RoundRow, TaskRow
from coordinator.fleets.device import DeviceFleet, sweep_uploads
from coordinator.fleets.run_session import LONGEST_WAIT_SECONDS
from coordinator.rounds.fleet import Answer, Model, OpenRound, Silence
from coordinator.rounds.plan import Task
from coordinator.rounds.records import NOBODY, InFlight
from coordinator.rounds.step import Step
from coordinator.scheduling import offers
from coordinator.scheduling.deployments import Deployment
from edge_client.wire.device import EvaluationResult
from strategies.params import Tensors

_LOOK_SECONDS = 0.5
"""Between two looks for devices while fewer are at work than may be."""


class AsynchronousDeviceFleet:
    """Implements `rounds.step.AsynchronousFleet` for one run."""

    def __init__(self, services: Services, deployment: Deployment, *, patience_seconds: float) -> None:
        self._services = services
        self._deployment = deployment
        self._patience_seconds = patience_seconds
        self._devices = DeviceFleet(services, deployment, patience_seconds=patience_seconds)
        self._session = self._devices.session
        self._lease = timedelta(seconds=services.settings.lease_seconds)
        self._step: Step | None = None

    def stop(self) -> None:
        """Ends every wait of this fleet with `Stopped`; callable from any thread."""
        self._devices.stop()

    def find_open_round(self, round_number: int) -> OpenRound | None:
        opened = self._devices.find_open_round(round_number)
        return None if opened is None else replace(opened, tasks=())

    def clients(self, wanted: int) -> Sequence[str]:
        return self._devices.clients(wanted)

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return self._devices.declared_examples(clients)

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        return self._devices.model(params, streams)

    def evaluate(self, number: int, model: Model, seconds: float) -> dict[str, EvaluationResult]:
        """As `DeviceFleet.evaluate`; a device at work answers when it has finished its task."""
        return self._devices.evaluate(number, model, seconds)

    def traits(self, number: int) -> dict[str, dict[str, str]]:
        """As `DeviceFleet.traits`."""
        return self._devices.traits(number)

    def begin(self, step: Step) -> None:
        self._session.require_running()
        self._step = step
        now, run = self._services.clock(), self._deployment.run
        opened = RoundRow(
            run=run,
            number=step.number,
            state="open",
            wanted=step.terms.closing.wanted,
            population=step.terms.population,
            expected=step.terms.expected,
            started_at=now,
            deadline_at=now + self._task_duration,
        )

        def work(connection: Connection) -> list[str]:
            if rounds.find_round(connection, run, step.number) is None:
                rounds.open_round(connection, opened, step.model.base)
            buffers.renew_leases(connection, run, now + self._lease)
            return buffers.stop_stale(connection, run, step.oldest, step.number, now)

        with self._services.blobs.reference_lock:
            stopped = self._session.write(work)
            self._devices.release()  # the row of the run refers to them until its next round is committed
        failpoints.reach("round.opened")
        self._session.notify(stopped)

    def results(self) -> Iterator[Answer | Silence]:
        """Yields once the round is closed and every accepted update is verified. Positions follow the ids of devices, as those
        of a synchronous round."""
        run, number = self._deployment.run, self._require_step().number
        while True:
            opened = self._wait_until_closed()
            taken = self._session.read(partial(buffers.taken, run=run, number=number))
            damaged = [row for row in taken if row.blob is not None and not self._devices.is_intact(row.blob)]
            if not damaged:
                break
            self._reopen(damaged)
        failpoints.reach("round.closed")
        order = {device: index for index, device in enumerate(sorted({row.device for row in taken}))}
        for row in taken:
            yield self._devices.to_result(Task(order[row.device], row.message), row, opened)
        sweep_uploads(self._services)

    def base(self, task: Task) -> Tensors:
        """Raises: BlobDamaged: the disk has damaged them."""
        self._services.blobs.require_intact(task.message.base)
        return self._services.blobs.open_arrays(task.message.base)

    def started(self) -> int:
        number = self._require_step().number
        return len(self._session.read(lambda at: buffers.started_in(at, self._deployment.run, number)))

    def in_flight(self) -> InFlight:
        return NOBODY  # devices at work are rows of tasks

    def simulated_seconds(self) -> float | None:
        return None

    @property
    def _task_duration(self) -> timedelta:
        return timedelta(seconds=self._require_step().terms.closing.deadline_seconds)

    def _wait_until_closed(self) -> RoundRow:
        """The round once it has taken its updates. Starts devices, and gives up those that do not answer."""
        step, alone_since = self._require_step(), None
        while True:
            self._session.require_running()
            seen, now = self._session.seen(), self._services.clock()
            look = self._session.read(self._look)
            if look.opened.state != "open":
                return look.opened
            if step.terms.closing.is_complete(len(look.accepted)):
                self._take(look.waiting, look.accepted[: step.terms.closing.wanted])
                continue
            if any(_expires_at(task) < now for task in look.live):
                self._session.notify(
                    self._session.write(
                        lambda at: buffers.expire(at, self._deployment.run, self._services.clock())
                    )
                )
                continue
            began = monotonic()
            if len(look.live) < step.concurrency and self._start(look, now):
                alone_since = None
                continue
            if look.live:
                alone_since = None
            elif not look.started and not look.waiting:
                self.clients(self._deployment.quorum)
            elif alone_since is None:
                alone_since = monotonic()
            elif monotonic() - alone_since >= self._patience_seconds:
                self._take(look.waiting, look.accepted)
                continue
            self._wait(seen, look, now, monotonic() - began)

    def _wait(self, seen: int, look: _Look, now: datetime, looked_seconds: float) -> None:
        """Waits for an answer; if more devices may start, not long, because one may have checked in."""
        until = min((_expires_at(task) for task in look.live), default=now + timedelta(hours=1)) - now
        if len(look.live) < self._require_step().concurrency:
            # Matching a large fleet takes a while; it is not to take all the time.
            until = min(until, timedelta(seconds=max(_LOOK_SECONDS, 4 * looked_seconds)))
        self._session.wait(seen, min(until, timedelta(seconds=LONGEST_WAIT_SECONDS)))

    def _look(self, connection: Connection) -> _Look:
        run, number = self._deployment.run, self._require_step().number
        opened = rounds.find_round(connection, run, number)
        assert opened is not None, "begun before"
        waiting = buffers.waiting(connection, run)
        started = buffers.started_in(connection, run, number)
        return _Look(opened, waiting, buffers.live(connection, run), started)

    def _start(self, look: _Look, now: datetime) -> bool:
        """Gives tasks to devices that are free, as many as may be; whether there was one."""
        step = self._require_step()
        eligible = self._devices.invite_eligible("train")
        names = sorted(eligible)
        busy = ({task.device for task in look.live} | set(look.started)) & eligible.keys()
        chosen: list[Task] = []
        for position in range(len(look.started), len(look.started) + step.concurrency - len(look.live)):
            index = step.draw(names, busy, position)
            if index is None:
                break
            busy.add(names[index])
            chosen.append(step.task(names[index], position))
        if not chosen:
            return False
        deadline_at = now + self._task_duration
        limit_bytes = step.terms.expected.payload_limit_bytes
        common = self._devices.round_offer(step.number, deadline_at, step.model, limit_bytes)
        rows = offers.train_rows(chosen, replace(common, outlives_round=True), eligible)
        self._session.write(lambda at: rounds.add_tasks(at, rows))
        self._session.notify(task.message.client for task in chosen)
        return True

    def _take(self, waiting: Sequence[EndedAnswer], accepted: Sequence[EndedAnswer]) -> None:
        """Closes the round with these updates, and all answers that are none."""
        taken = [row.id for row in waiting if row.blob is None] + [row.id for row in accepted]
        run, number = self._deployment.run, self._require_step().number
        self._session.write(lambda at: buffers.take(at, run, number, taken))

    def _reopen(self, damaged: Sequence[EndedAnswer]) -> None:
        """Opens the round again without damaged updates, and offers their devices the task once more.

        The blobs are removed first: if the process dies in between, a missing update counts as damaged too.
        """
        run, now = self._deployment.run, self._services.clock()
        deadline_at = now + self._task_duration

        def work(connection: Connection) -> None:
            buffers.reopen(connection, run, self._require_step().number, deadline_at)
            invitations = self._devices.invite(connection, [row.device for row in damaged], now)
            for row in damaged:
                until = invitations[row.device].fetch_until
                answers.revoke_update(connection, run, row.message.round, row.device, until, deadline_at, now)

        with self._services.blobs.reference_lock:
            self._services.blobs.remove([row.blob for row in damaged if row.blob is not None])
        self._session.write(work)
        self._session.notify(row.device for row in damaged)

    def _require_step(self) -> Step:
        assert self._step is not None  # begun
        return self._step


@dataclass(frozen=True)
class _Look:
    """The state of an open round: answers that no round has taken, devices at work, and those that started in the round."""

    opened: RoundRow
    waiting: Sequence[EndedAnswer]
    live: Sequence[TaskRow]
    started: Sequence[str]

    @property
    def accepted(self) -> list[EndedAnswer]:
        return [row for row in self.waiting if row.blob is not None]


def _expires_at(task: TaskRow) -> datetime:
    assert task.leased_until is not None  # of a live task
    return min(task.leased_until, task.deadline_at)
