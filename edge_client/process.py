"""How our worker processes behave: they die with their parent, report in lines, and fail in one sentence.

A worker is started with the path of a job file. Whatever it wants its parent to know is one JSON object a
line on standard output: progress as it comes, `{"error": …}` before a failing exit. Everything else that
libraries print goes to standard error. Standard library only, so that any worker may import it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

PARENT_VARIABLE = "FEDLOOP_PARENT_PID"
"""Environment variable in which a parent tells its workers its own process id."""

UNTOUCHED_BYTES = 256 * 1024 * 1024
"""Private memory that libraries reserve without using it, allowed beyond a limit."""

_NICE = 10
_FIRST_TO_GO = "500"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Several processes with several threads each fight over the cores. oneDNN's rounding depends on the processor.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

Report = Callable[..., None]
"""Writes its keyword arguments as one JSON line to the parent."""


def worker_environment() -> dict[str, str]:
    """The environment to start a worker in: ours, one thread, and whose death ends it."""
    return {**os.environ, **_ONE_THREAD, PARENT_VARIABLE: str(os.getpid())}


@dataclass(frozen=True)
class Launch:
    """How worker processes are started.

    Attributes:
        prefix: words before a worker's command, of a program that becomes that command.
        environment: gives all variables that the worker has.
    """

    prefix: tuple[str, ...] = ()
    environment: Callable[[], dict[str, str]] = worker_environment

    def command(self, *arguments: str) -> list[str]:
        """What starts Python with these arguments, such as `-m MODULE`."""
        # -P keeps the working directory off sys.path: a user's own models.py must not shadow ours.
        return [*self.prefix, sys.executable, "-P", *arguments]


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, SIGKILL included.

    Not inherited: every process of a tree calls this for itself. The parent may be gone before the call,
    so it leaves its process id in `PARENT_VARIABLE`, and a worker that finds another parent exits at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    parent = os.environ.get(PARENT_VARIABLE, "")
    if parent.isdecimal() and os.getppid() != int(parent):
        os._exit(1)


def step_back() -> None:
    """Low priority, no core dumps, and the first to be killed when the machine has no memory left."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)


def limit_memory(limit_bytes: int) -> None:
    """Has the kernel refuse more memory than that; 0: as much as there is.

    RLIMIT_DATA, not RLIMIT_AS: frameworks reserve many gigabytes of address space that they never touch, which
    RLIMIT_AS would count and RLIMIT_DATA, which counts private writable memory, does not. That is still more than
    what is resident, so `UNTOUCHED_BYTES` are left above.
    """
    soften(resource.RLIMIT_DATA, limit_bytes + UNTOUCHED_BYTES if limit_bytes else 0)


def soften(which: int, value: int) -> None:
    """Sets a soft limit; 0: as high as is allowed."""
    hard = resource.getrlimit(which)[1]
    wanted = value or resource.RLIM_INFINITY
    if hard != resource.RLIM_INFINITY:
        wanted = hard if wanted == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(which, (wanted, hard))


def bound(command: Sequence[str]) -> list[str]:
    """The command to start `command` with, so that it dies with us; start it with `worker_environment()`.

    For programs that do not call `die_with_parent` themselves: this module does, and becomes the program.
    """
    return [sys.executable, "-P", "-m", "edge_client.process", *command]


def serve(work: Callable[[Path, Report], None]) -> NoReturn:
    """The life of a worker: `work(job file, report)`, then exit 0, or 1 after an error line.

    Our own errors are subclasses of ValueError with a message for the reader; for anything else, a bare
    ValueError included, the traceback goes to standard error as well.
    """
    die_with_parent()
    report = reporter(own_stdout())
    if len(sys.argv) != 2:
        report(error=f"expected one argument, the job file, got {len(sys.argv) - 1}")
        raise SystemExit(2)
    try:
        work(Path(sys.argv[1]), report)
    except Exception as error:
        ours = isinstance(error, ValueError) and type(error) is not ValueError
        if not ours:
            traceback.print_exc()
        report(error=str(error) if ours else f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    raise SystemExit(0)


def reporter(stream: TextIO) -> Report:
    """A `Report` that writes to `stream`, each line in one call, so that two processes can share a pipe."""

    def report(**fields: object) -> None:
        stream.write(json.dumps(fields) + "\n")
        stream.flush()

    return report


def own_stdout() -> TextIO:
    """Standard output for us alone; what libraries print there, from C too, goes to standard error instead."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
