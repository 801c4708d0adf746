"""What a training does that stands still: after a job's `hang_seconds` without a step it says so, and ends.

Every process has a thread that waits for the next step. When it does not come, the thread writes into the job's folder

    hang-rank0.txt    where every thread of the process is
    hang-rank0.json   steps done, and the collectives last called, from torch's flight recorder

waits for the others to do the same, and ends the process with a sentence that names those that were waited for:

    1. a process that wrote nothing is stopped, dead, or out of reach
    2. else those that have done fewest steps
    3. else those that have called fewest collectives, where gloo and NCCL record them, messages between stages not
    4. else nobody can be told apart
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
from edge_client.process import Report

HUNG = 79
"""Exit status of a process that waited too long."""

RECORDED = "256"
"""Collectives that torch remembers."""

_GRACE_SECONDS = 5.0
"""For the others' records."""


def prepare() -> None:
    """To be called before processes join: has torch record collectives."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)


class Watch:
    """Ends this process when `seconds` have passed without a call of `alive`; waits for the first one.

    Args:
        end: what to do in the end, with the sentence.
    """

    def __init__(
        self, folder: Path, rank: int, processes: int, seconds: float, end: Callable[[str], None]
    ) -> None:
        self.folder, self.rank, self.processes = folder, rank, processes
        self.seconds, self._end = seconds, end
        self._step = -1
        self._changed = threading.Condition()
        self._stopped = False
        for path in (_dump(folder, rank, "txt"), _dump(folder, rank, "json")):
            path.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run, name="hang", daemon=True)
        self._thread.start()

    def alive(self, step: int) -> None:
        """`step` steps are done."""
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._step >= 0)
            while not self._stopped:
                before = self._step
                if not self._changed.wait_for(lambda: self._stopped or self._step != before, self.seconds):  # noqa: B023
                    break
            else:
                return
        record(self.folder, self.rank, self._step)
        self._end(self._sentence())

    def _sentence(self) -> str:
        until = time.monotonic() + min(self.seconds, _GRACE_SECONDS)
        while len(found := read(self.folder, self.processes)) < self.processes and time.monotonic() < until:
            time.sleep(0.05)
        return sentence(found, self.processes, self.seconds)


def ending(report: Report) -> Callable[[str], None]:
    """Tells the parent and leaves at once: the main thread cannot be woken."""

    def end(words: str) -> None:
        report(error=words)
        os._exit(HUNG)

    return end


def record(folder: Path, rank: int, step: int) -> None:
    """Writes where this process is."""
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
    """The records there are, by rank."""
    found = {}
    for rank in range(processes):
        path = _dump(folder, rank, "json")
        if path.exists():
            found[rank] = json.loads(path.read_text("utf-8"))
    return found


def sentence(records: Mapping[int, Mapping[str, Any]], processes: int, seconds: float) -> str:
    """What is said of a training that stands still."""
    step = min(record["step"] for record in records.values()) + 1
    said = f"step {step} did not end within {seconds:g} s: "
    silent = sorted(set(range(processes)) - set(records))
    lasts = {record["last"]["profiling_name"] for record in records.values() if record["last"]}
    where = f", the last collective is {', '.join(sorted(lasts))}" if lasts else ""
    if silent:
        told = f"{_named(silent)} said nothing, as if stopped; the others waited"
    else:
        late = _fewest(records, "step") or _fewest(records, "called")
        told = f"the others waited for {_named(late)}" if late else "all processes stood still"
    return f"{said}{told}{where}; see hang-rank*.txt"


def _fewest(records: Mapping[int, Mapping[str, Any]], key: str) -> list[int]:
    """The ranks with the least of something, unless all have the same."""
    least = min(record[key] for record in records.values())
    found = sorted(rank for rank, record in records.items() if record[key] == least)
    return found if len(found) < len(records) else []


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _collectives() -> list[dict[str, Any]]:
    """Those torch remembers, oldest first, on whatever backend."""
    from torch._C import _distributed_c10d

    for name, arguments in (("_dump_fr_trace_json", (True, False)), ("_dump_nccl_trace_json", (True, False))):
        dump = getattr(_distributed_c10d, name, None)
        entries = json.loads(dump(*arguments)).get("entries", []) if dump is not None else []
        if entries:
            return list(entries)
    return []


def _dump(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"hang-rank{rank}.{kind}"
