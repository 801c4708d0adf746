"""What malicious clients do to each aggregator: accuracy, and success of a backdoor, on digits.

Twenty clients with rows of all classes, four of them malicious, an MLP of 32 hidden units, 30 rounds of 10 full-batch steps; means of three
seeds. The plain mean loses everything under attacks that robust rules bear. A backdoor sends its update times five. The server of FLTrust has
100 rows of its own. Prints the table and
writes `runs/bench/robustness.png`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import fedloop
from strategies import presets

CLIENTS, MALICIOUS, ROUNDS, SEEDS = 20, 4, 30, (1, 2, 3)
SERVER_ROWS = 100
STRATEGIES: dict[str, dict[str, Any]] = {
    "mean": {"name": "fedavg"},
    "median": {"name": "median"},
    "trimmed mean": {"name": "trimmed_mean"},
    "Multi-Krum": {"name": "multi_krum"},
    "neighbours, then trimmed mean": {"name": "trimmed_mean", "mix_neighbours": True},
    "geometric median": {"name": "rfa"},
    "centered clipping": {"name": "centered_clipping"},
    "FLTrust": {"name": "fltrust"},
}
ATTACKS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "sign flip x5": {"name": "sign_flip", "scale": 5.0},
    "IPM 10": {"name": "ipm", "scale": 10.0},
    "ALIE": {"name": "alie", "scale": 1.5},
    "backdoor x5": {"name": "backdoor", "scale": 5.0},
}
BORNE = ("median", "trimmed mean", "Multi-Krum", "neighbours, then trimmed mean", "FLTrust")
WITHOUT_BACKDOOR = ("median", "Multi-Krum", "neighbours, then trimmed mean")


def run() -> dict[str, Any]:
    """Accuracy in per cent by strategy and attack, success of the backdoor, and what does not hold."""
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        by_attack = found[strategy] = {attack: _measure(strategy, attack) for attack in ATTACKS}
        cells = ", ".join(f"{attack} {values['accuracy']:.1f}" for attack, values in by_attack.items())
        print(
            f"robustness, {strategy}: {cells}; backdoor success {by_attack['backdoor x5']['success']:.1f}",
            flush=True,
        )
    _draw(found)
    found["failures"] = [*_failures(found)]
    return found


def _measure(strategy: str, attack: str) -> dict[str, float | None]:
    reports = [_simulate(STRATEGIES[strategy], ATTACKS[attack], seed) for seed in SEEDS]
    successes = [report["attack"]["success"] for report in reports if "attack" in report]
    return {
        "accuracy": 100 * fmean(report["final"]["test_accuracy"] for report in reports),
        "success": 100 * fmean(successes) if successes and None not in successes else None,
    }


def _simulate(strategy: dict[str, Any], attack: dict[str, Any] | None, seed: int) -> dict[str, Any]:
    options = {"malicious": MALICIOUS} if presets.is_robust(strategy["name"]) else {}
    server = {"public_samples": SERVER_ROWS} if presets.uses_server_data(strategy["name"]) else {}
    simulation: dict[str, Any] = {"local_baseline": "off"}
    if attack is not None:
        simulation["attack"] = {**attack, "clients": MALICIOUS}
    document = {
        "seed": seed,
        "data": {"dataset": "digits", "partition": "iid", **server},
        "model": {"name": "mlp", "hidden": [32]},
        "federation": {
            "clients": CLIENTS,
            "clients_per_round": CLIENTS,
            "rounds": ROUNDS,
            "runtimes": {"torch": 1},
            "outlier_factor": 0,
        },
        "local": {"steps": 10, "batch_size": 512, "lr": 0.5},
        "evaluation": {"every": ROUNDS},
        "strategy": {**strategy, **options},
        "simulation": simulation,
    }
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = fedloop.simulate(document, out=Path(folder) / "run").report
    return report


def _failures(found: dict[str, Any]) -> list[str]:
    clean = found["mean"]["none"]["accuracy"]
    wrong = [
        f"the mean keeps {found['mean'][attack]['accuracy']:.1f} % under {attack}, expected less than 15"
        for attack in ("sign flip x5", "IPM 10")
        if found["mean"][attack]["accuracy"] >= 15
    ]
    wrong += [
        f"{strategy} has {found[strategy][attack]['accuracy']:.1f} % under {attack}, more than 3 points below {clean:.1f}"
        for strategy in BORNE
        for attack in ("sign flip x5", "IPM 10")
        if found[strategy][attack]["accuracy"] < clean - 3
    ]
    return wrong + [
        f"a backdoor succeeds with {found[strategy]['backdoor x5']['success']:.1f} % against {strategy}, expected 5 at most"
        for strategy in WITHOUT_BACKDOOR
        if found[strategy]["backdoor x5"]["success"] > 5
    ]


def _draw(found: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    width = 0.8 / len(ATTACKS)
    for index, attack in enumerate(ATTACKS):
        places = [at + index * width for at in range(len(STRATEGIES))]
        axes.bar(
            places, [found[strategy][attack]["accuracy"] for strategy in STRATEGIES], width, label=attack
        )
    axes.set_xticks(
        [at + 0.4 - width / 2 for at in range(len(STRATEGIES))],
        [name.replace(", ", ",\n") for name in STRATEGIES],
        fontsize=8,
    )
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"{MALICIOUS} of {CLIENTS} clients are malicious; digits, mean of {len(SEEDS)} seeds")
    axes.legend(ncols=len(ATTACKS), loc="lower center", bbox_to_anchor=(0.5, -0.28), frameon=False)
    path = Path("runs/bench/robustness.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
