"""The device fleet of a run with relays: the updates stay at the relays, and what these have folded comes here.

A round is that of `DeviceFleet`, in whose order the devices of a relay are neighbours. An update counts once the relay has named its figures
(`device_api.relays`), with which the round closes as any other. Then:

    1. each relay with updates gets a task to fold those that count     rows of tasks
    2. its answer is checked where it arrives (`rounds.folded`)
    3. the engine gets the figures of the updates, and the parts

A relay that gives no answer by the round's deadline is left out with its devices, and so is one that has lost an update. A relay that is asked
late has a lease's time, but no more than the whole round. If the engine then leaves updates out, the relays concerned are asked once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.db import devices, relays, rounds
from coordinator.db.relays import FoldTask
from coordinator.db.rounds import EndedTask, RoundRow
from coordinator.fleets.device import DeviceFleet
from coordinator.fleets.run_session import wait_for_answers
from coordinator.fleets.secure.device import SecureDeviceFleet
from coordinator.rounds import folded
from coordinator.rounds.fleet import Answer, Measured, Result, Silence
from coordinator.rounds.plan import Task
from coordinator.scheduling import offers
from coordinator.scheduling.deployments import Deployment, Relaying
from edge_client.wire.arrays import FilePayload
from edge_client.wire.relays import Figures, FoldRequest, Member
from edge_client.wire.strict import parse_message
from strategies.update import RelayPart

Asked = Mapping[str, FoldRequest]
"""What each relay is to fold."""


class RelayedDeviceFleet(DeviceFleet):
    """As `DeviceFleet`, for one run with relays."""

    def __init__(
        self, services: Services, deployment: Deployment, relaying: Relaying, *, patience_seconds: float
    ) -> None:
        super().__init__(services, deployment, patience_seconds=patience_seconds)
        self._services = services
        self._deployment = deployment
        self._relaying = relaying
        self._fold_seconds = services.settings.lease_seconds

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        """As `DeviceFleet.results`; the part of each relay follows the answers."""
        opened, _ = self.wait_until_closed()
        asked = self._requests(opened, excluded)
        answered = self._ask(opened, asked)
        lost = self._lose_absent(opened, asked, answered)
        figures = self._figures(opened)
        for row in self.session.read(lambda at: rounds.ended_tasks(at, opened.run, opened.number)):
            yield self.to_result(self._tasks[row.position], row, opened)
        for relay, request in asked.items():
            if relay in answered:
                yield self._part(answered[relay], request, figures, opened)
            elif relay not in lost:
                yield folded.empty_part(request, figures)

    def to_result(self, task: Task, ended: EndedTask, opened: RoundRow) -> Answer | Silence:
        if ended.state != "accepted" or ended.figures is None:
            return super().to_result(task, ended, opened)
        told = parse_message(Figures, ended.figures, "figures")
        measured = Measured(told.num_examples, told.num_steps, told.norm, told.streams)
        seconds = (ended.answered_at - opened.started_at).total_seconds()
        return Answer(task, measured, ended.payload_bytes, seconds)

    def _requests(self, opened: RoundRow, excluded: Collection[int]) -> dict[str, FoldRequest]:
        """What each relay with updates that count is to fold."""
        counted = self._figures(opened).keys() - set(excluded)
        cohort: dict[str, dict[int, str]] = {}
        for at, offer in self.session.read(lambda at: rounds.train_offers(at, opened.run, opened.number)):
            cohort.setdefault(offer[offers.RELAY], {})[at] = offer["task"]
        return {
            relay: FoldRequest(
                strategy=self._relaying.strategy,
                options=dict(self._relaying.options),
                start=min(tasks),
                stop=max(tasks) + 1,
                weight_limit=opened.expected.weight_limit,
                members=members,
            )
            for relay, tasks in cohort.items()
            if (members := tuple(Member(at, tasks[at]) for at in sorted(tasks) if at in counted))
        }

    def _ask(self, opened: RoundRow, asked: Asked) -> dict[str, FoldTask]:
        """The accepted answers by relay, once every relay has answered or its time is over."""
        figures = self._figures(opened)
        wanted = {
            relay: request for relay, request in asked.items() if folded.count_results(request, figures)
        }
        while True:
            now = self._services.clock()
            seconds = min(self._fold_seconds, opened.closing.deadline_seconds)
            deadline_at = max(opened.deadline_at, now + timedelta(seconds=seconds))
            self.session.write(partial(self._add_tasks, opened, wanted, figures, deadline_at))
            self.session.notify(wanted)
            run, number = opened.run, opened.number
            wait_for_answers(self._services, self.session, run, number, "fold", deadline_at)
            answered = {each.device: each for each in self._fold_tasks(opened) if each.result is not None}
            damaged = [each.id for each in answered.values() if not self.is_intact(str(each.result))]
            if not damaged:
                return {relay: each for relay, each in answered.items() if relay in wanted}
            self.session.write(partial(relays.forget_fold_tasks, ids=damaged))

    def _add_tasks(
        self,
        opened: RoundRow,
        wanted: Asked,
        figures: Mapping[int, Figures],
        deadline_at: datetime,
        connection: Connection,
    ) -> None:
        """Adds a task for each relay that has not answered just this."""
        relays.forget_earlier_folds(connection, opened.run, opened.number)
        there = relays.fold_tasks(connection, opened.run, opened.number)
        done = {
            each.device
            for each in there
            if each.result is not None and _request_of(each) == wanted.get(each.device)
        }
        relays.forget_fold_tasks(connection, [each.id for each in there if each.device not in done])
        rows = [
            offers.fold_row(
                relay, position, request, self._offer(opened, request, figures, deadline_at), deadline_at
            )
            for position, (relay, request) in enumerate(wanted.items())
            if relay not in done
        ]
        rounds.add_tasks(connection, rows)

    def _offer(
        self,
        opened: RoundRow,
        request: FoldRequest,
        figures: Mapping[int, Figures],
        deadline_at: datetime,
    ) -> offers.RoundOffer:
        return offers.RoundOffer(
            deployment=self._deployment,
            number=opened.number,
            blobs=None,
            lease_seconds=self._services.settings.lease_seconds,
            deadline_at=deadline_at,
            result_limit_bytes=folded.limit_bytes(request, figures, opened.expected),
        )

    def _lose_absent(self, opened: RoundRow, asked: Asked, answered: Mapping[str, FoldTask]) -> set[str]:
        """Takes back the updates of relays that gave no answer, and returns these."""
        absent = [
            each for each in self._fold_tasks(opened) if each.device in asked and each.device not in answered
        ]
        now = self._services.clock()

        def work(connection: Connection) -> None:
            names = devices.names(connection, [each.device for each in absent])
            cohort = dict(rounds.train_offers(connection, opened.run, opened.number))
            for each in absent:
                members = asked[each.device].members
                told = each.words if each.state in ("declined", "rejected") else "it gave no answer in time"
                why = f"relay {names[each.device]} did not pass it on: {told}"
                relays.lose_updates(
                    connection,
                    opened.run,
                    opened.number,
                    each.device,
                    why,
                    [cohort[member.position]["message"]["client"] for member in members],
                    now,
                )

        if absent:
            self.session.write(work)
        return {each.device for each in absent}

    def _part(
        self, answer: FoldTask, request: FoldRequest, figures: Mapping[int, Figures], opened: RoundRow
    ) -> RelayPart:
        payload = FilePayload(self._services.blobs.path(str(answer.result)))
        return folded.read_part(payload, answer.id, request, figures, opened.expected)

    def _figures(self, opened: RoundRow) -> dict[int, Figures]:
        return self.session.read(lambda at: relays.figures_of(at, opened.run, opened.number))

    def _fold_tasks(self, opened: RoundRow) -> list[FoldTask]:
        return self.session.read(lambda at: relays.fold_tasks(at, opened.run, opened.number))


def device_fleet(services: Services, deployment: Deployment, *, patience_seconds: float) -> DeviceFleet:
    """The fleet of a synchronous run on devices."""
    if deployment.secure is not None:
        return SecureDeviceFleet(services, deployment, deployment.secure, patience_seconds=patience_seconds)
    if deployment.relaying is None:
        return DeviceFleet(services, deployment, patience_seconds=patience_seconds)
    return RelayedDeviceFleet(services, deployment, deployment.relaying, patience_seconds=patience_seconds)


def _request_of(task: FoldTask) -> FoldRequest:
    return parse_message(FoldRequest, task.offer["message"], "request")
