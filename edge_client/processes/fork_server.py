"""A process that forks others for its parent: the parent's side of `edge_client.processes.process.serve_forks`.

Standard library only, as in `process`.
"""

from __future__ import annotations

import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

from edge_client.processes.process import FORK, FORKED, Launch


class ForkServer:
    """One process of `module`, which has imported what its forks share; it is started when the first fork is asked for.

    `arguments` follow the number of its socket on its command line. `log`: where it and its forks write what libraries print; None: where
    this process does.

    Attributes:
        pid: of the process; None while there is none.
    """

    def __init__(
        self,
        module: str,
        arguments: tuple[str, ...] = (),
        log: Path | None = None,
        launch: Launch | None = None,
    ) -> None:
        self._module = module
        self._arguments = arguments
        self._log = log
        self._launch = launch or Launch()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ended: list[int] = []

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def fork(self) -> tuple[int, socket.socket]:
        """The process id of a new fork, and a socket whose other end it has.

        Raises:
            OSError: none can be started.
        """
        for _ in range(2):  # once more if the process has ended meanwhile
            control = self._control or self._start()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    ended = self._ended.pop() if self._ended else 0
                    socket.send_fds(control, [FORK.pack(ended)], [theirs.fileno()])
                answer = b""
                while len(answer) < FORKED.size:
                    if not (received := control.recv(FORKED.size - len(answer))):
                        raise OSError("closed")
                    answer += received
            except OSError:
                ours.close()
                self.close()
                continue
            return FORKED.unpack(answer)[1], ours
        raise OSError("the process that forks others ends as it starts")

    def reap(self, pid: int) -> None:
        """Has a fork that has ended, or is to end, reaped with the next one."""
        self._ended.append(pid)

    def close(self) -> None:
        """Ends and reaps the process and all its forks."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.terminate()  # while it imports modules; later it ends because the socket is closed
            self._process.wait()
            self._process = None
        self._ended.clear()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as stack:
            output = None if self._log is None else stack.enter_context(self._log.open("ab"))
            self._process = subprocess.Popen(
                self._launch.command("-m", self._module, str(theirs.fileno()), *self._arguments),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._launch.environment(),
            )
        self._control = ours
        return ours
