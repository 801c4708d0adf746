"""A device with its own installer, a coordinator that shows it a repository of releases, and the people who sign for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_client import config
from edge_client.config import EdgeConfig
from edge_client.infer import golden_check, runtime
from edge_client.ota import (
    install,
    self_test,
    slots,
    transitions,
)
from edge_client.ota.transitions import Pointer
from edge_client.transport import identity
from edge_client.transport.link import Link, pinned_context
from edge_client.wire.device import ReleaseOffer
from tests.support import released
from tests.support.edge import enrolled
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.signed_releases import SignedReleases

MODEL = "digits"


@dataclass
class Clock:
    """Of those who sign; devices go by the machine's."""

    at: datetime

    def __call__(self) -> datetime:
        return self.at


@dataclass
class World:
    """`home`: for whatever a test writes. `sets`: of the device's configuration."""

    home: Path
    coordinator: FakeCoordinator
    signed: SignedReleases
    state_dir: Path
    who: identity.Identity
    sets: list[str] = field(default_factory=list)
    rollouts: dict[str, Any] = field(default_factory=dict)

    def publish(self, version: int, kind: released.Kind = "first", **changes: Any) -> Path:
        """Signs a release and makes it what counts."""
        folder = released.release_folder(self.home / "made" / str(version), version, kind, **changes)
        self.signed.publish(folder)
        return folder

    def roll_out(self, version: int, rollout: str = "", **changes: Any) -> ReleaseOffer:
        """Has the online key say that this device is to run it; the offer that hints at it."""
        rollout = rollout or f"rollout-{version}"
        entry: dict[str, Any] = {"rollout": rollout, "version": version, "action": "install", "force": False}
        entry |= {"devices": [self.who.device], "salt": "", "permille": 0, **changes}
        self.rollouts[rollout] = entry
        self.signed.repository.set_rollouts(MODEL, {"model": MODEL, "rollouts": list(self.rollouts.values())})
        return ReleaseOffer(rollout, MODEL, version, entry["action"], entry["force"])

    @property
    def config(self) -> EdgeConfig:
        sets = [f"state_dir={self.state_dir}", *self.sets]
        return config.load(None, {"HOME": str(self.home)}, sets).config

    @property
    def link(self) -> Link:
        return Link(self.coordinator.url, pinned_context(self.who.ca_pem, self.who.credentials))

    def install(self, offer: ReleaseOffer, run_self_test: install.RunSelfTest | None = None) -> str:
        """The daemon's installer, as the daemon calls it, once what runs has proved itself.

        `run_self_test`: by default without a process of its own.
        """
        self.lasts()
        device = install.Device(self.who.device, self.config, run_self_test or in_process)
        return install.install(device, self.link, offer, lambda: None)

    def lasts(self) -> None:
        """A minute passes in which the daemon does not end."""
        if self.pointer.trial_starts is not None:
            slots.write(self.state_dir, transitions.finish_trial(self.pointer))

    @property
    def pointer(self) -> Pointer:
        return slots.read(self.state_dir, MODEL)

    @property
    def pointer_file(self) -> Path:
        return slots.folder_of(self.state_dir, MODEL) / slots.POINTER_NAME

    def runs(self) -> int | None:
        """The version that answers when the active slot is asked; None: there is none."""
        folder = slots.active_folder(self.state_dir, MODEL)
        if folder is None:
            return None
        loaded = runtime.load(folder)
        x, y = released.digits()
        assert (loaded.predict(x[1500:]).argmax(-1) == y[1500:]).mean() > 0.8
        return loaded.manifest.version

    def serve_again(self, path: str, content: bytes) -> None:
        """The coordinator shows this at a path of the repository from now on."""
        self.coordinator.tampered[path] = lambda _: content

    def metadata(self, name: str) -> bytes:
        return (self.folder / "metadata" / name).read_bytes()

    def document(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.metadata(name))
        return found

    @property
    def folder(self) -> Path:
        """Of the repository."""
        assert self.coordinator.releases is not None
        return self.coordinator.releases

    def bytes_served(self) -> int:
        """Of model files."""
        return sum(size for path, size in self.coordinator.served if path.endswith(".tflite"))


def in_process(job: self_test.SelfTestJob, check_cancelled: Callable[[], None]) -> self_test.SelfTestResult:
    """A real self-test, quickly."""
    return self_test.SelfTestResult(golden_check.require(runtime.load(job.folder)))


@contextmanager
def world(home: Path, **options: Any) -> Iterator[World]:
    """`options`: of `SignedReleases`."""
    signed = SignedReleases(home / "repository", **options)
    with FakeCoordinator(releases=home / "repository").running() as coordinator:
        who = enrolled(coordinator, home / "state")
        yield World(home, coordinator, signed, home / "state", who)
