"""The device fleet of a run with secure aggregation: devices send masked updates, and the engine gets the sums of groups.

A round is opened as that of `DeviceFleet`. Its tasks say in which group a device is, and how it clips and encodes. The devices of a group train,
then go through the stages of the protocol together (`edge_client.wire.secure`). Their messages are rows, their masked updates blobs
(`device_api.secure`, `device_api.uploads`). This thread closes a stage when every device that is left has sent its message, or its time is over:

    keys               the round's deadline, or once as many devices as a round wants have sent theirs
    shares, input      as long again, if the device keeps its lease
    later stages       a lease

Whatever process dies, the rows say which messages count, and taking the same ones again gives the same replies and the same sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import Connection

from coordinator import failpoints
from coordinator.context.services import Services
from coordinator.db import rounds, secure
from coordinator.db.rounds import LIVE, EndedTask, RoundRow
from coordinator.db.secure import GroupRow, MemberRow, Message
from coordinator.fleets.device import DeviceFleet
from coordinator.fleets.secure.groups import (
    UNKNOWN_NORM,
    Group,
    RoundSum,
    make_groups,
    most_weight,
    shapes_of,
    weighting_of,
)
from coordinator.fleets.secure.protocol import GroupProtocol
from coordinator.rounds.fleet import Answer, Measured, Model, Result, Silence, Terms
from coordinator.rounds.plan import Task
from coordinator.scheduling.deployments import Deployment, SecureSums
from edge_client.transport.signatures import DeviceKeys
from edge_client.wire.secure import STAGES, SecureTask
from strategies.secagg.errors import ProtocolError
from strategies.secagg.threshold import FEWEST_CLIENTS

KEYS, SHARES, INPUT = (STAGES.index(stage) for stage in ("keys", "shares", "input"))


class SecureDeviceFleet(DeviceFleet):
    """As `DeviceFleet`, for one run with secure aggregation."""

    def __init__(
        self, services: Services, deployment: Deployment, sums: SecureSums, *, patience_seconds: float
    ) -> None:
        super().__init__(services, deployment, patience_seconds=patience_seconds)
        self._sums = sums
        self._terms: Terms | None = None
        self._protocols: list[GroupProtocol] = []

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        groups = self._groups(tasks, terms)
        own = {position: group for group in groups for position in group.positions}
        tasks = [
            replace(task, message=replace(task.message, secure=asdict(own[task.position].task)))
            for task in tasks
        ]
        limit = max((each.task.masked_bytes(each.vector) for each in groups), default=1)
        expected = replace(terms.expected, payload_limit_bytes=limit)
        super().submit(tasks, model, replace(terms, expected=expected))
        self._terms = terms
        self._protocols = [self._protocol(group) for group in groups]

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        # By which updates with noise are not weighed, for nothing would hide them.
        return {} if self._sums.noise is not None else super().declared_examples(clients)

    def answer_until(self, opened: RoundRow) -> datetime:
        """Masked updates follow the keys, for which devices have until the round's deadline."""
        return opened.deadline_at + (opened.deadline_at - opened.started_at)

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        """Yields once every group is through; the sums follow the answers."""
        assert self._terms is not None and not excluded  # submitted; no update is compared with others
        opened = self._play()
        failpoints.reach("round.closed")
        run, number = opened.run, opened.number
        ended = self.session.read(lambda at: rounds.ended_tasks(at, run, number))
        declared = self.declared_examples([each.device for each in ended])
        sent = self.session.read(lambda at: secure.bytes_exchanged(at, run, number, up=True))
        got = self.session.read(lambda at: secure.bytes_exchanged(at, run, number, up=False))
        answers: dict[int, list[Answer]] = {protocol.group.number: [] for protocol in self._protocols}
        own = {position: each for each in self._protocols for position in each.group.positions}
        for row in ended:
            protocol = own[row.position]
            result = self._result(protocol, row, opened, declared, sent)
            if isinstance(result, Answer) and isinstance(result.verdict, Measured):
                result = replace(result, received_bytes=got.get(row.device, 0))
                answers[protocol.group.number].append(result)
            yield result
        total = RoundSum(self._terms, len(self._tasks))
        for protocol in self._protocols:
            if protocol.has_sum:
                yield from total.add(protocol.group, protocol.sum(), answers[protocol.group.number])
        yield from total.finish()

    def _groups(self, tasks: Sequence[Task], terms: Terms) -> list[Group]:
        """The groups of a round: those that its tasks name if it was open before."""
        told = {task.position: SecureTask.of(task.message) for task in tasks}
        if not all(told.values()):
            cohort = [task.message.client for task in tasks]
            declared = self.declared_examples(cohort) if weighting_of(terms) == "examples" else {}
            number = tasks[0].message.round
            return make_groups(self._sums, len(tasks), number, terms, most_weight(terms, declared))
        positions: dict[SecureTask, list[int]] = {}
        for position, each in told.items():
            assert each is not None
            positions.setdefault(each, []).append(position)
        groups = [Group(sorted(at), each, each.vector(shapes_of(terms))) for each, at in positions.items()]
        return sorted(groups, key=lambda group: group.number)

    def _protocol(self, group: Group) -> GroupProtocol:
        members = {self._tasks[position].message.client for position in group.positions}
        task = self._tasks[group.positions[0]]
        terms = group.terms(self._deployment.run, task) if len(members) >= FEWEST_CLIENTS else None
        return GroupProtocol(group, terms, members, DeviceKeys(self._services.authority.certificate))

    def _play(self) -> RoundRow:
        """Takes every group through its stages; the round is closed then."""
        run, number, now = self._deployment.run, self._number, self._services.clock()
        count = len(self._protocols)
        self.session.write(lambda at: secure.open_groups(at, run, number, count, now))
        rows = self.session.read(lambda at: secure.find_groups(at, run, number))
        for protocol, row in zip(self._protocols, rows, strict=True):
            self._catch_up(protocol, row)
        while True:
            self.session.require_running()
            seen, now = self.session.seen(), self._services.clock()
            open_groups = [each for each in self._protocols if not each.is_over]
            kinds = {secure.REFUSED, *(2 * each.stage for each in open_groups)}
            look = partial(self._look, kinds=kinds)
            opened, groups, members = self.session.read(look)
            if not open_groups:
                self.close_round(now)
                return opened
            waits = [
                _waits_until(each, groups[each.group.number], members, opened, now, self._lease)
                for each in open_groups
            ]
            for protocol, until in zip(open_groups, waits, strict=True):
                if until is None:
                    self._close_stage(protocol, now)
            left = [until for until in waits if until is not None]
            if len(left) == len(waits):
                if min(left) < now:
                    self.expire_leases(now)
                else:
                    self.session.wait(seen, min(left) - now)

    def _look(
        self, connection: Connection, kinds: Collection[int]
    ) -> tuple[RoundRow, dict[int, GroupRow], list[MemberRow]]:
        """The round, its groups, and its devices with their messages of these kinds."""
        run, number = self._deployment.run, self._number
        opened = rounds.find_round(connection, run, number)
        assert opened is not None, "submitted before"
        groups = {each.number: each for each in secure.find_groups(connection, run, number)}
        return opened, groups, secure.members(connection, run, number, kinds)

    def _catch_up(self, protocol: GroupProtocol, row: GroupRow) -> None:
        """Takes the group through the stages that an earlier process has closed."""
        if row.ended is not None:
            protocol.ended = row.ended
        elif protocol.ended is not None:
            self._write_end(row.number, protocol.ended)
        while protocol.stage < row.stage and not protocol.is_over:
            self._take(protocol, self.session.read(partial(self._messages, protocol)))

    def _close_stage(self, protocol: GroupProtocol, now: datetime) -> None:
        """Closes the stage of a group, whose messages count from now on, and passes on the replies."""
        run, number, stage = self._deployment.run, self._number, protocol.stage

        def work(connection: Connection) -> tuple[dict[str, Message], list[str]]:
            secure.close_stage(connection, run, number, protocol.group.number, stage, now)
            sent = self._messages(protocol, connection)
            late = [
                position
                for position in protocol.group.positions
                if self._tasks[position].message.client not in sent
            ]
            ended = rounds.end_live_tasks(
                connection,
                run,
                number,
                "train",
                "expired",
                now,
                reason="deadline",
                message=f"its {STAGES[stage]} had not come when the others went on",
                positions=late,
            )
            return sent, ended

        sent, ended = self.session.write(work)
        failpoints.reach("secure.closed")
        self.session.notify(ended)
        self._take(protocol, sent)

    def _messages(self, protocol: GroupProtocol, connection: Connection) -> dict[str, Message]:
        """The messages of the group's stage, by device. Of a masked update the body is the hash of its blob."""
        run, number = self._deployment.run, self._number
        if protocol.stage == INPUT:
            return {
                row.device: Message(row.blob.encode(), None)
                for row in rounds.ended_tasks(connection, run, number)
                if row.blob is not None and row.device in protocol.members
            }
        of = {
            row.task: row.device
            for row in secure.members(connection, run, number, ())
            if row.device in protocol.members
        }
        found = secure.messages(connection, of, 2 * protocol.stage)
        return {of[task]: message for task, message in found.items()}

    def _take(self, protocol: GroupProtocol, sent: Mapping[str, Message]) -> None:
        """Has the group's server take the messages of a closed stage, and stores its replies."""
        number, stage = protocol.group.number, protocol.stage
        try:
            closed = protocol.close(self._bodies(protocol, sent))
        except ProtocolError as error:
            protocol.ended = why = str(error)
            self._write_end(number, why)
            self.session.notify(sent)
            return
        run, at_round = self._deployment.run, self._number

        def work(connection: Connection) -> None:
            of = {row.device: row.task for row in secure.members(connection, run, at_round, ())}
            for device, reply in closed.replies.items():
                secure.put(connection, of[device], 2 * stage + 1, reply)
            for device, why in closed.refused.items():
                secure.put(connection, of[device], secure.REFUSED, why.encode())

        self.session.write(work)
        failpoints.reach("secure.answered")
        self.session.notify(sent)

    def _write_end(self, group: int, why: str) -> None:
        """Records that a group has no sum, and ends the tasks of its devices."""
        run, number, now = self._deployment.run, self._number, self._services.clock()
        positions = self._protocols[group].group.positions

        def work(connection: Connection) -> list[str]:
            secure.end_group(connection, run, number, group, why)
            message = f"its group has no sum: {why}"
            return rounds.end_live_tasks(
                connection,
                run,
                number,
                "train",
                "expired",
                now,
                reason="no_sum",
                message=message,
                positions=positions,
            )

        self.session.notify(self.session.write(work))

    def _bodies(
        self, protocol: GroupProtocol, sent: Mapping[str, Message]
    ) -> Iterator[tuple[str, bytes, str | None]]:
        """Each message as it was sent; a masked update that a disk has damaged since was never received."""
        for device, message in sorted(sent.items()):
            if protocol.stage != INPUT:
                yield device, message.body, message.certificate
                continue
            blob = message.body.decode()
            if self.is_intact(blob):
                yield device, self._services.blobs.path(blob).read_bytes(), None

    def _result(
        self,
        protocol: GroupProtocol,
        row: EndedTask,
        opened: RoundRow,
        declared: Mapping[str, int],
        sent: Mapping[str, int],
    ) -> Answer | Silence:
        """What the engine gets of a device: that it took part, and nothing of its update."""
        task = self._tasks[row.position]
        if row.state != "accepted":
            return self.to_result(task, row, opened)
        seconds = (row.answered_at - opened.started_at).total_seconds()
        if row.device not in protocol.included:
            why = protocol.ended
            return Silence(
                task, f"its group has no sum: {why}" if why else "its masked update does not count", seconds
            )
        measured = Measured(max(1, declared.get(row.device, 1)), 1, UNKNOWN_NORM, {})
        return Answer(task, measured, row.payload_bytes + sent.get(row.device, 0), seconds)


def _waits_until(
    protocol: GroupProtocol,
    row: GroupRow,
    members: Sequence[MemberRow],
    opened: RoundRow,
    now: datetime,
    lease: timedelta,
) -> datetime | None:
    """Until when a group waits for more messages of its stage; None: it is over."""
    stage = protocol.stage
    own = [each for each in members if each.device in protocol.members]
    missing = [each for each in own if not _has_sent(each, stage) and secure.REFUSED not in each.sent]
    if stage <= INPUT:
        missing = [each for each in missing if each.state in LIVE]
    if not missing:
        return None
    duration = opened.deadline_at - opened.started_at
    until = {KEYS: opened.deadline_at, SHARES: row.opened_at + duration, INPUT: row.opened_at + duration}.get(
        stage, row.opened_at + min(lease, duration)
    )
    if now > until or (stage == KEYS and _enough_keys(members, opened)):
        return None
    if stage <= INPUT:
        until = min([until, *(each.leased_until for each in missing if each.leased_until is not None)])
    return until


def _has_sent(member: MemberRow, stage: int) -> bool:
    return member.state == "accepted" if stage == INPUT else 2 * stage in member.sent


def _enough_keys(members: Sequence[MemberRow], opened: RoundRow) -> bool:
    """Whether as many devices as a round wants have sent keys; the others are too slow."""
    return opened.closing.is_complete(sum(_has_sent(each, KEYS) for each in members))
