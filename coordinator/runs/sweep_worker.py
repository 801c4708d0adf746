"""One run of a sweep as a process: `python -m coordinator.runs.sweep_worker FOLDER [DATA_DIR]`.

Exit codes: 0; 2 for wrong input; 1 if the run was interrupted. Its message is on standard error.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from coordinator.errors import RunInterrupted, UserError
from coordinator.runs import simulation
from edge_client.processes.process import die_with_parent


def main(folder: Path, data_dir: Path | None) -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the sweep too, which kills this process
    try:
        simulation.resume(folder, simulation.Environment(data_dir))
    except (UserError, RunInterrupted) as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    _, run, *rest = sys.argv
    raise SystemExit(main(Path(run), Path(rest[0]) if rest else None))
