"""`fedloop demo-loop`: the whole cycle on digits, with the commands that a user would run.

    1. pretrain   a teacher on a small public part of the data, compress it to an int8 student
    2. release    sign it offline, publish it, roll it out to device daemons that hold the rest of the data
    3. federate   the devices train the student together, on rows that never leave them
    4. release    the federated model, quantized; in the rollout, devices compare it with the one they run
    5. lineage    print it, back to the data

Prints every command. Each writes into a separate folder; `demo-loop.json` holds the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomlkit

from coordinator.datacenter.documents import write_document
from coordinator.demos.demo_fleet import NAME, PUBLIC_SAMPLES, SEED, SITES, device_config, site_data
from coordinator.demos.fedloop_commands import FedloopCommands
from coordinator.demos.local_fleet import STALL_SECONDS, StallDetector, local_fleet
from coordinator.errors import RunInterrupted
from coordinator.output_folders import require_new
from coordinator.reports.progress import Progress
from edge_client.files import write_durably

IDLE_CPU_SECONDS = 6.0
"""Upper bound of the processor time of an idle coordinator and four idle daemons in `STALL_SECONDS`."""
STUDENT = f"{NAME}:2"
"""Version in the registry; the teacher is the first."""
_EXPERIMENT: dict[str, Any] = {
    "name": "demo-loop",
    "seed": SEED,
    "data": {"dataset": NAME},
    "federation": {"clients": len(SITES), "rounds": 12, "runtimes": {"litert": 1.0}},
    "local": {"epochs": 3, "batch_size": 16, "lr": 0.05},
}


def demo_loop(
    out: Path, progress: Progress, show: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Runs the demo into the new or empty folder `out`; returns the contents of `demo-loop.json`. Calls `show` with every command.

    `shipped` and `learnt` are the two turns of the cycle; `lineage` is the printed graph; `stopped` the exit status of every
    process.

    Raises:
        UserError: `out` is not empty.
        RunInterrupted: a command or a process failed; the message says which, and why.
    """
    require_new(out)
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with local_fleet(out / "fleet") as fleet:
        for name, share in zip(SITES, site_data(), strict=True):
            fleet.add(name, {**device_config("litert"), "releases": {"trial_seconds": 5}}, share).start()
        commands = FedloopCommands(fleet, out, show)
        shipped = _ship(commands, progress)
        learnt = _learn(commands, progress)
        progress.stage("5/5 printing the lineage")
        lineage = commands("model", "lineage", f"{NAME}:{learnt['version']}")
        stopped = fleet.stop()
    path = out / "demo-loop.json"
    document = {
        "shipped": shipped,
        "learnt": learnt,
        "lineage": lineage,
        "stopped": stopped,
        "report": str(path),
    }
    write_document(path, document)
    return document


def _ship(fedloop: FedloopCommands, progress: Progress) -> dict[str, Any]:
    progress.stage(f"1/5 pretraining on {PUBLIC_SAMPLES} public rows, compressing")
    rows = f"data.public_samples={PUBLIC_SAMPLES}"
    fedloop(
        "pretrain", "--set", rows, "--set", "train.epochs=60", "--set", "train.shift=1", "--out", "teacher"
    )
    fedloop("model", "add", "teacher", "--name", NAME)
    fedloop("compress", "teacher", "--student", "cnn", "--out", "student")
    fedloop("model", "add", "student", "--name", NAME)

    progress.stage("2/5 signing a release offline, rolling it out to four devices")
    fedloop("release", "keygen", "keys", "--no-passphrase")
    write_durably(fedloop.folder / "online.json", fedloop("release", "online-keys").encode())
    fedloop("release", "init", "--keys", "keys", "--online", "online.json", "--staging", "stick")
    _sign(fedloop)
    return _release(fedloop, "student", "release-1")


def _learn(fedloop: FedloopCommands, progress: Progress) -> dict[str, Any]:
    progress.stage("3/5 training on the devices")
    experiment = {**_EXPERIMENT, "model": {"name": "cnn", "init": STUDENT}}
    write_durably(fedloop.folder / "experiment.toml", tomlkit.dumps(experiment).encode())
    fedloop("run", "experiment.toml", "--out", "federated")
    fedloop("model", "add", "federated", "--name", NAME)

    progress.stage("4/5 releasing the federated model, comparing it on the devices with the previous one")
    return _release(fedloop, "federated", "release-2")


def _sign(fedloop: FedloopCommands) -> None:
    fedloop("release", "sign", "--keys", "keys", "--staging", "stick")
    fedloop("release", "publish", "--staging", "stick")


def _release(fedloop: FedloopCommands, folder: str, release: str) -> dict[str, Any]:
    """Exports, registers, signs, publishes and rolls out the model in `folder`; returns one turn of the cycle.

    `accuracy` is that of the released file on `test_rows` of the coordinator's rows. `device_accuracy` and `before` are of
    this release and of its predecessor over the `device_rows`, pooled as in a gate: the coordinator's held-out rows,
    distributed over the devices. No device counts for more than the median one.
    """
    version = 1 + max(each["number"] for each in fedloop.json("model", "list", NAME))
    exported = fedloop.json(
        "export", folder, "--name", NAME, "--version", str(version), "--dataset", NAME, "--out", release
    )
    fedloop("model", "add", release, "--name", NAME)
    fedloop("release", "add", release, "--staging", "stick")
    _sign(fedloop)
    rollout = _roll_out(fedloop, version)
    fedloop("model", "alias", f"{NAME}:{version}", "champion")
    comparisons = [phase["comparison"] for phase in rollout["phases"] if phase["comparison"]]
    return {
        "version": version,
        "bytes": exported["bytes"],
        "accuracy": exported["accuracy"],
        "rollout": rollout["state"],
        "device_accuracy": _pooled(comparisons, "accuracy"),
        "before": _pooled(comparisons, "champion_accuracy"),
        "test_rows": exported["test_rows"],
        "scored": exported["scored"],
        "device_rows": round(sum(each["labels"] for each in comparisons)),
    }


def _pooled(comparisons: list[dict[str, Any]], figure: str) -> float | None:
    """The mean over the labels of all phases; None if no device compared."""
    labels = sum(each["labels"] for each in comparisons)
    return sum(each["labels"] * each[figure] for each in comparisons) / labels if labels else None


def _roll_out(fedloop: FedloopCommands, version: int) -> dict[str, Any]:
    started = fedloop.json("rollout", "start", f"{NAME}:{version}", "--phases", "25,100")
    stall = StallDetector(min_cpu_seconds=IDLE_CPU_SECONDS)
    while True:
        rollout: dict[str, Any] = fedloop.fleet.client.get(f"/rollouts/{started['id']}")
        if rollout["state"] in ("finished", "halted", "rolled_back", "aborted"):
            return rollout
        if stall.is_stalled(rollout, fedloop.fleet.pids()):
            raise RunInterrupted(
                f"the rollout of {NAME}:{version} is {rollout['state']}, and has made no progress for {STALL_SECONDS:.0f} s; "
                f"logs: {fedloop.fleet.folder}/logs"
            )
        time.sleep(0.5)
