"""`fedloop` commands as a user would run them, against the coordinator of a demonstration."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.demos.local_fleet import LocalFleet
from coordinator.errors import RunInterrupted

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class FedloopCommands:
    """Runs commands in `folder` against the coordinator of `fleet`, and shows each."""

    fleet: LocalFleet
    folder: Path
    show: Callable[[str], None]

    def __call__(self, *arguments: str | Path) -> str:
        """Runs a command; returns its output.

        Raises:
            RunInterrupted: it failed; the message holds the end of what it said.
        """
        self.show(shlex.join(["fedloop", *map(str, arguments)]))
        environment = {
            **os.environ,
            "FEDLOOP_HOME": str(self.fleet.home),
            "FEDLOOP_COORDINATOR": self.fleet.operator_url,
        }
        completed = subprocess.run(
            [BIN / "fedloop", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if completed.returncode:
            raise RunInterrupted(f"fedloop {arguments[0]} failed: {completed.stderr.strip()[-2000:]}")
        return completed.stdout

    def json(self, *arguments: str | Path) -> Any:
        """Runs a command with `--json`; returns what it printed."""
        return json.loads(self(*arguments, "--json"))
