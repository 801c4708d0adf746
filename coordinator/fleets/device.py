"""The device fleet: rounds on enrolled machines, through the database.

The fleet never talks to a device. It writes a round and its tasks as rows and sends a signal. Devices fetch their tasks
through the device API, which stores their answers; the fleet reads these and passes them to the engine.

    clients   devices that match the run, are awake and due        rows of devices, those of a relay side by side
    submit    opens the round                                      rows of rounds and tasks
    results   accepted updates, rejections, silences               rows of tasks and updates
    cancel    cancels the remaining tasks                          rows of tasks

Whatever process dies, the rows describe the open round, and submitting it again continues it. The thread of the run checks
leases and the deadline.

An accepted update that a disk has damaged counts as never received: before the results of a closed round are passed on, the
fleet verifies all its updates. If one is damaged, the round opens again and its device gets its task once more, unless it has added noise.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from time import monotonic

from sqlalchemy import Connection

from coordinator import failpoints
from coordinator.context.services import Services
from coordinator.db import answers, participants, rounds
from coordinator.db.rounds import EndedTask, RoundRow
from coordinator.fleets.model_blobs import HeldModels
from coordinator.fleets.run_session import (
    LONGEST_WAIT_SECONDS,
    RunSession,
    WaitNotice,
    find_awake,
    find_blocked,
    has_enough_relays,
    invite,
    invite_eligible,
    wait_for_answers,
)
from coordinator.rounds import intake
from coordinator.rounds.fleet import Answer, Model, OpenRound, Result, Silence, Terms
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import Task
from coordinator.scheduling import offers
from coordinator.scheduling.deployments import Deployment
from coordinator.scheduling.offers import Invitation, Part
from coordinator.storage.blobs import BlobDamaged
from edge_client.relay.expected import Expected
from edge_client.wire import arrays
from edge_client.wire.device import EvaluationResult, TaskKind, TaskMessage
from strategies.params import Params, Tensors

_EVALUATION_LIMIT_BYTES = 65_536
_NOT_ASKED_AGAIN = "its update was damaged on disk; another one, with new noise, would spend more privacy"


class DeviceFleet:
    """Implements `coordinator.rounds.fleet.Fleet` for one run."""

    def __init__(
        self,
        services: Services,
        deployment: Deployment,
        *,
        patience_seconds: float,
        seconds_now: Callable[[], float] = monotonic,
    ) -> None:
        self._services = services
        self._seconds_now = seconds_now
        self.session = RunSession(services, deployment.run)
        self._deployment = deployment
        self._patience_seconds = patience_seconds
        self._lease = timedelta(seconds=services.settings.lease_seconds)
        self._models = HeldModels(services.blobs, self.session.retry, deployment)
        self._narrower_bytes: dict[str, int] = {}
        self._number = 0
        self._present: int | None = None
        self._tasks: dict[int, Task] = {}
        self._round_duration = timedelta()

    def stop(self) -> None:
        """Ends every wait of this fleet with `Stopped`; callable from any thread."""
        self.session.stop()

    def find_open_round(self, round_number: int) -> OpenRound | None:
        self.session.require_running()
        self._number = round_number
        run = self._deployment.run

        def work(connection: Connection) -> OpenRound | None:
            row = rounds.find_round(connection, run, round_number)
            if row is None or row.state == "committed":
                return None
            stored = rounds.train_offers(connection, run, round_number)
            tasks = tuple(Task(at, TaskMessage.from_json(offer["message"])) for at, offer in stored)
            return OpenRound(tasks, row.population, row.expected.weight_limit)

        return self.session.read(work)

    def clients(self, wanted: int) -> Sequence[str]:
        end = self._seconds_now() + self._patience_seconds
        # Once a round has waited in vain for absent devices, later rounds do not wait for them again.
        enough = max(min(wanted, self._present or wanted), self._deployment.quorum)
        notice = WaitNotice(self._services, self._deployment, self._number, wanted)
        while True:
            self.session.require_running()
            seen, began = self._services.signals.seen("devices"), self._seconds_now()
            invitations = self.invite_eligible("train")
            awake = partial(find_awake, self._deployment, self._number, invitations)
            eligible, fewest = self.session.read(awake)
            left = end - self._seconds_now()
            is_spread = self._present or has_enough_relays(self._deployment, invitations.values())
            if len(eligible) >= enough and is_spread:
                return eligible
            if left <= 0 and len(eligible) >= fewest:
                self._present = len(eligible)
                return eligible
            blocked = self.session.read(
                partial(find_blocked, deployment=self._deployment, now=self._services.clock())
            )
            if notice.is_due(len(eligible), blocked, began):
                self.session.write(partial(notice.record, seconds=max(left, 0.0)))
                self.session.notify(())
            # Matching a large fleet takes a while; a pause keeps it from running at every single check-in.
            pause = 4 * (self._seconds_now() - began)
            self.session.wait_for_devices(seen, left if left > 0 else LONGEST_WAIT_SECONDS, pause)

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        dataset = self._deployment.dataset

        def work(connection: Connection) -> dict[str, int]:
            candidates = {name: participants.candidate(connection, name) for name in clients}
            return {
                name: each.report.datasets.get(dataset, 0)
                for name, each in candidates.items()
                if each is not None and each.report
            }

        return {name: count for name, count in self.session.read(work).items() if count >= 1}

    def release(self) -> None:
        """Releases the blobs of the prepared model: rows refer to them by now."""
        self._models.release()

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        self._narrower_bytes = {}
        return self._models.put(params, streams, self._narrower_bytes)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self.session.require_running()
        self._number = tasks[0].message.round if tasks else self._number
        self._tasks = {task.position: task for task in tasks}
        self._round_duration = timedelta(seconds=terms.closing.deadline_seconds)
        now = self._services.clock()
        narrower = {each.name: each.shapes for each in self._deployment.classes if each.is_narrower}
        expected = replace(terms.expected, narrower=narrower)
        opened = RoundRow(
            run=self._deployment.run,
            number=self._number,
            state="open",
            wanted=terms.closing.wanted,
            population=terms.population,
            expected=expected,
            started_at=now,
            deadline_at=now + self._round_duration,
        )

        devices = [task.message.client for task in tasks]
        invitations = self.session.read(lambda at: self.invite(at, devices, now))
        classes = self.session.read(lambda at: rounds.model_classes(at, opened.run, opened.number))
        classes = classes or {device: each.model_class for device, each in invitations.items()}
        parts = self._models.cut(classes.values(), model.params, expected)
        self._narrower_bytes |= {
            device: parts[name].params.size_bytes for device, name in classes.items() if name in parts
        }

        def work(connection: Connection) -> None:
            if rounds.find_round(connection, opened.run, opened.number) is not None:
                rounds.renew_leases(connection, opened.run, opened.number, "train", now + self._lease)
                return
            until = self.answer_until(opened)
            common = self.round_offer(opened.number, until, model, expected.payload_limit_bytes, parts)
            rounds.open_round(connection, opened, model.base)
            rounds.add_tasks(connection, offers.train_rows(tasks, common, invitations))

        with self._services.blobs.reference_lock:
            self.session.write(work)
            self.release()
        failpoints.reach("round.opened")
        self.session.notify(devices)

    def answer_until(self, opened: RoundRow) -> datetime:
        """When the tasks of a round end."""
        return opened.deadline_at

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        """Yields once the round is closed and every accepted update is verified."""
        while True:
            opened, ended = self.wait_until_closed()
            damaged = [row for row in ended if row.blob is not None and not self.is_intact(row.blob)]
            again = [row for row in damaged if self._tasks[row.position].message.noise is None]
            if not again:
                break
            self._reopen(again)
        failpoints.reach("round.closed")
        for row in ended:
            lost = replace(row, state="expired", words=_NOT_ASKED_AGAIN) if row in damaged else row
            yield self.to_result(self._tasks[row.position], lost, opened)

    def simulated_seconds(self) -> None:
        return None

    def cancel(self, tasks: Sequence[Task]) -> None:
        if tasks:
            positions = {task.position for task in tasks}
            self._end_tasks(tasks[0].message.round, "train", "cancelled", "round_closed", positions)
        sweep_uploads(self._services)

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        """Empty: devices store their own state, and renew it when their update is accepted."""
        return {}

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        """Does nothing, see `client_state`."""

    def evaluate(self, number: int, model: Model, seconds: float) -> dict[str, EvaluationResult]:
        """Figures of the model, or of each device's own one, on the devices' own held-out rows, by device id, of those that answer in time.

        Invites every matching device. A second call for the same round invites only devices not invited before.
        """
        self.session.require_running()
        now = self._services.clock()
        deadline_at = now + timedelta(seconds=seconds)
        invitations = self.invite_eligible("evaluate")
        run, expected = self._deployment.run, Expected({}, _EVALUATION_LIMIT_BYTES)
        parts = self._models.cut((each.model_class for each in invitations.values()), model.params, expected)

        def work(connection: Connection) -> None:
            before = rounds.devices_with_task(connection, run, number, "evaluate")
            devices = sorted(invitations.keys() - before)
            common = self.round_offer(number, deadline_at, model, _EVALUATION_LIMIT_BYTES, parts)
            rounds.add_tasks(
                connection,
                offers.evaluate_rows(
                    devices, common, invitations, len(before), self._deployment.personal_rule
                ),
            )
            rounds.renew_leases(connection, run, number, "evaluate", now + self._lease)

        self.session.write(work)
        self.session.notify(invitations)
        wait_for_answers(self._services, self.session, run, number, "evaluate", deadline_at)
        return self.session.read(lambda at: answers.evaluations_of(at, run, number))

    def traits(self, number: int) -> dict[str, dict[str, str]]:
        """Runtime and class of each device that has evaluated this round."""
        run = self._deployment.run
        return self.session.read(lambda at: answers.evaluator_traits(at, run, number))

    def invite_eligible(self, kind: TaskKind) -> dict[str, Invitation]:
        """Invitations of all devices that may get a task of this run now."""
        now = self._services.clock()
        candidates = self.session.read(lambda at: participants.candidates(at, now, self._deployment.project))
        return invite_eligible(candidates, self._deployment, kind, now, self._lease)

    def invite(self, connection: Connection, devices: Sequence[str], now: datetime) -> dict[str, Invitation]:
        """Invitations of these devices."""
        return invite(connection, self._deployment, devices, now, self._lease)

    def round_offer(
        self,
        number: int,
        deadline_at: datetime,
        model: Model,
        limit_bytes: int,
        parts: Mapping[str, Part] | None = None,
    ) -> offers.RoundOffer:
        """What the offers of a round have in common. `model`: as `model` returned it."""
        return offers.RoundOffer(
            deployment=self._deployment,
            number=number,
            blobs=self._models.of(model),
            lease_seconds=self._services.settings.lease_seconds,
            deadline_at=deadline_at,
            result_limit_bytes=limit_bytes,
            parts=parts or {},
        )

    def wait_until_closed(self) -> tuple[RoundRow, list[EndedTask]]:
        """The round once it is closed, and its finished tasks. Closes it at the deadline, and expires leases."""
        while True:
            self.session.require_running()
            seen, now = self.session.seen(), self._services.clock()
            opened, ended, until = self.session.read(self._progress)
            if opened.state != "open":
                return opened, ended
            if until is None or opened.closing.is_past((now - opened.started_at).total_seconds()):
                self.close_round(min(now, opened.deadline_at))
            elif until < now:
                self.expire_leases(now)
            else:
                self.session.wait(seen, min(until, opened.deadline_at) - now)

    def is_intact(self, blob: str) -> bool:
        """Whether the bytes of an accepted update are unchanged."""
        self.session.require_running()
        try:
            self._services.blobs.require_intact(blob)
        except (BlobDamaged, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            return False
        return True

    def _reopen(self, damaged: Sequence[EndedTask]) -> None:
        """Removes damaged updates, opens the round again, and offers their devices the task once more. The blobs are removed first: if the
        process dies in between, a missing update counts as damaged too."""
        run, number, now = self._deployment.run, self._number, self._services.clock()
        devices = [row.device for row in damaged]
        deadline_at = now + self._round_duration

        def work(connection: Connection) -> None:
            rounds.reopen_round(connection, run, number, deadline_at)
            for device, invitation in self.invite(connection, devices, now).items():
                answers.revoke_update(
                    connection, run, number, device, invitation.fetch_until, deadline_at, now
                )

        with self._services.blobs.reference_lock:
            self._services.blobs.remove([row.blob for row in damaged if row.blob is not None])
        self.session.write(work)
        self.session.notify(devices)

    def _progress(self, connection: Connection) -> tuple[RoundRow, list[EndedTask], datetime | None]:
        """The round, its finished tasks, and when the next live one expires; None if none is live.

        The state is read first: of a closed round all accepted updates are then among the finished tasks.
        """
        run = self._deployment.run
        opened = rounds.find_round(connection, run, self._number)
        assert opened is not None, "submitted before"
        ended = rounds.ended_tasks(connection, run, self._number)
        return opened, ended, rounds.next_expiry(connection, run, self._number, "train")

    def to_result(self, task: Task, ended: EndedTask, opened: RoundRow) -> Answer | Silence:
        """What the engine gets for a task of a round once it has ended."""
        seconds = (ended.answered_at - opened.started_at).total_seconds()
        if ended.state == "accepted" and ended.blob is not None:
            payload = arrays.FilePayload(self._services.blobs.path(ended.blob))
            return Answer(task, intake.read_accepted(payload), ended.payload_bytes, seconds)
        message = ended.words or ended.reason or ended.state
        if ended.state == "rejected":
            reason = intake.parse_reason(ended.reason)
            return Answer(task, Rejection(ended.device, reason, message), ended.payload_bytes, seconds)
        return Silence(task, message, seconds)

    def close_round(self, now: datetime) -> None:
        """Ends the round, at its deadline or when no device can answer any more, in one transaction."""
        run, number = self._deployment.run, self._number

        def work(connection: Connection) -> list[str]:
            rounds.close_round(connection, run, number)
            message = "no result by the deadline"
            return rounds.end_live_tasks(
                connection, run, number, "train", "expired", now, reason="deadline", message=message
            )

        self.session.notify(self.session.write(work))

    def expire_leases(self, now: datetime) -> None:
        """Ends the train tasks of the open round whose lease has expired."""
        run, number = self._deployment.run, self._number
        self.session.notify(
            self.session.write(lambda at: rounds.expire_leases(at, run, number, "train", now))
        )

    def _end_tasks(
        self, number: int, kind: TaskKind, state: str, reason: str, positions: Collection[int] | None = None
    ) -> None:
        run, now = self._deployment.run, self._services.clock()
        message = "the round is over"
        devices = self.session.write(
            lambda at: rounds.end_live_tasks(
                at, run, number, kind, state, now, reason=reason, message=message, positions=positions
            )
        )
        self.session.notify(devices)


def sweep_uploads(services: Services) -> None:
    """Removes partial uploads of tasks that no device may answer any more."""
    # Read before the live tasks: a task may be added in between.
    known = services.part_files.tasks()
    services.part_files.forget(known - services.database.read(rounds.live_task_ids))
