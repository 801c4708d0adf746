"""What a run on devices and those before it on the same data set spend together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from coordinator.context.services import Services
from coordinator.db import privacy as rows
from coordinator.privacy.mechanism import Mechanism, compose


@dataclass(frozen=True)
class EarlierRuns:
    """What so many earlier runs on a data set may have spent of a device: epsilon `before` a run, and `after` all of its rounds."""

    dataset: str
    runs: int
    before: float
    after: float
    delta: float


def count_enrolled(services: Services, project: str) -> int:
    """Devices of the project."""
    return services.database.read(partial(rows.enrolled, project=project))


def compose_with_earlier(
    planned: Mechanism, dataset: str, services: Services, project: str
) -> EarlierRuns | None:
    """What a run and those before it on the same data set spend together; None: there are none."""
    earlier = services.database.read(partial(rows.of_dataset, project=project, dataset=dataset))
    if not earlier:
        return None
    known = [Mechanism.of_json(row.mechanism) for row in earlier]
    delta = min(each.delta for each in (*known, planned))
    spent = [each.releases(row.rounds) for each, row in zip(known, earlier, strict=True)]
    after = compose([*spent, planned.releases(planned.rounds)], delta)
    return EarlierRuns(dataset, len(earlier), compose(spent, delta), after, delta)
