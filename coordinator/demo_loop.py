"""`fedloop demo-loop`: the whole circle on digits, by the commands a person would give.

    1. pretrain   a teacher on a small public part of the data, compress it to an int8 student
    2. release    sign it offline, publish it, roll it out over device daemons that keep the rest of the data
    3. federate   the devices train the student together, on rows that never leave them
    4. release    what they learnt, quantized again: the rollout lets devices compare it with what they run
    5. lineage    what came from what, back to the data

Every command is shown as it is given. What each left lies in a folder of its own; `demo-loop.json` holds the result.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import tomlkit

from coordinator.demo_fleet import arrays_of, device_config
from coordinator.errors import RunInterrupted, UserError
from coordinator.local_fleet import LocalFleet, ProcessFailed, local_fleet
from coordinator.progress import Progress
from edge_client.files import write_durably
from models import datasets

NAME, SEED = "digits", 7
PUBLIC_SAMPLES = 150
DEVICES = ("north", "east", "south", "west")
STUDENT = f"{NAME}:2"
"""In the registry, after its teacher."""
ROLLOUT_SECONDS = 300.0
_BIN = Path(sys.executable).parent
_EXPERIMENT: dict[str, Any] = {
    "name": "demo-loop",
    "seed": SEED,
    "data": {"dataset": NAME},
    "federation": {"clients": len(DEVICES), "rounds": 12, "runtimes": {"litert": 1.0}},
    "local": {"epochs": 3, "batch_size": 16, "lr": 0.05},
}


@dataclass(frozen=True)
class Released:
    """One turn of the circle.

    Attributes:
        version: in the registry.
        accuracy: of the released file on the coordinator's held-out rows.
        device_accuracy, before: pooled over the devices' rows as a gate pools them, of this release and of the one it replaced.
        rollout: the state its rollout ended in.
    """

    version: int
    bytes: int
    accuracy: float
    rollout: str
    device_accuracy: float | None
    before: float | None


@dataclass(frozen=True)
class LoopDemo:
    """What the circle came to. `lineage`: the printed graph; `stopped`: exit status of every process."""

    shipped: Released
    learnt: Released
    lineage: str
    stopped: Mapping[str, int]
    report: Path


@dataclass(frozen=True)
class _Commands:
    """Gives `fedloop` commands to one coordinator, and shows them."""

    fleet: LocalFleet
    folder: Path
    show: Callable[[str], None]

    def __call__(self, *words: str | Path) -> str:
        """What the command printed.

        Raises:
            RunInterrupted: it failed; with its own words.
        """
        self.show(shlex.join(["fedloop", *map(str, words)]))
        environment = {
            **os.environ,
            "FEDLOOP_HOME": str(self.fleet.home),
            "FEDLOOP_COORDINATOR": self.fleet.operator_url,
        }
        done = subprocess.run(
            [_BIN / "fedloop", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RunInterrupted(f"fedloop {words[0]} failed: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def json(self, *words: str | Path) -> Any:
        return json.loads(self(*words, "--json"))


def demo_loop(out: Path, progress: Progress, show: Callable[[str], None] = lambda line: None) -> LoopDemo:
    """Runs the demo into the new or empty folder `out`. `show` is told every command.

    Raises:
        UserError: `out` is not empty.
        RunInterrupted: a command or a process failed; the message says which, and why.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: the folder is not empty; name another one")
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with local_fleet(out / "fleet") as fleet:
            for name, share in zip(DEVICES, shares(), strict=True):
                fleet.add(name, device_config("litert"), share).start()
            commands = _Commands(fleet, out, show)
            shipped = _shipped(commands, progress)
            learnt = _learnt(commands, progress)
            progress.stage("5/5 what came from what")
            lineage = commands("model", "lineage", f"{NAME}:{learnt.version}")
            stopped = fleet.stop()
    except ProcessFailed as error:
        raise RunInterrupted(str(error)) from None
    result = LoopDemo(shipped, learnt, lineage, stopped, out / "demo-loop.json")
    write_durably(
        result.report, json.dumps({**asdict(result), "report": str(result.report)}, indent=2).encode()
    )
    return result


def shares() -> list[dict[str, npt.NDArray[Any]]]:
    """What each device has: its part of the rows that are not public, some classes more than others."""
    dataset = datasets.load(NAME, seed=SEED)
    public = datasets.public_rows(dataset, PUBLIC_SAMPLES, SEED)
    parts = datasets.partition("dirichlet(0.5)", dataset, clients=len(DEVICES), seed=SEED, exclude=public)
    return arrays_of(dataset, parts, SEED)


def _shipped(fedloop: _Commands, progress: Progress) -> Released:
    """The datacenter's model on every device."""
    progress.stage(f"1/5 pretraining on {PUBLIC_SAMPLES} public rows, compressing")
    rows = f"data.public_samples={PUBLIC_SAMPLES}"
    fedloop(
        "pretrain", "--set", rows, "--set", "train.epochs=60", "--set", "train.shift=1", "--out", "teacher"
    )
    fedloop("model", "add", "teacher", "--name", NAME)
    fedloop("compress", "teacher", "--student", "cnn", "--out", "student")
    fedloop("model", "add", "student", "--name", NAME)

    progress.stage("2/5 signing a release offline, rolling it out over four devices")
    _begin_signing(fedloop)
    return _released(fedloop, "student", "release-1")


def _learnt(fedloop: _Commands, progress: Progress) -> Released:
    """What the devices learnt together, on every device."""
    progress.stage("3/5 the devices train on what they have")
    experiment = {
        **_EXPERIMENT,
        "model": {"name": "cnn", "init": STUDENT},
    }
    write_durably(fedloop.folder / "experiment.toml", tomlkit.dumps(experiment).encode())
    fedloop("run", "experiment.toml", "--out", "federated")
    fedloop("model", "add", "federated", "--name", NAME)

    progress.stage("4/5 the next release, compared on the devices with the one they run")
    return _released(fedloop, "federated", "release-2")


def _begin_signing(fedloop: _Commands) -> None:
    """Keys, and a repository without any release."""
    fedloop("release", "keygen", "keys", "--no-passphrase")
    write_durably(fedloop.folder / "online.json", fedloop("release", "online-keys").encode())
    fedloop("release", "init", "--keys", "keys", "--online", "online.json", "--staging", "stick")
    _sign(fedloop)


def _sign(fedloop: _Commands) -> None:
    fedloop("release", "sign", "--keys", "keys", "--staging", "stick")
    fedloop("release", "publish", "--staging", "stick")


def _released(fedloop: _Commands, folder: str, release: str) -> Released:
    """Exports, registers, signs, publishes and rolls out what is in `folder`."""
    version = 1 + max(each["number"] for each in fedloop.json("model", "list", NAME))
    exported = fedloop.json(
        "export", folder, "--name", NAME, "--version", str(version), "--dataset", NAME, "--out", release
    )
    fedloop("model", "add", release, "--name", NAME)
    fedloop("release", "add", release, "--staging", "stick")
    _sign(fedloop)
    rollout = _rolled_out(fedloop, version)
    fedloop("model", "alias", f"{NAME}:{version}", "champion")
    compared = [phase["comparison"] for phase in rollout["phases"] if phase["comparison"]]
    return Released(
        version,
        exported["bytes"],
        exported["accuracy"],
        rollout["state"],
        _pooled(compared, "accuracy"),
        _pooled(compared, "champion_accuracy"),
    )


def _pooled(compared: list[dict[str, Any]], figure: str) -> float | None:
    """A share over the labels of all phases; None where no device compared."""
    labels = sum(each["labels"] for each in compared)
    return sum(each["labels"] * each[figure] for each in compared) / labels if labels else None


def _rolled_out(fedloop: _Commands, version: int) -> dict[str, Any]:
    """The rollout of a version, once it is over."""
    started = fedloop.json("rollout", "start", f"{NAME}:{version}", "--phases", "25,100")
    end = time.monotonic() + ROLLOUT_SECONDS
    while True:
        found: dict[str, Any] = fedloop.fleet.client.get(f"/rollouts/{started['id']}")
        if found["state"] in ("finished", "halted", "rolled_back", "aborted"):
            return found
        if time.monotonic() > end:
            raise RunInterrupted(
                f"the rollout of {NAME}:{version} is {found['state']} after {ROLLOUT_SECONDS:.0f} s"
            )
        time.sleep(0.5)
