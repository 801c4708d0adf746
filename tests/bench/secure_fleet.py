"""Secure aggregation over the real device API: agents of this process, which take part as daemons do, against a served coordinator.

Each agent has a certificate, enrols, checks in, makes up an update and goes through all stages over TLS. One in twenty drops out once its
secrets are shared, one in twenty once its masked update counts; both say so, as a daemon that was restarted does. The new model has to be the mean of the clipped updates of those whose masked
update counts, which only the agents know. `FEDLOOP_BENCH_SHORT=1` takes fewer agents.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.privacy.secure_update import SecureUpdate
from edge_client.train.process import Interrupted, TrainingFailed
from edge_client.transport import identity
from edge_client.transport.identity import Identity
from edge_client.transport.link import Link, parse_answer, pinned_context, upload
from edge_client.wire import arrays
from edge_client.wire.device import CheckInAnswer, Decline, TaskMessage, TaskOffer, UploadStart
from strategies.params import Params
from strategies.strategy import ClipNorm
from strategies.update import Update
from tests.support.arena import NO_LEASE_ENDS, Arena, arena, experiment

SHORT = os.environ.get("FEDLOOP_BENCH_SHORT") == "1"
AGENTS = 60 if SHORT else 1000
CLIP_NORM, GROUP_SIZE, VALUE_BITS = 1.0, 16, 32
EVERY = 20
"""One agent in so many drops out at either place."""


@dataclass
class Agent:
    """A device without a daemon. `number` decides what it does, and its update."""

    number: int
    own: Identity
    counted: bool = False
    params: Params = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.link = Link(self.own.url, pinned_context(self.own.ca_pem, self.own.credentials), connections=1)

    def check_in(self, made: Arena, wait_seconds: float = 0.0) -> CheckInAnswer:
        message = made.checkin(wait_seconds=wait_seconds)
        return parse_answer(CheckInAnswer, self.link.post("/checkin", message, wait_seconds=wait_seconds))

    def update(self) -> Update:
        rng = np.random.default_rng(self.number)
        delta = {
            name: rng.normal(0, 0.5, value.shape).astype(np.float32) for name, value in self.params.items()
        }
        return Update(delta, num_examples=40, num_steps=10, train_loss=1.0)

    def work(self, made: Arena, folder: Path) -> None:
        """Takes part in one round, as far as its number lets it."""
        while (offer := self.check_in(made, 45.0).task) is None:
            pass
        message = TaskMessage.from_json(offer.message)
        assert offer.params is not None
        self.params = arrays.decode(self.link.content(f"/blobs/{offer.params.sha256}"))
        result = folder / f"{self.number}"
        arrays.write_result(result, message, self.update())
        secure = SecureUpdate(
            self.link, self.own, offer, lambda masked: self._send(offer, masked), self._pause
        )
        try:
            secure.send(result, folder / f"{self.number}.masked")
        except Interrupted as left:
            # As a daemon that was restarted.
            self.link.post(f"/tasks/{offer.task}/decline", Decline("failed", left.reason))

    def _send(self, offer: TaskOffer, masked: Path) -> None:
        if self.number % EVERY == 0:
            raise Interrupted("dropped out before its masked update")
        size = masked.stat().st_size
        upload(self.link, offer.task, masked, UploadStart(size, arrays.sha256(masked.read_bytes()), size))
        self.counted = True

    def _pause(self, seconds: float) -> None:
        if self.counted and self.number % EVERY == 1:
            raise Interrupted("dropped out after its masked update")
        time.sleep(seconds)


def run() -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        arena(
            Path(folder),
            ("--held", str(2 * AGENTS)),
            environment=NO_LEASE_ENDS,
        ) as made,
    ):
        found = _round(made, Path(folder))
        broken = [line for line in made.failures() if '"status": 503' not in line]
        found["failures"] = [*broken[:5], *_failures(found)]
    print(
        f"secure aggregation of {AGENTS} agents over the device API: {found['accepted']} in the sum, {found['dropped']} dropped out, "
        f"largest error {found['largest_error']:.1e}; {found['seconds']:.1f} s for the round, {found['bytes_up']:,} bytes up"
    )
    return found


def _round(made: Arena, folder: Path) -> dict[str, Any]:
    agents = _enrol(made, folder)
    document = experiment(AGENTS) | {
        "privacy": {
            "secure_aggregation": True,
            "clip_norm": CLIP_NORM,
            "group_size": GROUP_SIZE,
            "value_bits": VALUE_BITS,
        },
        "strategy": {"name": "fedavg", "weighting": "uniform"},
    }
    run = str(made.fleet.client.post("/runs", {"experiment": document})["id"])
    failed: list[BaseException] = []

    def work(agent: Agent) -> None:
        try:
            with closing(agent.link):
                agent.work(made, folder)
        except BaseException as error:  # told below
            failed.append(error)

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(agent,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    report = made.finished(run)
    (row,) = report["rounds"]
    for thread in threads:
        thread.join(60)
    refused = [error for error in failed if not isinstance(error, TrainingFailed)]
    assert not refused, refused[:3]
    return {
        "agents": AGENTS,
        "accepted": row["accepted"],
        "dropped": AGENTS - row["accepted"],
        "counted": sum(agent.counted for agent in agents),
        "gave_up": len(failed),
        "largest_error": _error(
            arrays.read(made.fleet.home / "blobs" / report["final"]["model_sha256"]), agents
        ),
        "seconds": row["seconds"],
        "wall_seconds": time.monotonic() - began,
        "bytes_up": row["bytes_up"],
    }


def _enrol(made: Arena, folder: Path) -> list[Agent]:
    token = made.fleet.client.post("/tokens", {"uses": AGENTS, "group": "agents"})["token"]

    def enrol(number: int) -> Agent:
        own = identity.enrol(
            folder / "agents" / str(number),
            made.fleet.device_url,
            token,
            name=f"agent-{number}",
            wait=time.sleep,
        )
        return Agent(number, own)

    with ThreadPoolExecutor(4) as pool:
        agents = list(pool.map(enrol, range(AGENTS)))
        list(pool.map(lambda agent: agent.check_in(made), agents))
    return agents


def _error(model: Params, agents: list[Agent]) -> float:
    """How far the model is from the mean of the clipped updates that count."""
    clip = ClipNorm(CLIP_NORM)
    updates = [clip.apply(agent.update(), {})[0].delta for agent in agents if agent.counted]
    errors = []
    for name, before in next(agent.params for agent in agents if agent.counted).items():
        mean = np.mean([np.asarray(delta[name], np.float64) for delta in updates], axis=0)
        errors.append(np.abs(np.asarray(model[name], np.float64) - before - mean).max())
    return float(max(errors))


def _failures(found: dict[str, Any]) -> list[str]:
    # Half a level of each of a group's values, and float32 of the model.
    if found["largest_error"] > 1e-6:
        return [f"the model is off the mean of the updates by {found['largest_error']:.1e}"]
    return []
