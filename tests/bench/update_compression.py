"""What codes save and cost: bytes of the encoded messages against accuracy at the same number of rounds.

    FEDLOOP_DATA_DIR=… FEDLOOP_BENCH_PROCESSES=16 python -m tests.bench --only update_compression

MNIST-10k (`cnn`, IID and `dirichlet(0.1)`) and Shakespeare (`charlm`), 20 clients, 10 a round, five seeds. A code is compared with no code seed by
seed, so the interval of the difference (95 %, Student) is that of the code and not of the seeds. Prints a line for each code and writes
`runs/bench/update_compression.png`. `FEDLOOP_BENCH_SHORT=1` runs three seeds of 30 rounds on digits (`mlp` of 51 thousand params): quick to
look at, and no proof.

Runs are independent: `FEDLOOP_BENCH_PROCESSES` of them go on at a time, 1 by default, each on a core of its own. `FEDLOOP_BENCH_FINISHED` names a
file that gets a line of JSON for each finished run; those that it has already are not run again.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import fedloop

SHORT = os.environ.get("FEDLOOP_BENCH_SHORT") == "1"
SEEDS, ROUNDS = ((1, 2, 3), 30) if SHORT else ((1, 2, 3, 4, 5), 60)
Job = tuple[str, str, int]
"""Setting, code and seed of a run."""
BYTES = ("bytes_up", "bytes_down")
STUDENT_95 = {2: 4.303, 4: 2.776}
"""Quantile .975 by degrees of freedom."""

_MNIST = {"model": {"name": "cnn"}, "local": {"epochs": 1, "batch_size": 32, "lr": 0.05}}
SETTINGS: dict[str, dict[str, Any]] = {
    "Shakespeare": {
        "data": {"dataset": "shakespeare", "partition": "iid"},
        "model": {"name": "charlm"},
        "local": {"steps": 20, "batch_size": 16, "lr": 0.3},
    },
    "MNIST-10k, IID": {**_MNIST, "data": {"dataset": "mnist", "partition": "iid"}},
    "MNIST-10k, dirichlet(0.1)": {**_MNIST, "data": {"dataset": "mnist", "partition": "dirichlet(0.1)"}},
}
NO_CODE = "no code"
CODES: dict[str, dict[str, Any]] = {
    NO_CODE: {},
    "qsgd, 8 bits": {"code": "qsgd", "bits": 8},
    "qsgd, 2 bits": {"code": "qsgd", "bits": 2},
    "eden, 4 bits": {"code": "eden", "bits": 4},
    "eden, 2 bits": {"code": "eden", "bits": 2},
    "drive": {"code": "drive"},
    "drive 2.8 %": {"code": "drive", "share": 0.028},
    "sign": {"code": "sign"},
    "powersgd, rank 2": {"code": "powersgd", "rank": 2},
    "topk 5 %": {"code": "topk", "share": 0.05},
    "topk 2 %, 8 bits": {"code": "topk", "share": 0.02, "bits": 8},
    "topk 2 %, 4 bits": {"code": "topk", "share": 0.02, "bits": 4},
    "topk 2.8 %, 1 bit": {"code": "topk", "share": 0.028, "bits": 1},
    "topk 2 %, 1 bit": {"code": "topk", "share": 0.02, "bits": 1},
}
DOWNLINK: dict[str, dict[str, Any]] = {
    "drive both ways": {"code": "drive"},
    "topk 2.8 %, 1 bit, both ways": {"code": "topk", "share": 0.028, "bits": 1},
}
"""Codes that are on the downlink too."""
CODES |= DOWNLINK
if SHORT:
    _DIGITS = {
        "model": {"name": "mlp", "hidden": [256, 128]},
        "local": {"steps": 10, "batch_size": 32, "lr": 0.1},
    }
    SETTINGS = {
        f"digits, {name}": {**_DIGITS, "data": {"dataset": "digits", "partition": name}}
        for name in ("iid", "dirichlet(0.1)")
    }


def run() -> dict[str, Any]:
    """By setting and code: bytes, how many times fewer than without a code, accuracy, and what it loses, in points."""
    # One seed after the other, so that what a stopped bench has finished compares all codes.
    figures = simulate_all(
        [(setting, code, seed) for seed in SEEDS for setting in SETTINGS for code in CODES]
    )
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        plain = [figures[setting, NO_CODE, seed] for seed in SEEDS]
        found[setting] = {}
        for code in CODES:
            coded = [figures[setting, code, seed] for seed in SEEDS]
            each = found[setting][code] = _compare(coded, plain)
            print(
                f"{setting}, {code}: {each['bytes_up']:,.0f} B up, {each['times_fewer']:.1f} times fewer, {each['times_fewer_down']:.1f} down, accuracy "
                f"{each['accuracy']:.2f} ± {each['accuracy_95']:.2f}, difference {each['difference']:+.2f} ± "
                f"{each['difference_95']:.2f}",
                flush=True,
            )
    _draw(found)
    found["failures"] = [] if SHORT else [*_failures(found)]
    return found


def simulate_all(jobs: Sequence[Job]) -> dict[Job, dict[str, float]]:
    """The figures of all runs, some of them from the file of those finished earlier."""
    path = os.environ.get("FEDLOOP_BENCH_FINISHED")
    figures = {} if path is None else _read_finished(Path(path), jobs)
    left = [job for job in jobs if job not in figures]
    processes = int(os.environ.get("FEDLOOP_BENCH_PROCESSES", "1"))
    print(f"{len(left)} of {len(jobs)} runs, {processes} at a time", flush=True)
    began = time.monotonic()
    # Not forked, because each process starts the workers of its simulations.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        running = {pool.submit(simulate, job): job for job in left}
        for number, done in enumerate(as_completed(running), 1):
            job = running[done]
            figures[job] = done.result()
            if path is not None:
                with Path(path).open("a") as file:
                    file.write(json.dumps({"run": _document(job), **figures[job]}) + "\n")
            if number % 10 == 0 or number == len(left):
                spent = time.monotonic() - began
                print(
                    f"{number} of {len(left)} runs after {spent:.0f} s, about {spent / number * (len(left) - number):.0f} s left",
                    flush=True,
                )
    return figures


def _read_finished(path: Path, jobs: Sequence[Job]) -> dict[Job, dict[str, float]]:
    """The figures of those runs that the file has."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {json.dumps(each["run"], sort_keys=True): each for each in lines}
    found = {job: known.get(json.dumps(_document(job), sort_keys=True)) for job in jobs}
    return {
        job: {key: each[key] for key in ("accuracy", *BYTES)}
        for job, each in found.items()
        if each is not None
    }


def simulate(job: Job) -> dict[str, float]:
    """Accuracy in per cent, and the bytes of both ways. Takes one core."""
    with tempfile.TemporaryDirectory() as folder:
        report = fedloop.simulate(
            _document(job), out=Path(folder) / "run", data_dir=os.environ.get("FEDLOOP_DATA_DIR")
        ).report
    sent = {key: float(report[key]) for key in BYTES}
    return {"accuracy": 100 * report["final"]["test_accuracy"], **sent}


def _document(job: Job) -> dict[str, Any]:
    """The experiment of a run."""
    setting, code, seed = job
    return {
        **SETTINGS[setting],
        "seed": seed,
        "federation": {"clients": 20, "clients_per_round": 10, "rounds": ROUNDS, "runtimes": {"torch": 1}},
        "evaluation": {"every": ROUNDS},
        "simulation": {"local_baseline": "off", "workers": 1},
        "uplink": CODES[code],
        **({"downlink": DOWNLINK[code]} if code in DOWNLINK else {}),
    }


def _compare(coded: Sequence[dict[str, float]], plain: Sequence[dict[str, float]]) -> dict[str, float]:
    differences = [each["accuracy"] - other["accuracy"] for each, other in zip(coded, plain, strict=True)]
    accuracies = [each["accuracy"] for each in coded]
    (up, down), (plain_up, plain_down) = (
        [fmean(each[key] for each in runs) for key in BYTES] for runs in (coded, plain)
    )
    return {
        "bytes_up": up,
        "times_fewer": plain_up / up,
        "bytes_down": down,
        "times_fewer_down": plain_down / down,
        "accuracy": fmean(accuracies),
        "accuracy_95": _half_interval(accuracies),
        "difference": fmean(differences),
        "difference_95": _half_interval(differences),
    }


def _half_interval(values: Sequence[float]) -> float:
    count = len(values)
    return STUDENT_95[count - 1] * stdev(values) / float(count**0.5)


def _failures(found: dict[str, Any]) -> list[str]:
    """Aims that no code reaches."""
    wrong = []
    for setting, codes in found.items():
        if not any(
            each["times_fewer"] >= 28 and each["difference"] + each["difference_95"] >= 0
            for each in codes.values()
        ):
            wrong.append(f"{setting}: no code sends 28 times fewer bytes at no significant loss")
        if not any(each["times_fewer"] >= 100 and each["difference"] >= -1 for each in codes.values()):
            wrong.append(f"{setting}: no code sends 100 times fewer bytes within a point")
    return wrong


def _draw(found: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        1, len(found), figsize=(5 * len(found), 4), layout="constrained", squeeze=False
    )
    for axes, (setting, codes) in zip(rows[0], found.items(), strict=True):
        for code, each in codes.items():
            axes.errorbar(
                each["bytes_up"], each["accuracy"], each["accuracy_95"], marker="o", capsize=3, label=code
            )
        axes.set_xscale("log")
        axes.set_xlabel("uplink bytes")
        axes.set_ylabel("test accuracy, %")
        axes.set_title(f"{setting}, {ROUNDS} rounds")
    rows[0][-1].legend(fontsize=7)
    path = Path("runs/bench/update_compression.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
