"""What Fedloop's commands cost before they do much: processor seconds and processes, beside `python -c "import torch"`.

Whatever trains with torch has to import it once; that is the limit. Every command runs once for the caches, of bytecode
and of exports, and once to be measured; the work is the least there is: one round of digits, one epoch. Processes are
looked at as they run and count with what they had used when last seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from coordinator.demos.local_fleet import local_fleet
from models import datasets
from tests.support import noop

_LOOK_SECONDS = 0.02
_FEDLOOP = str(Path(sys.executable).with_name("fedloop"))
_SMALLEST_RUN = ("--set", "federation.rounds=1", "--set", "local.epochs=1")
_FLEET: dict[str, Any] = {
    "name": "start-up",
    "data": {"dataset": "digits"},
    "model": {"name": "cnn"},
    "federation": {"clients": 1, "clients_per_round": 1, "rounds": 1},
    "local": {"epochs": 1, "batch_size": 16, "lr": 0.05},
}


class Watched:
    """Processes below this one: command and processor seconds of each, by process id and start."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, float], tuple[str, float]] = {}

    def look(self) -> None:
        for process in psutil.Process().children(recursive=True):
            try:
                with process.oneshot():
                    times, words = process.cpu_times(), process.cmdline()
                    key = (process.pid, process.create_time())
            except psutil.Error:
                continue  # it ended
            if words:  # one that has ended and was not waited for has none
                self.seen[key] = (_name(words), times.user + times.system)

    def table(self) -> dict[str, Any]:
        """Of each kind of process how many there were and their processor seconds; and the sum of all."""
        kinds: dict[str, list[float]] = defaultdict(list)
        for name, seconds in self.seen.values():
            kinds[name].append(seconds)
        rows = {
            name: {"processes": len(each), "cpu_seconds": round(sum(each), 2)} for name, each in kinds.items()
        }
        return {
            "processes": len(self.seen),
            "cpu_seconds": round(sum(seconds for _, seconds in self.seen.values()), 2),
            "of": rows,
        }


def run() -> dict[str, Any]:
    """Per command: `cpu_seconds`, `processes`, how many times the limit that is, and the same `of` each kind of process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.setdefault("FEDLOOP_CACHE_DIR", str(folder / "cache"))
        found["import torch"] = _twice([sys.executable, "-c", "import torch"])
        found["--help"] = _twice([_FEDLOOP, "--help"])
        for runtime in ("torch", "litert"):
            for workers in (1, 2):
                shape = (
                    "--set",
                    f"federation.runtimes={{{runtime}=1}}",
                    "--set",
                    f"simulation.workers={workers}",
                )
                out = folder / f"{runtime}-{workers}"
                command = [_FEDLOOP, "simulate", *_SMALLEST_RUN, *shape, "--out", str(out)]
                found[f"simulate, {runtime}, {workers} worker{'s' * (workers > 1)}"] = _twice(command)
        source = folder / "pretrained-2"
        command = [_FEDLOOP, "pretrain", "--set", "train.epochs=1", "--out", str(folder / "pretrained")]
        found["pretrain"] = _twice(command)
        found["compress"] = _twice([_FEDLOOP, "compress", str(source), "--out", str(folder / "compressed")])
        command = [_FEDLOOP, "export", str(folder / "compressed-2"), "--name", "digits"]
        found["export"] = _twice([*command, "--out", str(folder / "released")])
        for runtime in ("torch", "litert"):
            found[f"serve and a daemon, {runtime}"] = _served(folder / f"fleet-{runtime}", runtime)
    limit = found["import torch"]["cpu_seconds"]
    print("start-up: processor seconds, processes, times `import torch`")
    for command_, row in found.items():
        row["of_import_torch"] = round(row["cpu_seconds"] / limit, 2)
        print(
            f"  {command_:<28} {row['cpu_seconds']:6.2f} {row['processes']:4d} {row['of_import_torch']:6.1f}"
        )
    return found


@contextmanager
def watching() -> Iterator[Watched]:
    """Looks at all processes below this one for the length of a `with`."""
    watched, done = Watched(), threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_SECONDS):
            watched.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watched
    finally:
        done.set()
        thread.join()


def _twice(command: Sequence[str]) -> dict[str, Any]:
    """The second of two runs; what follows `--out` is a folder of each one's own."""
    for turn in (1, 2):
        words = [
            f"{word}-{turn}" if before == "--out" else word
            for before, word in zip(["", *command], command, strict=False)
        ]
        with watching() as watched:
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return watched.table()


def _served(folder: Path, runtime: str) -> dict[str, Any]:
    """A coordinator and one device from their start to the end of a run of one round."""
    digits = datasets.load("digits", seed=0)
    data = {"digits": {"kind": "numpy", "path": "data.npz"}}
    federation = {**_FLEET["federation"], "runtimes": {runtime: 1.0}}
    with watching() as watched, local_fleet(folder) as fleet:
        device = fleet.add("one", {"runtimes": [runtime], "data": data}, {"x": digits.x, "y": digits.y})
        device.start()
        started = fleet.client.post("/runs", {"experiment": {**_FLEET, "federation": federation}})
        noop.finish(fleet.client, started["id"])
        watched.look()
        fleet.stop()
    return watched.table()


def _name(words: Sequence[str]) -> str:
    """The module or command of a process, without its arguments."""
    if "-m" in words:
        return words[words.index("-m") + 1]
    if "-c" in words:
        return "python"
    names = [
        Path(word).name for word in words if "python" not in Path(word).name and not word.startswith("-")
    ]
    return " ".join(names[:2])


if __name__ == "__main__":
    run()
