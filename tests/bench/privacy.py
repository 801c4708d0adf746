"""What differential privacy costs: accuracy against epsilon, by mechanism.

    FEDLOOP_DATA_DIR=… python -m tests.bench --only privacy

MNIST-10k over 2,000 clients of 4 rows each (`logreg`), 200 a round, 30 rounds, delta 1e-5. Central noise with fixed and adaptive clipping draws
its rounds by Poisson sampling. The other mechanisms let a client take part every tenth round: DP-FTRL with banded noise, distributed noise in
one group of secure aggregation, and local noise. Adaptive clipping begins at half of the fixed norm and follows the median. Prints a
line for each epsilon and writes `runs/bench/privacy.png`. Fails if epsilon 8 costs more than 10 points; local noise may.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import fedloop

SEEDS = (1,)
DELTA = 1e-5
EPSILONS = (1.0, 2.0, 4.0, 8.0)
CLIP_NORM = 0.5
MOST_POINTS = 10.0
"""Of accuracy that epsilon 8 may cost."""

SETTING: dict[str, dict[str, Any]] = {
    "data": {"dataset": "mnist", "partition": "iid"},
    "model": {"name": "logreg"},
    "federation": {
        "clients": 2000,
        "clients_per_round": 200,
        "rounds": 30,
        "runtimes": {"torch": 1.0},
    },
    "local": {"epochs": 1, "batch_size": 4, "lr": 0.5},
    "evaluation": {"every": 30},
}

TURNS = {"clip_norm": CLIP_NORM, "minimum_separation": 10}
CURVES: dict[str, dict[str, Any]] = {
    "central, fixed clipping": {"mechanism": "central", "clip_norm": CLIP_NORM},
    "central, adaptive clipping": {
        "mechanism": "central",
        "clip_norm": CLIP_NORM / 2,
        "clipping": "adaptive",
    },
    "ftrl": {"mechanism": "ftrl", **TURNS},
    "distributed": {
        "mechanism": "distributed",
        "secure_aggregation": True,
        "group_size": SETTING["federation"]["clients_per_round"],
        **TURNS,
    },
    "local": {"mechanism": "local", **TURNS},
}


def run() -> dict[str, Any]:
    """Accuracy in per cent without privacy, and by curve and epsilon with the noise multiplier."""
    plain = fmean(_simulate(seed, {})[0] for seed in SEEDS)
    print(f"without privacy: accuracy {plain:.2f}", flush=True)
    found: dict[str, Any] = {"plain": plain}
    for curve, keys in CURVES.items():
        found[curve] = {}
        for epsilon in EPSILONS:
            runs = [_simulate(seed, {"delta": DELTA, "epsilon": epsilon, **keys}) for seed in SEEDS]
            assert all(0 < spent["epsilon"] <= epsilon for _, spent in runs), runs
            accuracy, noise = fmean(each for each, _ in runs), runs[0][1]["noise_multiplier"]
            found[curve][epsilon] = {"accuracy": accuracy, "noise": noise}
            print(
                f"epsilon {epsilon:g}, {curve}: accuracy {accuracy:.2f}, noise multiplier {noise:.3f}",
                flush=True,
            )
    _draw(found)
    costs = {curve: plain - found[curve][8.0]["accuracy"] for curve in CURVES if curve != "local"}
    found["failures"] = [
        f"epsilon 8 with {curve} costs {cost:.1f} points, expected {MOST_POINTS:g} at most"
        for curve, cost in costs.items()
        if cost > MOST_POINTS
    ]
    return found


def _simulate(seed: int, privacy: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Accuracy in per cent, and what the report says of privacy."""
    document = {"seed": seed, **SETTING, **({"privacy": dict(privacy)} if privacy else {})}
    with tempfile.TemporaryDirectory() as folder:
        report = fedloop.simulate(
            document, out=Path(folder) / "run", data_dir=os.environ.get("FEDLOOP_DATA_DIR")
        ).report
    return 100 * report["final"]["test_accuracy"], report.get("privacy", {})


def _draw(found: Mapping[str, Any]) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4.5), width_ratios=(2, 1), layout="constrained")
    for curve, marker in zip(CURVES, "osd^v", strict=True):
        accuracies = [found[curve][each]["accuracy"] for each in EPSILONS]
        axes = panels[int(curve == "local")]  # far below the others
        axes.plot(EPSILONS, accuracies, marker=marker, label=curve)
    for axes in panels:
        axes.axhline(found["plain"], color="grey", linestyle="--", label="no privacy")
        axes.set_xscale("log", base=2)
        axes.set_xticks(EPSILONS, [f"{each:g}" for each in EPSILONS])
        axes.set_xlabel("epsilon (delta 1e-5)")
        axes.legend()
    panels[0].set_ylabel("test accuracy, %")
    path = Path("runs/bench/privacy.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"written to {path}")
