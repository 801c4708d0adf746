"""A coordinator and its devices as real processes on this machine, under one folder.

The same two commands a user gives, `fedloop serve` and `fedloop-edge`, on ports of the kernel's choice and with
state, logs and configuration side by side:

    <folder>/coordinator/          home of `fedloop serve`
    <folder>/devices/<name>/       edge.toml, data and state of one daemon
    <folder>/logs/                 what each process said

Every process dies with the one that started it, whatever ends that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tomlkit

from coordinator.api.deps import read_admin_token
from coordinator.errors import UserError
from coordinator.operator_client import OperatorClient
from edge_client.files import write_durably
from edge_client.process import bound, worker_environment

_BIN = Path(sys.executable).parent
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


class ProcessFailed(Exception):
    """A process ended that should live, or does not come up; the message holds the end of its log."""


@dataclass
class Daemon:
    """One process that can be started, stopped and killed again and again."""

    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self, extra: Mapping[str, str] | None = None) -> None:
        """Starts it; `extra` is added to its environment this time."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                bound(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**worker_environment(), **self.environment, **(extra or {})},
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        if self.is_running():
            assert self.process is not None
            self.process.send_signal(number)

    def ended(self, seconds: float = _STOP_SECONDS) -> int:
        """Its exit status, once it is over.

        Raises:
            ProcessFailed: it does not end.
        """
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"{self.command[1]} does not end\n{self.tail()}") from None

    def stop(self) -> int:
        """Asks it to end; its exit status."""
        self.send(signal.SIGTERM)
        return self.ended()

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self.send(signal.SIGKILL)
        self.ended()

    def tail(self, lines: int = 20) -> str:
        """The end of what it said."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])


@dataclass
class LocalFleet:
    """See the module's story. `flags` go to `fedloop serve`; `environment` to every process."""

    folder: Path
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: dict[str, Daemon] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("coordinator", "devices", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.home = self.folder / "coordinator"
        self.coordinator = self._serve("127.0.0.1:0", "127.0.0.1:0")

    @property
    def client(self) -> OperatorClient:
        """Calls to this coordinator's operator API."""
        return OperatorClient(self._addresses()["operator"], read_admin_token(self.home))

    @property
    def operator_url(self) -> str:
        return str(self._addresses()["operator"])

    @property
    def device_url(self) -> str:
        return str(self._addresses()["device"])

    def serve(self, extra: Mapping[str, str] | None = None, *, wait: bool = True) -> None:
        """Starts the coordinator and waits until it answers. Started again, it keeps its ports.

        Raises:
            ProcessFailed: it ended, or does not come up.
        """
        before = self._addresses() if (self.home / "serve.json").exists() else None
        if before is not None:
            self.coordinator = self._serve(*(before[key].split("//")[1] for key in ("operator", "device")))
        self.coordinator.start(extra)
        if wait:
            _until(self._answers, self.coordinator)

    def add(
        self,
        name: str,
        config: Mapping[str, Any],
        data: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        url: str | None = None,
        group: str = "",
    ) -> Daemon:
        """Writes a device's configuration, enrols it and gives its daemon, not yet started.

        `data` becomes `data.npz` in the device's folder. `url`: how it reaches the device API.

        Raises:
            UserError: it could not be enrolled.
        """
        folder = self.folder / "devices" / name
        folder.mkdir()
        if data is not None:
            self.give(name, data)
        document = {"name": name, "state_dir": str(folder / "state"), **config}
        write_durably(folder / "edge.toml", tomlkit.dumps(document).encode())
        environment = {**self.environment, "FEDLOOP_EDGE_CONFIG": str(folder / "edge.toml")}
        token = self.client.post("/tokens", {"group": group} if group else {})["token"]
        done = subprocess.run(
            [_BIN / "fedloop-edge", "enroll", url or self.device_url, token],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
            check=False,
        )
        if done.returncode:
            raise UserError(f"{name} could not be enrolled: {done.stderr.strip()}")
        command = [str(_BIN / "fedloop-edge"), "run"]
        self.devices[name] = Daemon(command, self.folder / "logs" / f"{name}.log", environment)
        return self.devices[name]

    def ids(self) -> dict[str, str]:
        """Ids of the enrolled devices by name."""
        return {device["name"]: device["id"] for device in self.client.get("/devices", limit=1000)["devices"]}

    def give(self, name: str, data: Mapping[str, npt.NDArray[Any]]) -> None:
        """Puts `data.npz` into a device's folder."""
        np.savez(self.folder_of(name) / "data.npz", **data)  # type: ignore[arg-type]

    def folder_of(self, name: str) -> Path:
        return self.folder / "devices" / name

    def stop(self) -> dict[str, int]:
        """Asks all to end, devices first; exit statuses by name."""
        running = {name: each for name, each in self.devices.items() if each.is_running()}
        for each in running.values():
            each.send(signal.SIGTERM)
        statuses = {name: each.ended() for name, each in running.items()}
        if self.coordinator.is_running():
            statuses["coordinator"] = self.coordinator.stop()
        return statuses

    def kill(self) -> None:
        """Ends all at once, whatever they do."""
        for each in (*self.devices.values(), self.coordinator):
            if each.is_running():
                each.kill()

    def _serve(self, operator: str, device: str) -> Daemon:
        command = [str(_BIN / "fedloop"), "serve", "--home", str(self.home)]
        command += ["--operator", operator, "--device", device, *self.flags]
        return Daemon(command, self.folder / "logs" / "coordinator.log", dict(self.environment))

    def _addresses(self) -> dict[str, Any]:
        addresses: dict[str, Any] = json.loads((self.home / "serve.json").read_bytes())
        return addresses

    def _answers(self) -> bool:
        try:
            return bool(self._addresses()["pid"] == self.coordinator.pid and self.client.get("/system"))
        except (UserError, OSError):
            return False


@contextmanager
def local_fleet(
    folder: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[LocalFleet]:
    """A served coordinator without devices yet; at the end whatever still runs is killed."""
    fleet = LocalFleet(folder, flags, environment or {})
    try:
        fleet.serve()
        yield fleet
    finally:
        fleet.kill()


def _until(holds: Any, daemon: Daemon) -> None:
    end = time.monotonic() + _START_SECONDS
    while not holds():
        if not daemon.is_running():
            raise ProcessFailed(f"{daemon.command[1]} ended at once\n{daemon.tail()}")
        if time.monotonic() > end:
            raise ProcessFailed(f"{daemon.command[1]} does not come up\n{daemon.tail()}")
        time.sleep(0.05)
