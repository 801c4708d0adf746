"""The device fleet: rounds on enrolled machines, through the database.

The fleet never speaks to a device. It writes a round and its tasks as rows and says so by a signal; devices
come for them through the device API, which writes down what they answer; the fleet reads it and tells the engine.

    clients   devices that match the run, are awake and due        rows of devices
    submit    opens the round                                      rows of rounds and tasks
    results   accepted updates, rejections, silences               rows of tasks and updates
    cancel    the rest is no longer wanted                         rows of tasks

So whatever process dies, the rows say where the round is, and submitting it again goes on with it. Leases that
run out and the deadline are watched here, in the thread of the run.

An accepted update that its disk has damaged counts as never received: before a closed round is told, all its updates
are read through, and where one is not what was accepted, the round opens again and its device is asked once more.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from time import monotonic
from typing import TypeVar

from sqlalchemy import Connection

from coordinator import failpoints
from coordinator.blobs import BlobDamaged, BlobInfo
from coordinator.db import answers, participants, rounds
from coordinator.db.rounds import Finished, RoundRow
from coordinator.db.store import is_disk_full
from coordinator.fleets import matching, offers
from coordinator.fleets.deployments import Deployment
from coordinator.fleets.fleet import Answer, Model, Reopened, Silence, Stopped, Terms
from coordinator.fleets.matching import Candidate
from coordinator.fleets.offers import Asked
from coordinator.rounds import intake
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import Task
from coordinator.services import Services
from edge_client.wire import arrays
from edge_client.wire.device import BlobRef, EvaluationResult, TaskKind
from edge_client.wire.messages import TaskMessage
from strategies.params import Params, Tensors
from strategies.state import joined

_LONGEST_WAIT_SECONDS = 5.0
"""Between two looks at the clock, which may be set."""

_DISK_FULL_SECONDS = 2.0
"""Between two tries to write to a full disk."""

_EVALUATION_LIMIT_BYTES = 65_536

T = TypeVar("T")


class DeviceFleet:
    """Implements `coordinator.fleets.fleet.Fleet` for one run."""

    def __init__(
        self, services: Services, deployment: Deployment, *, patience_seconds: float = 600.0
    ) -> None:
        self._services = services
        self._deployment = deployment
        self._patience_seconds = patience_seconds
        self._lease = timedelta(seconds=services.settings.lease_seconds)
        self._topic = f"run:{deployment.run}"
        self._stop = threading.Event()
        self._sent: dict[str, offers.Sent] = {}
        self._held = ExitStack()
        self._number = 0
        self._tasks: dict[int, Task] = {}
        self._round_lasts = timedelta()

    def stop(self) -> None:
        """Ends every wait of this fleet with `Stopped`; callable from any thread."""
        self._stop.set()
        self._services.signals.notify(self._topic, "devices")

    def reopened(self, round_number: int) -> Reopened | None:
        self._require_running()
        self._number = round_number
        run = self._deployment.run

        def work(connection: Connection) -> Reopened | None:
            found = rounds.find_round(connection, run, round_number)
            if found is None or found.state == "committed":
                return None
            given = rounds.train_offers(connection, run, round_number)
            tasks = tuple(Task(at, TaskMessage.from_json(offer["message"])) for at, offer in given)
            return Reopened(tasks, found.population, found.expected.weight_limit)

        return self._services.database.read(work)

    def clients(self, wanted: int) -> Sequence[str]:
        signals = self._services.signals
        give_up = monotonic() + self._patience_seconds
        while True:
            self._require_running()
            seen, began = signals.seen("devices"), monotonic()
            found = self._able("train")
            left = give_up - monotonic()
            if len(found) >= wanted or (left <= 0 and len(found) >= self._deployment.quorum):
                return sorted(found)
            left = left if left > 0 else _LONGEST_WAIT_SECONDS
            # Looking through a large fleet takes a while; it must not be done at every single check-in.
            self._stop.wait(min(left, 4 * (monotonic() - began)))
            signals.wait("devices", seen, min(left, _LONGEST_WAIT_SECONDS))

    def declared(self, clients: Sequence[str]) -> Mapping[str, int]:
        dataset = self._deployment.dataset

        def work(connection: Connection) -> dict[str, int]:
            found = {name: participants.candidate(connection, name) for name in clients}
            reports = {name: each.report for name, each in found.items() if each is not None and each.report}
            return {
                name: said.datasets[dataset] for name, said in reports.items() if dataset in said.datasets
            }

        counts = self._services.database.read(work)
        return {name: count for name, count in counts.items() if count >= 1}

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        self._held.close()
        stored = self._stored(params)
        extra = self._stored(joined(streams)) if streams else None
        self._sent[stored.sha256] = offers.Sent(
            BlobRef(stored.sha256, stored.size_bytes),
            BlobRef(extra.sha256, extra.size_bytes) if extra is not None else None,
        )
        size = stored.size_bytes + (extra.size_bytes if extra is not None else 0)
        return Model(params, streams, stored.sha256, size)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self._require_running()
        self._number = tasks[0].message.round if tasks else self._number
        self._tasks = {task.position: task for task in tasks}
        self._round_lasts = timedelta(seconds=terms.deadline_seconds)
        now = self._services.clock()
        opened = RoundRow(
            run=self._deployment.run,
            number=self._number,
            state="open",
            wanted=terms.wanted,
            population=terms.population,
            expected=terms.expected,
            started_at=now,
            deadline_at=now + self._round_lasts,
        )

        def work(connection: Connection) -> None:
            if rounds.find_round(connection, opened.run, opened.number) is not None:
                rounds.renew_all(connection, opened.run, opened.number, "train", now + self._lease)
                return
            common = self._common(opened.deadline_at, model, terms.expected.payload_limit_bytes)
            asked = self._asked(connection, [task.message.client for task in tasks], now)
            rounds.open_round(connection, opened, model.base)
            rounds.add_tasks(connection, offers.train_rows(tasks, common, asked))

        with self._services.blobs.naming:
            self._write(work)
            self._held.close()
        failpoints.reach("round.opened")
        self._notify(task.message.client for task in tasks)

    def results(self) -> Iterator[Answer | Silence]:
        """Told once the round is closed, when every accepted update was read through: a disk may have damaged one."""
        while True:
            opened, ended = self._closed()
            damaged = [row for row in ended if row.blob is not None and not self._is_whole(row.blob)]
            if not damaged:
                break
            self._ask_again(damaged)
        failpoints.reach("round.closed")
        for row in ended:
            yield self._told(row, opened)

    def cancel(self, tasks: Sequence[Task]) -> None:
        if tasks:
            positions = {task.position for task in tasks}
            self._end(tasks[0].message.round, "train", "cancelled", "round_closed", positions)
        sweep_uploads(self._services)

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        """Nothing: devices keep their own, and renew it when they hear that their update was accepted."""
        return {}

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        """Nothing to restore, see `client_state`."""

    def evaluate(self, number: int, model: Model, seconds: float) -> dict[str, EvaluationResult]:
        """Figures of the model on the devices' own held-out rows, by device id, as far as they came in time.

        Asks every matching device; asked again for the same round, only those that were not asked yet.
        """
        self._require_running()
        now = self._services.clock()
        deadline_at = now + timedelta(seconds=seconds)
        able = self._able("evaluate")
        run = self._deployment.run

        def work(connection: Connection) -> None:
            before = rounds.asked(connection, run, number, "evaluate")
            devices = sorted(able.keys() - before)
            common = self._common(deadline_at, model, _EVALUATION_LIMIT_BYTES, number)
            rounds.add_tasks(connection, offers.evaluate_rows(devices, common, able, first=len(before)))
            rounds.renew_all(connection, run, number, "evaluate", now + self._lease)

        self._write(work)
        self._notify(able)
        self._await_evaluations(number, deadline_at)
        return self._services.database.read(lambda at: answers.evaluations_of(at, run, number))

    def _stored(self, tensors: Tensors) -> BlobInfo:
        """A blob that stays until tasks name it.

        Raises:
            BlobDamaged: it was one before and is no longer what it was; every device would refuse it.
        """
        blobs = self._services.blobs

        def store() -> BlobInfo:
            with blobs.naming:
                info = blobs.put_arrays(tensors)
                self._held.enter_context(blobs.held(info.sha256))
            blobs.require_whole(info.sha256)
            return info

        return self._despite_full_disk(store)

    def _await_evaluations(self, number: int, deadline_at: datetime) -> None:
        run = self._deployment.run
        while True:
            self._require_running()
            seen, now = self._services.signals.seen(self._topic), self._services.clock()
            until = self._services.database.read(lambda at: rounds.next_expiry(at, run, number, "evaluate"))
            if until is None:
                return
            if now > deadline_at:
                self._end(number, "evaluate", "expired", "deadline")
            elif until < now:
                self._expire("evaluate", now, number)
            else:
                self._wait(seen, min(until, deadline_at) - now)

    def _able(self, kind: TaskKind) -> dict[str, Asked]:
        """Devices that may get a task of this run now."""
        now = self._services.clock()
        found: dict[str, Asked] = {}
        for device in self._services.database.read(lambda at: participants.candidates(at, now)):
            if device.report is None or matching.why_not(device, self._deployment, now, kind):
                continue
            runtime = matching.runtime_for(device.report, self._deployment)
            if runtime is not None:
                found[device.id] = Asked(runtime, self._fetch_until(device, now))
        return found

    def _asked(self, connection: Connection, devices: Sequence[str], now: datetime) -> dict[str, Asked]:
        """By device; one that changed its mind since it was chosen is asked all the same, and declines."""
        chosen: dict[str, Asked] = {}
        for device in devices:
            found = participants.candidate(connection, device)
            runtime = found and found.report and matching.runtime_for(found.report, self._deployment)
            until = self._fetch_until(found, now) if found else now + self._lease
            chosen[device] = Asked(runtime or self._deployment.runtimes[0], until)
        return chosen

    def _fetch_until(self, device: Candidate, now: datetime) -> datetime:
        """A device that was told to come back later than a lease lasts is not given up before it comes."""
        return max(now + self._lease, (device.expected_at or now) + matching.OVERDUE)

    def _common(
        self, deadline_at: datetime, model: Model, limit_bytes: int, number: int | None = None
    ) -> offers.Round:
        return offers.Round(
            deployment=self._deployment,
            number=self._number if number is None else number,
            sent=self._sent[model.base],
            lease_seconds=self._services.settings.lease_seconds,
            deadline_at=deadline_at,
            result_limit_bytes=limit_bytes,
        )

    def _closed(self) -> tuple[RoundRow, list[Finished]]:
        """The round once it takes nothing more, and how its tasks ended. Leases and the deadline are watched here."""
        while True:
            self._require_running()
            seen, now = self._services.signals.seen(self._topic), self._services.clock()
            opened, ended, until = self._services.database.read(self._progress)
            if opened.state != "open":
                return opened, ended
            if until is None or now > opened.deadline_at:
                self._close(min(now, opened.deadline_at))
            elif until < now:
                self._expire("train", now)
            else:
                self._wait(seen, min(until, opened.deadline_at) - now)

    def _is_whole(self, blob: str) -> bool:
        """Whether the bytes of an accepted update are still what they were."""
        self._require_running()
        try:
            self._services.blobs.require_whole(blob)
        except BlobDamaged:
            return False
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        return True

    def _ask_again(self, damaged: Sequence[Finished]) -> None:
        """Takes back updates that are damaged, opens the round again, and has their devices asked once more.

        The bytes go first: stopped in between, the update is missing, which is damage too.
        """
        run, number, now = self._deployment.run, self._number, self._services.clock()
        devices = {row.position: self._tasks[row.position].message.client for row in damaged}
        deadline_at = now + self._round_lasts

        def work(connection: Connection) -> None:
            rounds.reopen_round(connection, run, number, deadline_at)
            for device, asked in self._asked(connection, list(devices.values()), now).items():
                answers.take_back(connection, run, number, device, asked.fetch_until, deadline_at, now)

        with self._services.blobs.naming:
            self._services.blobs.remove([row.blob for row in damaged if row.blob is not None])
        self._write(work)
        self._notify(devices.values())

    def _progress(self, connection: Connection) -> tuple[RoundRow, list[Finished], datetime | None]:
        """The round, the tasks that ended, and when the next live one runs out; None where none is live.

        The state is read first: of a closed round everything that counts is then among the ended.
        """
        run = self._deployment.run
        opened = rounds.find_round(connection, run, self._number)
        assert opened is not None, "submitted before"
        ended = rounds.finished(connection, run, self._number)
        return opened, ended, rounds.next_expiry(connection, run, self._number, "train")

    def _told(self, row: Finished, opened: RoundRow) -> Answer | Silence:
        task = self._tasks[row.position]
        seconds = (row.answered_at - opened.started_at).total_seconds()
        if row.state == "accepted" and row.blob is not None:
            payload = arrays.FilePayload(self._services.blobs.path(row.blob))
            return Answer(task, intake.stored(payload), row.payload_bytes, seconds)
        words = row.words or row.reason or row.state
        if row.state == "rejected":
            reason = intake.reason_of(row.reason)
            return Answer(task, Rejection(task.message.client, reason, words), row.payload_bytes, seconds)
        return Silence(task, words, seconds)

    def _close(self, now: datetime) -> None:
        """Ends the round at its deadline, or where nobody can answer any more, in one transaction."""
        run, number = self._deployment.run, self._number

        def work(connection: Connection) -> list[str]:
            rounds.close_round(connection, run, number)
            words = "no result by the deadline"
            return rounds.finish_live(
                connection, run, number, "train", "expired", now, reason="deadline", words=words
            )

        self._notify(self._write(work))

    def _expire(self, kind: TaskKind, now: datetime, number: int | None = None) -> None:
        run = self._deployment.run
        at = self._number if number is None else number
        self._notify(self._write(lambda connection: rounds.expire(connection, run, at, kind, now)))

    def _end(
        self, number: int, kind: TaskKind, state: str, reason: str, positions: Collection[int] | None = None
    ) -> None:
        run, now = self._deployment.run, self._services.clock()
        words = "the round is over"
        self._notify(
            self._write(
                lambda connection: rounds.finish_live(
                    connection, run, number, kind, state, now, reason=reason, words=words, positions=positions
                )
            )
        )

    def _write(self, work: Callable[[Connection], T]) -> T:
        """What the write gives, tried again while the disk is full: its owner can mend that, the round goes on."""
        return self._despite_full_disk(lambda: self._services.database.write(work).result())

    def _despite_full_disk(self, act: Callable[[], T]) -> T:
        while True:
            self._require_running()
            try:
                return act()
            except Exception as error:
                if not is_disk_full(error):
                    raise
            self._stop.wait(_DISK_FULL_SECONDS)

    def _wait(self, seen: int, left: timedelta) -> None:
        seconds = min(max(left.total_seconds(), 0.01), _LONGEST_WAIT_SECONDS)
        self._services.signals.wait(self._topic, seen, seconds)

    def _notify(self, devices: Iterable[str]) -> None:
        self._services.signals.notify("events", *(f"device:{device}" for device in devices))

    def _require_running(self) -> None:
        if self._stop.is_set() or self._services.signals.closed:
            raise Stopped


def sweep_uploads(services: Services) -> None:
    """Removes part files of tasks that nobody may answer any more."""
    known = services.part_files.known()  # before what is live is looked up: a task may come in between
    services.part_files.forget(known - services.database.read(rounds.live_ids))
