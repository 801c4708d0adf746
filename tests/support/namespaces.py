"""A network of its own for one device: a namespace joined to the machine's by a cable that can be pulled.

machine  10.x.y.1 ── veth ── 10.x.y.2  namespace
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.support.require import require


@dataclass(frozen=True)
class Cable:
    """A namespace and the cable to it.

    Attributes:
        name: of the namespace.
        here: the machine's address on the cable. there: that of the namespace.
    """

    name: str
    here: str
    there: str

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command, run in the namespace."""
        return [shutil.which("ip") or "ip", "netns", "exec", self.name, *command]

    def pull(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        _ip("link", "set", self.end, "down")

    def plug(self) -> None:
        _ip("link", "set", self.end, "up")

    @property
    def end(self) -> str:
        """This machine's end of the cable."""
        return f"{self.name}-h"


@contextmanager
def cable() -> Iterator[Cable]:
    """A namespace of this process, gone at the end; the test is skipped where there can be none."""
    if shutil.which("ip") is None:
        require("namespaces", "the command ip (iproute2) is not there")
    net = os.getpid() % 2**14
    joined = Cable(f"fl{net}", f"10.{192 + net // 256}.{net % 256}.1", f"10.{192 + net // 256}.{net % 256}.2")
    try:
        _ip("netns", "add", joined.name)
    except RuntimeError as error:
        require("namespaces", f"a network namespace cannot be made: {error}")
    try:
        _lay(joined)
        yield joined
    finally:
        # The cable first: with the namespace alone it would go too, but some time later.
        with suppress(RuntimeError):
            _ip("link", "delete", joined.end)
        _ip("netns", "delete", joined.name)


@dataclass(frozen=True)
class TwoHosts:
    """Two namespaces joined by a cable, which play hosts: `names`, and the `addresses` by which they reach each other."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def pull(self) -> None:
        """The cable carries nothing any more, and nobody is told."""
        _ip("-n", self.names[1], "link", "set", "cable", "down")

    def plug(self) -> None:
        _ip("-n", self.names[1], "link", "set", "cable", "up")

    def processes(self, host: int) -> list[int]:
        """Ids of the processes on a host."""
        done = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, check=True)
        return [int(word) for word in done.stdout.split()]

    def kill(self, host: int) -> None:
        """SIGKILL of every process on a host, until there is none."""
        while processes := self.processes(host):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two namespaces of this process, gone at the end with all that runs there; the test is skipped where there can be none."""
    if shutil.which("ip") is None:
        require("namespaces", "the command ip (iproute2) is not there")
    net = os.getpid() % 2**14
    prefix = f"10.{192 + net // 256}.{net % 256}"
    hosts = TwoHosts((f"flh{net}-a", f"flh{net}-b"), (f"{prefix}.5", f"{prefix}.6"))
    made: list[str] = []
    try:
        try:
            for name in hosts.names:
                _ip("netns", "add", name)
                made.append(name)
            first, second = hosts.names
            _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
            for name, address in zip(hosts.names, hosts.addresses, strict=True):
                _ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except RuntimeError as error:
            require("namespaces", f"two network namespaces cannot be joined: {error}")
        yield hosts
    finally:
        for number, name in enumerate(made):
            hosts.kill(number)
            _ip("netns", "delete", name)


def _lay(joined: Cable) -> None:
    here, there = joined.end, f"{joined.name}-n"
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", joined.name)
        _ip("address", "add", f"{joined.here}/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", joined.name, "address", "add", f"{joined.there}/30", "dev", there)
        _ip("-n", joined.name, "link", "set", there, "up")
        _ip("-n", joined.name, "link", "set", "lo", "up")
        subprocess.run(joined.inside(["true"]), check=True, capture_output=True)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        require("namespaces", f"a namespace cannot be joined to the machine: {error}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
