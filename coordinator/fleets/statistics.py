"""A statistics round on devices: asks every matching device, through the database, and collects their reports.

Like the evaluation of a round, it never talks to a device: tasks are rows, which devices fetch and answer through the device
API. Asking again after a restart continues: only devices that were not asked before get a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import monotonic

from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.db import answers, events, participants, rounds, runs
from coordinator.fleets.run_session import (
    LONGEST_WAIT_SECONDS,
    RunSession,
    WaitNotice,
    blocked_json,
    find_blocked,
    invite_eligible,
    wait_for_answers,
)
from coordinator.rounds.fleet import Stopped
from coordinator.scheduling import offers
from coordinator.scheduling.deployments import Deployment
from coordinator.scheduling.offers import Invitation
from edge_client.wire.statistics import StatisticsRequest, StatisticsResult

REQUESTED = "statistics_requested"
"""The event of a round's request, with the devices that got none and why."""

_RESULT_LIMIT_BYTES = 2**17
"""The largest message that the device API takes."""


@dataclass(frozen=True)
class Patience:
    """How long to wait: for `least` devices to be there, and then for their answers."""

    least: int
    devices_seconds: float
    answers_seconds: float


class StatisticsFleet:
    """The devices of one run, to be asked for statistics. For the run's thread; `stop` from any thread."""

    def __init__(self, services: Services, deployment: Deployment) -> None:
        self._services = services
        self._deployment = deployment
        self._session = RunSession(services, deployment.run)
        self._lease = timedelta(seconds=services.settings.lease_seconds)

    def stop(self) -> None:
        """Ends every wait with `Stopped`."""
        self._session.stop()

    def ask(self, number: int, request: StatisticsRequest, patience: Patience) -> dict[str, StatisticsResult]:
        """What the devices report, by device id, of those that answer in time.

        `number`: distinguishes the rounds of a run; a second call with it asks only devices not asked before.
        """
        invitations = self._invitations(number, patience)
        run, services = self._deployment.run, self._services
        now = services.clock()
        deadline_at = now + timedelta(seconds=patience.answers_seconds)
        common = offers.RoundOffer(
            deployment=self._deployment,
            number=number,
            blobs=None,
            lease_seconds=services.settings.lease_seconds,
            deadline_at=deadline_at,
            result_limit_bytes=_RESULT_LIMIT_BYTES,
        )

        def work(connection: Connection) -> None:
            before = rounds.devices_with_task(connection, run, number, "statistics")
            devices = sorted(invitations.keys() - before)
            if not before:
                blocked = [
                    each
                    for each in find_blocked(connection, self._deployment, now)
                    if each.device
                    not in invitations  # a run of training blocks for reasons that statistics do not have
                ]
                events.record(
                    connection,
                    now,
                    REQUESTED,
                    run=run,
                    round=number,
                    devices=len(devices),
                    **blocked_json(blocked),
                )
            rows = offers.statistics_rows(devices, request, common, invitations, first=len(before))
            rounds.add_tasks(connection, rows)
            rounds.renew_leases(connection, run, number, "statistics", now + self._lease)

        self._session.write(work)
        self._session.notify(invitations)
        wait_for_answers(services, self._session, run, number, "statistics", deadline_at)
        return self._session.read(partial(answers.statistics_of, run=run, number=number))

    def _invitations(self, number: int, patience: Patience) -> dict[str, Invitation]:
        """Invitations of all devices that can be asked, once there are enough or patience ends."""
        services, end = self._services, monotonic() + patience.devices_seconds
        notice = WaitNotice(services, self._deployment, number, patience.least)
        while True:
            self._require_live()
            seen, now = services.signals.seen("devices"), services.clock()
            candidates = self._session.read(
                partial(participants.candidates, now=now, project=self._deployment.project)
            )
            found = invite_eligible(candidates, self._deployment, "statistics", now, self._lease)
            left = end - monotonic()
            if len(found) >= patience.least or left <= 0:
                return found
            blocked = self._session.read(partial(find_blocked, deployment=self._deployment, now=now))
            if notice.is_due(len(found), blocked, monotonic()):
                self._session.write(partial(notice.record, seconds=left))
                self._session.notify(())
            self._session.wait_for_devices(seen, min(left, LONGEST_WAIT_SECONDS), pause_seconds=0.1)

    def _require_live(self) -> None:
        """Raises: Stopped: the fleet was stopped, the process is ending, or the run has ended."""
        self._session.require_running()
        row = self._session.read(partial(runs.find, run=self._deployment.run))
        if row is None or row.state not in runs.LIVE:
            raise Stopped
