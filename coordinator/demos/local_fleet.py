"""A coordinator and its devices as real processes on this machine, under one folder.

Runs the same two commands as a user, `fedloop serve` and `fedloop-edge`, on free ports, with
state, logs and configuration side by side:

    <folder>/coordinator/          home of `fedloop serve`
    <folder>/devices/<name>/       edge.toml, data and state of one daemon
    <folder>/logs/                 output of each process

Every process dies with its parent, however that ends.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import tomlkit

from coordinator.accounts.admin_token import read_admin_token
from coordinator.errors import RunInterrupted, UserError
from coordinator.operator.client import OperatorClient
from edge_client.files import write_durably
from edge_client.processes.process import tie_to_parent, worker_environment

_BIN = Path(sys.executable).parent
STALL_SECONDS = 60.0
"""A process that used no processor time for this long will not come up; on a loaded machine a start takes longer."""
_STOP_SECONDS = 30.0
_PORTS = range(20_000, 32_768)
"""Ports that Linux does not assign to outgoing connections (`net.ipv4.ip_local_port_range` begins at 32,768)."""


class ProcessFailed(RunInterrupted):
    """A process ended unexpectedly, or does not come up; the message holds the end of its log."""


class StallDetector:
    """Detects that processes make no progress: neither an observed value nor their processor time has changed for a while.

    A loaded machine makes everything slow, so no timeout from the start suits all machines.
    """

    def __init__(
        self,
        stall_seconds: float = STALL_SECONDS,
        min_cpu_seconds: float = 0.5,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`min_cpu_seconds`: processor time that counts as progress; more than idle processes use in `stall_seconds`."""
        self._stall_seconds, self._min_cpu_seconds, self._now = stall_seconds, min_cpu_seconds, now
        self._since, self._observed = now(), ""
        self._read_at, self._cpu_seconds = now(), 0.0

    def is_stalled(self, observed: object, processes: Iterable[int]) -> bool:
        """Whether nothing has changed for `stall_seconds`. Compares `observed` by its `repr`; counts children of processes.

        Reads processor times 60 times in `stall_seconds` at most, however often it is called: finding the children goes through all
        processes of the machine.
        """
        now, shown = self._now(), repr(observed)
        if shown != self._observed or now - self._read_at >= self._stall_seconds / 60:
            cpu_seconds = _cpu_seconds(processes)
            change = abs(cpu_seconds - self._cpu_seconds)  # negative when a process has ended
            if shown != self._observed or change >= self._min_cpu_seconds:
                self._since, self._observed, self._cpu_seconds = now, shown, cpu_seconds
            self._read_at = now
        return now - self._since > self._stall_seconds


def _cpu_seconds(processes: Iterable[int]) -> float:
    total = 0.0
    for pid in processes:
        with suppress(psutil.Error):
            first = psutil.Process(pid)
            for each in (first, *first.children(recursive=True)):
                with suppress(psutil.Error):
                    total += sum(each.cpu_times()[:4])
    return total


@dataclass
class Daemon:
    """A process that can be started, stopped and killed repeatedly."""

    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self, extra: Mapping[str, str] | None = None) -> None:
        """Starts it, with `extra` added to its environment this time."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                tie_to_parent(self.command),
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

    def wait(self, seconds: float = _STOP_SECONDS) -> int:
        """Waits for its end; returns the exit status. Raises: ProcessFailed: it does not end."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"{self.command[1]} does not end\n{self.tail()}") from None

    def stop(self) -> int:
        """Terminates it gracefully; returns the exit status."""
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kills it, as a power cut would."""
        self.send(signal.SIGKILL)
        self.wait()

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])


@dataclass
class LocalFleet:
    """A coordinator and its devices. `flags` go to `fedloop serve`, `environment` to every process."""

    folder: Path
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: dict[str, Daemon] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("coordinator", "devices", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.home = self.folder / "coordinator"
        self.coordinator = self._serve(free_address(), free_address())

    @property
    def client(self) -> OperatorClient:
        """A client of this coordinator's operator API."""
        return OperatorClient(self._addresses()["operator"], read_admin_token(self.home))

    @property
    def operator_url(self) -> str:
        return str(self._addresses()["operator"])

    @property
    def device_url(self) -> str:
        return str(self._addresses()["device"])

    def serve(self, extra: Mapping[str, str] | None = None, *, wait: bool = True) -> None:
        """Starts the coordinator and waits until it answers. It keeps its ports across restarts.

        Raises:
            ProcessFailed: it ended, or does not come up.
        """
        if (self.home / "serve.json").exists():
            addresses = self._addresses()
            self.coordinator = self._serve(*(addresses[key].split("//")[1] for key in ("operator", "device")))
        self.coordinator.start(extra)
        if wait:
            _wait_until(self._is_up, self.coordinator)

    def add(
        self,
        name: str,
        config: Mapping[str, Any],
        data: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        url: str | None = None,
        group: str = "",
        relay: str = "",
    ) -> Daemon:
        """Writes a device's configuration and enrols it; returns its daemon, not yet started.

        `data` becomes `data.npz` in the device's folder. `url`: address of the device API, if not the default. `relay`: id of the relay
        that it belongs to.

        Raises:
            UserError: it could not be enrolled.
        """
        folder = self.folder / "devices" / name
        folder.mkdir()
        if data is not None:
            self.write_data(name, data)
        document = {"name": name, "state_dir": str(folder / "state"), **config}
        write_durably(folder / "edge.toml", tomlkit.dumps(document).encode())
        environment = {**self.environment, "FEDLOOP_EDGE_CONFIG": str(folder / "edge.toml")}
        terms = {**({"group": group} if group else {}), **({"relay": relay} if relay else {})}
        token = self.client.post("/tokens", terms)["token"]
        enrol(name, [str(_BIN / "fedloop-edge"), "enroll", url or self.device_url, token], environment)
        command = [str(_BIN / "fedloop-edge"), "run"]
        self.devices[name] = Daemon(command, self.folder / "logs" / f"{name}.log", environment)
        return self.devices[name]

    def pids(self) -> list[int]:
        """Ids of all running processes."""
        return [each.pid for each in (self.coordinator, *self.devices.values()) if each.is_running()]

    def ids(self) -> dict[str, str]:
        """Ids of the enrolled devices by name."""
        return {device["name"]: device["id"] for device in self.client.get("/devices", limit=1000)["devices"]}

    def write_data(self, name: str, data: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes `data.npz` into a device's folder."""
        np.savez(self.device_folder(name) / "data.npz", **data)  # type: ignore[arg-type]

    def device_folder(self, name: str) -> Path:
        return self.folder / "devices" / name

    def serve_until_interrupted(self) -> None:
        """Waits for Ctrl-C, then stops all processes.

        Raises:
            ProcessFailed: the coordinator ended by itself; the message holds the end of its log.
        """
        with suppress(KeyboardInterrupt):
            while self.coordinator.is_running():
                time.sleep(0.5)
        if not self.coordinator.is_running():
            raise ProcessFailed(f"the coordinator ended\n{self.coordinator.tail()}")
        self.stop()

    def stop(self) -> dict[str, int]:
        """Stops all processes, devices first; returns exit statuses by name."""
        running = {name: each for name, each in self.devices.items() if each.is_running()}
        for each in running.values():
            each.send(signal.SIGTERM)
        statuses = {name: each.wait() for name, each in running.items()}
        if self.coordinator.is_running():
            statuses["coordinator"] = self.coordinator.stop()
        return statuses

    def kill(self) -> None:
        """Kills all processes at once."""
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

    def _is_up(self) -> bool:
        try:
            return bool(self._addresses()["pid"] == self.coordinator.pid and self.client.get("/system"))
        except (UserError, OSError):
            return False


@contextmanager
def local_fleet(
    folder: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[LocalFleet]:
    """A running coordinator without devices; kills all remaining processes at the end."""
    fleet = LocalFleet(folder, flags, environment or {})
    try:
        fleet.serve()
        yield fleet
    finally:
        fleet.kill()


def enrol(name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs the command that enrols a device. Raises: UserError: it failed."""
    with subprocess.Popen(
        tie_to_parent(command),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stall = StallDetector()
        while process.poll() is None:
            if stall.is_stalled("", [process.pid]):
                process.kill()
                raise UserError(f"{name} could not be enrolled: no progress for {STALL_SECONDS:.0f} s")
            time.sleep(0.05)
        assert process.stderr is not None
        if process.returncode:
            raise UserError(f"{name} could not be enrolled: {process.stderr.read().strip()}")


def free_address() -> str:
    """A loopback address whose port stays free while the coordinator is down.

    A port that the kernel assigns could be given to an outgoing connection meanwhile, even to a device's own attempt to
    connect to it.
    """
    while True:
        port = _PORTS.start + secrets.randbelow(len(_PORTS))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


def _wait_until(holds: Callable[[], bool], daemon: Daemon) -> None:
    stall = StallDetector()
    while not holds():
        if not daemon.is_running():
            raise ProcessFailed(f"{daemon.command[1]} ended at once\n{daemon.tail()}")
        if stall.is_stalled(daemon.log.stat().st_size, [daemon.pid]):
            raise ProcessFailed(f"{daemon.command[1]} does not come up\n{daemon.tail()}")
        time.sleep(0.05)
