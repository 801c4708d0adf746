"""What differential privacy costs: accuracy against epsilon, with fixed and with adaptive clipping.

    FEDLOOP_DATA_DIR=… python -m tests.bench --only privacy

MNIST-10k over 2,000 clients of 4 rows each (`logreg`), a cohort of 200 drawn by Poisson sampling, delta 1e-5, central noise, epsilon by the privacy
loss distribution. Adaptive clipping begins at half of the fixed norm and follows the median.. Prints a line for each epsilon and writes
`runs/bench/privacy.png`. Fails if epsilon 8 costs more than 10 points.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import fedloop
from coordinator.privacy.accountant import NoisyRound, find_noise

SEEDS = (1,)
DELTA = 1e-5
EPSILONS = (1.0, 2.0, 4.0, 8.0)
CLIP_NORM = 0.5
CLIPPINGS: dict[str, dict[str, Any]] = {
    "fixed": {"clip_norm": CLIP_NORM},
    "adaptive": {"clip_norm": CLIP_NORM / 2, "clipping": "adaptive"},
}
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


def run() -> dict[str, Any]:
    """Accuracy in per cent without privacy, and by clipping and epsilon; the noise multipliers."""
    plain = fmean(_simulate(seed, {})[0] for seed in SEEDS)
    print(f"without privacy: accuracy {plain:.2f}", flush=True)
    noise = {each: _find_noise(each) for each in EPSILONS}
    found: dict[str, Any] = {"plain": plain, "noise": noise}
    for clipping, keys in CLIPPINGS.items():
        found[clipping] = {}
        for epsilon in EPSILONS:
            privacy = {"mechanism": "central", "delta": DELTA, "noise_multiplier": noise[epsilon], **keys}
            runs = [_simulate(seed, privacy) for seed in SEEDS]
            assert all(spent <= epsilon for _, spent in runs), runs
            accuracy = found[clipping][epsilon] = fmean(each for each, _ in runs)
            print(
                f"epsilon {epsilon:g}, {clipping} clipping: accuracy {accuracy:.2f}, noise multiplier {noise[epsilon]:.3f}",
                flush=True,
            )
    _draw(found)
    found["failures"] = [
        f"epsilon 8 with {clipping} clipping costs {plain - found[clipping][8.0]:.1f} points, expected {MOST_POINTS:g} at most"
        for clipping in CLIPPINGS
        if plain - found[clipping][8.0] > MOST_POINTS
    ]
    return found


def _find_noise(epsilon: float) -> float:
    federation = SETTING["federation"]
    kind = NoisyRound(1.0, "poisson", federation["clients_per_round"], federation["clients"])
    return find_noise(kind, federation["rounds"], DELTA, epsilon)


def _simulate(seed: int, privacy: Mapping[str, Any]) -> tuple[float, float]:
    """Accuracy in per cent, and the epsilon that was spent, 0 without privacy."""
    document = {"seed": seed, **SETTING, **({"privacy": dict(privacy)} if privacy else {})}
    with tempfile.TemporaryDirectory() as folder:
        report = fedloop.simulate(
            document, out=Path(folder) / "run", data_dir=os.environ.get("FEDLOOP_DATA_DIR")
        ).report
    return 100 * report["final"]["test_accuracy"], report.get("privacy", {}).get("epsilon", 0.0)


def _draw(found: Mapping[str, Any], epsilons: Sequence[float] = EPSILONS) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.axhline(found["plain"], color="grey", linestyle="--", label="no privacy")
    for clipping in CLIPPINGS:
        axes.plot(
            epsilons, [found[clipping][each] for each in epsilons], marker="o", label=f"{clipping} clipping"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{each:g}" for each in epsilons])
    axes.set_xlabel("epsilon (delta 1e-5)")
    axes.set_ylabel("test accuracy, %")
    axes.legend()
    path = Path("runs/bench/privacy.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"written to {path}")
