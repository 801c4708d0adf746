"""What a run on devices and those before it on the same data set spend together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.db import participants
from coordinator.db import privacy as rows
from coordinator.privacy.mechanism import Mechanism, compose

_PAGE = 1000


@dataclass(frozen=True)
class EarlierRuns:
    """What so many earlier runs on a data set may have spent of what this one hides: epsilon `before` it, and `after` all of its rounds."""

    dataset: str
    runs: int
    before: float
    after: float
    delta: float


def count_enrolled(services: Services, project: str) -> int:
    """Devices of the project."""
    return services.database.read(partial(rows.enrolled, project=project))


def declared_rows(services: Services, project: str, dataset: str) -> tuple[int, ...]:
    """How many rows of a data set each device of the project has said it has; of those that have none nothing."""

    def read(connection: Connection) -> list[int]:
        found, after = [], ""
        while page := participants.enrolled(connection, _PAGE, after, project=project):
            after = page[-1].id
            found += [each.report.datasets.get(dataset, 0) for each in page if each.report is not None]
        return found

    return tuple(count for count in services.database.read(read) if count >= 1)


def compose_with_earlier(
    planned: Mechanism, dataset: str, services: Services, project: str
) -> EarlierRuns | None:
    """What a run and those before it that hide the same, on the same data set, spend together; None: there are none."""
    found = services.database.read(partial(rows.of_dataset, project=project, dataset=dataset))
    earlier = [row for row in found if Mechanism.of_json(row.mechanism).hides == planned.hides]
    if not earlier:
        return None
    known = [Mechanism.of_json(row.mechanism) for row in earlier]
    delta = min(each.delta for each in (*known, planned))
    spent = [each.releases(row.rounds) for each, row in zip(known, earlier, strict=True)]
    after = compose([*spent, planned.releases(planned.rounds)], delta)
    return EarlierRuns(dataset, len(earlier), compose(spent, delta), after, delta)
