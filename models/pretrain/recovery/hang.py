"""Hang detection: after a job's `hang_seconds` without a step, the processes report where they are and exit.

Every process has a thread that waits for the next step. When none comes, the thread writes into the job's folder

    hang-rank0.txt    stack traces of every thread of the process
    hang-rank0.json   steps done, and the last collectives, from torch's flight recorder

waits for the others to do the same, and ends the process with a diagnosis that names the ranks the others waited for:

    1. processes that wrote nothing: suspended, dead, or unreachable
    2. else those with the fewest steps done
    3. else those with the fewest collectives called, where gloo and NCCL record them; messages between stages are not
    4. else none can be singled out
"""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edge_client.files import write_durably
from edge_client.processes.process import Report
from models.pretrain.recovery.statuses import HUNG

RECORDED = "256"
"""Collectives that torch records."""

_LOOKS, _LONGEST_LOOK_SECONDS = 10, 1.0
"""How often the thread looks for a new step."""

_GRACE_SECONDS = 5.0
"""Wait for the other processes' records."""


def prepare() -> None:
    """Makes torch record collectives; call it before processes join."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)


class Watchdog:
    """Ends this process after `seconds`, and up to a tenth more, without a call of `heartbeat`; starts with the first one.

    Args:
        end: called with the diagnosis at the end.
    """

    def __init__(
        self, folder: Path, rank: int, processes: int, seconds: float, end: Callable[[str], None]
    ) -> None:
        self.folder, self.rank, self.processes = folder, rank, processes
        self.seconds, self._end = seconds, end
        self._last: tuple[int, float] | None = None
        self._closed = threading.Event()
        for path in (_dump(folder, rank, "txt"), _dump(folder, rank, "json")):
            path.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run, name="hang", daemon=True)
        self._thread.start()

    def heartbeat(self, step: int) -> None:
        """Notes that `step` steps are done. Wakes no thread: that would take the interpreter from the training."""
        self._last = (step, time.monotonic())

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            if self._closed.wait(min(self.seconds / _LOOKS, _LONGEST_LOOK_SECONDS)):
                return
            if self._last is not None and time.monotonic() - self._last[1] >= self.seconds:
                done = self._last[0]
                break
        record(self.folder, self.rank, done)
        until = time.monotonic() + min(self.seconds, _GRACE_SECONDS)
        while len(records := read(self.folder, self.processes)) < self.processes and time.monotonic() < until:
            time.sleep(0.05)
        self._end(diagnosis(records, self.processes, self.seconds))


def exit_hung(report: Report, message: str) -> None:
    """Reports `message` and ends the process at once: the main thread cannot be interrupted."""
    report(error=message)
    os._exit(HUNG)


def record(folder: Path, rank: int, step: int) -> None:
    """Writes the stack traces and collectives of this process."""
    with _dump(folder, rank, "txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    collectives = _collectives()
    document = {
        "rank": rank,
        "step": step,
        "called": max((each.get("record_id", 0) + 1 for each in collectives), default=0),
        "last": collectives[-1] if collectives else None,
        "collectives": collectives,
    }
    write_durably(_dump(folder, rank, "json"), (json.dumps(document, indent=1) + "\n").encode())


def read(folder: Path, processes: int) -> dict[int, dict[str, Any]]:
    """The records written so far, by rank."""
    paths = {rank: _dump(folder, rank, "json") for rank in range(processes)}
    return {rank: json.loads(path.read_text("utf-8")) for rank, path in paths.items() if path.exists()}


def diagnosis(records: Mapping[int, Mapping[str, Any]], processes: int, seconds: float) -> str:
    """One sentence that names the ranks the others waited for."""
    step = min(record["step"] for record in records.values()) + 1
    silent = sorted(set(range(processes)) - set(records))
    lasts = {record["last"]["profiling_name"] for record in records.values() if record["last"]}
    where = f", the last collective is {', '.join(sorted(lasts))}" if lasts else ""
    if silent:
        cause = f"{_format_ranks(silent)} did not respond, as if suspended; the others waited"
    else:
        late = _fewest(records, "step") or _fewest(records, "called")
        cause = f"the others waited for {_format_ranks(late)}" if late else "all processes hang"
    return f"step {step} did not end within {seconds:g} s: {cause}{where}; see hang-rank*.txt"


def _fewest(records: Mapping[int, Mapping[str, Any]], key: str) -> list[int]:
    """The ranks with the lowest value of `key`, unless all have the same."""
    least = min(record[key] for record in records.values())
    ranks = sorted(rank for rank, record in records.items() if record[key] == least)
    return ranks if len(ranks) < len(records) else []


def _format_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _collectives() -> list[dict[str, Any]]:
    """The recorded collectives, oldest first, on any backend."""
    from torch._C import _distributed_c10d

    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        entries = json.loads(dump(True, False)).get("entries", []) if dump is not None else []
        if entries:
            return list(entries)
    return []


def _dump(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"hang-rank{rank}.{kind}"
