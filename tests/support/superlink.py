"""A SuperLink, with SuperNodes or Flower's simulation, as real processes on free ports of loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

from coordinator.demos.local_fleet import Daemon, free_address
from tests.support.processes import Marked
from tests.support.waiting import wait_until

_BIN = Path(sys.executable).parent


class SuperLink:
    """`with SuperLink(folder) as link`: starts one; at the end every process that came of it is gone, or the test fails."""

    def __init__(self, folder: Path, *flags: str) -> None:
        home = folder / "flwr"
        home.mkdir()
        self.address = free_address()
        self._folder = folder
        self._marked = Marked("FLWR_HOME", str(home))
        self._environment = {
            **self._marked.environment,
            "HOME": str(home),
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        config = (
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{self.address}"\ninsecure = true\n'
        )
        (home / "config.toml").write_text(config)
        self._link = self._daemon("superlink", "flower-superlink", *self._bound(self.address), *flags)
        self._nodes: list[Daemon] = []

    def __enter__(self) -> SuperLink:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # By SIGTERM a node says goodbye to its SuperLink, for as long as that takes. All are reaped, because Flower's own
        # children wait until the process id of their parent is gone.
        for node in self._nodes:
            node.kill()
        if self._link.is_running():
            self._link.stop()
        if kind is None:
            assert self._marked.all_gone(), self._marked.alive()
        for pid in self._marked.pids_of(""):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        self._link.start()
        wait_until(self._answers)

    def kill(self) -> None:
        """Kills it, as a power cut would."""
        self._link.kill()

    def add_node(self, config: str) -> None:
        """Starts a SuperNode with this configuration."""
        name = f"node-{len(self._nodes)}"
        node = self._daemon(
            name,
            "flower-supernode",
            "--superlink",
            self.address,
            *self._bound(free_address()),
            "--node-config",
            config,
        )
        node.start()
        self._nodes.append(node)

    def restart_nodes(self) -> None:
        """Starts the SuperNodes that have ended; they do when their SuperLink no longer knows them."""
        for node in self._nodes:
            node.kill()
            node.start()

    def flwr_run(self, app: Path, *flags: str) -> subprocess.Popen[str]:
        """`flwr run`, which shows the run's log and ends with the run."""
        return subprocess.Popen(
            [str(_BIN / "flwr"), "run", str(app), "here", "--stream", *flags],
            env={**os.environ, **self._environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def logs(self) -> str:
        """The end of every process's log."""
        return "\n".join(each.tail() for each in (self._link, *self._nodes))

    def _bound(self, address: str) -> list[str]:
        host, _, port = address.partition(":")
        return ["--insecure", "--host", host, "--port", port]

    def _daemon(self, name: str, *command: str) -> Daemon:
        return Daemon([str(_BIN / command[0]), *command[1:]], self._folder / f"{name}.log", self._environment)

    def _answers(self) -> bool:
        assert self._link.is_running(), self._link.tail()
        with suppress(OSError), urllib.request.urlopen(f"http://{self.address}/health") as reply:
            return bool(reply.status == 200)
        return False
