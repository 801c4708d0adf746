"""Memory of a simulation with many registered clients: PSS of all its processes after every round, and the peak.

Logistic regression on made-up rows, 60 a client, 100 clients a round. A process of its own runs the simulation; this one watches it.

    python -m tests.bench.population [CLIENTS] [ROUNDS]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLIENTS, ROUNDS, LIMIT_MB = 100_000, 20, 700
_COMMAND = "import json, sys, fedloop; fedloop.simulate(json.loads(sys.argv[1]), out=sys.argv[2])"


def run() -> dict[str, Any]:
    """As `measure`, of the population that is to fit into `LIMIT_MB`."""
    return measure(CLIENTS, ROUNDS)


def measure(clients: int, rounds: int, **changed: Any) -> dict[str, Any]:
    """PSS in MB after each round and at its peak, and seconds until the first round ended and all together."""
    document: dict[str, Any] = {
        "data": {"dataset": "synthetic(shape=[60], classes=10, samples=60)", "partition": "iid"},
        "model": {"name": "logreg"},
        "federation": {
            "clients": clients,
            "clients_per_round": 100,
            "rounds": rounds,
            "runtimes": {"torch": 1.0},
        },
        "local": {"epochs": 1, "batch_size": 20, "lr": 0.1},
        "simulation": {"workers": 2, "local_baseline": "off"},
        **changed,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        began = time.monotonic()
        with subprocess.Popen([sys.executable, "-c", _COMMAND, json.dumps(document), str(out)]) as process:
            figures = _watch(process, out, began)
        assert process.returncode == 0, "the simulation failed"
        report = json.loads((out / "report.json").read_text())
    found = {
        "clients": clients,
        "peak_mb": max(figures["peaks"].values()),
        "rounds_mb": list(figures["rounds"].values()),
        "seconds": time.monotonic() - began,
        "seconds_until_round": figures["times"],
        "peaks_mb": figures["peaks"],
        "round_seconds": [row["seconds"] for row in report["rounds"]],
    }
    for number, value in figures["rounds"].items():
        print(f"population, {clients:,} clients, round {number}: {value:.0f} MB")
    print(
        f"population, {clients:,} clients: peak {found['peak_mb']:.0f} MB of {LIMIT_MB} (before round 1 {figures['peaks'].get(0, 0):.0f} MB), "
        f"{found['seconds']:.0f} s in all"
    )
    return found


def _watch(process: subprocess.Popen[bytes], out: Path, began: float) -> dict[str, Any]:
    """Peaks of PSS by the number of finished rounds, and PSS when each was first seen."""
    peaks: dict[int, float] = {}
    rounds: dict[int, float] = {}
    times: dict[int, float] = {}
    lines = out / "rounds.csv"
    while process.poll() is None:
        done = max(0, lines.read_bytes().count(b"\n") - 1) if lines.exists() else 0
        pss = sum(map(pss_mb, _family(process.pid)))
        peaks[done] = max(peaks.get(done, 0.0), pss)
        if done not in times:
            times[done] = time.monotonic() - began
            if done:
                rounds[done] = pss
        time.sleep(0.05)
    return {"peaks": peaks, "rounds": rounds, "times": times}


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for parent in found:
        try:
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        except OSError:
            continue
    return found


def pss_mb(pid: int) -> float:
    """The proportional set size of a process; 0 once it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:  # it has ended
        pass
    return 0.0


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:3] or (CLIENTS, ROUNDS))), indent=1))
