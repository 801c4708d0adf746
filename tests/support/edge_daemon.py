"""`fedloop-edge` with a training that takes no framework, as a process of its own: `python -m tests.support.edge_daemon …`.

FEDLOOP_TEST_TRAINS_UNTIL: a file; training goes on until it is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_client.commands import cli
from edge_client.daemon import main
from edge_client.data import preview
from tests.support.edge import FakeTraining


class SlowTraining(FakeTraining):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(busy=_busy)


class Rows:
    def __init__(self, tables: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self._rows = dict.fromkeys(tables, 12)

    def __call__(self) -> Mapping[str, int]:
        return self._rows


def _busy() -> bool:
    until = os.environ.get("FEDLOOP_TEST_TRAINS_UNTIL")
    time.sleep(0.02)
    return until is not None and not Path(until).exists()


main.TrainingProcess = SlowTraining  # type: ignore[assignment,misc]
main.installed_runtimes = lambda: {"litert": "2.3.0"}
main.installed_models = lambda: ()
preview.RowCounts = Rows  # type: ignore[assignment,misc]

if __name__ == "__main__":
    cli.main()
