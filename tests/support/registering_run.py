"""A coordinator's runs over a fleet that answers at once, in a process of its own, for tests that kill it at its end.

`python -m tests.support.registering_run HOME EXPERIMENT.json` carries a run through.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from coordinator.runs.service import RunService
from edge_client.processes.process import die_with_parent
from tests.support.fake_devices import answering
from tests.support.services import services_in


def main(home: Path, experiment: Path) -> None:
    with services_in(home) as services:
        service = RunService(services, answering)
        run = service.create(json.loads(experiment.read_text()))
        service.join(run, 120.0)


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
