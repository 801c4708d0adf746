"""Worker processes: they die with their parent, report in JSON lines, and fail with one sentence.

A worker is started with the path of a job file. It reports to its parent in JSON objects, one per line, on standard
output: progress, and `{"error": …}` before a failing exit. Everything else that libraries print goes to standard error.
A program that answers one question only is run by `run_once`.
Standard library only, so that any worker may import it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

PARENT_VARIABLE = "FEDLOOP_PARENT_PID"
"""Environment variable in which a parent tells its workers its own process id."""

UNTOUCHED_BYTES = 256 * 1024 * 1024
"""Private memory that libraries reserve without using it, allowed on top of a limit."""

FORK, FORKED = struct.Struct("!i"), struct.Struct("!ii")
"""A request to `serve_forks`, and its answer."""

_NICE = 10
_OOM_SCORE_ADJUSTMENT = "500"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
"""Environment of a worker. Several multi-threaded processes would compete for the cores; oneDNN's rounding depends on the
processor."""

Report = Callable[..., None]
"""Writes its keyword arguments as one JSON line to the parent."""


def worker_environment() -> dict[str, str]:
    """The environment for a worker: ours, with one thread and the parent's process id."""
    return {**os.environ, **ONE_THREAD, PARENT_VARIABLE: str(os.getpid())}


@dataclass(frozen=True)
class Launch:
    """How worker processes are started.

    Attributes:
        prefix: command words of a program that executes the rest of the command, put before a worker's command.
        environment: returns all environment variables of the worker.
    """

    prefix: tuple[str, ...] = ()
    environment: Callable[[], dict[str, str]] = worker_environment

    def command(self, *arguments: str) -> list[str]:
        """The command that starts Python with these arguments, such as `-m MODULE`."""
        # -P keeps the working directory off sys.path: a user's own models.py must not shadow ours.
        return [*self.prefix, sys.executable, "-P", *arguments]


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, even by SIGKILL.

    Not inherited: every process of a tree calls this itself. The parent may end before the call, so it passes its
    process id in `PARENT_VARIABLE`, and a worker with another parent exits at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    parent = os.environ.get(PARENT_VARIABLE, "")
    if parent.isdecimal() and os.getppid() != int(parent):
        os._exit(1)


def prepare_to_fork() -> None:
    """Makes this process one whose forks share what it has imported.

    Raises:
        RuntimeError: an imported module has started a thread.
    """
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("an imported module has started threads; forks would inherit the locks they hold")
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    gc.collect()
    gc.freeze()  # the collector would write to pages that are shared


def serve_forks(control: socket.socket) -> int:
    """Forks a child for each file descriptor that arrives on `control`; what is imported so far is in memory once for all.

    Returns in the children only, with the descriptor. A request is `FORK`: the id of a child that has ended or is to end, or 0,
    along with the descriptor. Its answer is `FORKED`: that child's exit status (negative: killed by this signal), and the
    id of the new one. This process reaps its children and ends with them when `control` closes; if its parent is
    killed, the kernel ends all of them.

    Raises:
        RuntimeError: an imported module has started a thread.
    """
    prepare_to_fork()
    # Whoever asks this process to end closes `control` first. Ended by the signal, it would not reap its children.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    children: set[int] = set()
    while (request := _receive_fork(control)) is not None:
        ended, descriptor = request
        status = _end_child(ended) if ended in children else 0
        children.discard(ended)
        if not (child := os.fork()):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            die_with_parent()
            control.close()
            return descriptor
        os.close(descriptor)
        children.add(child)
        with suppress(OSError):  # closed
            control.sendall(FORKED.pack(status, child))
    for child in children:
        _end_child(child)
    os._exit(0)


def _receive_fork(control: socket.socket) -> tuple[int, int] | None:
    """The next request and its descriptor; None once the socket is closed, possibly with answers that nobody has read."""
    try:
        request, descriptors, _, _ = socket.recv_fds(control, FORK.size, 1)
    except OSError:
        return None
    return (FORK.unpack(request)[0], descriptors[0]) if descriptors else None


def _end_child(child: int) -> int:
    """Kills a child that has not ended, reaps it and returns its exit status."""
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def schedule_as_worker(core: int | None) -> None:
    """Says to the system that this process need not interrupt whoever wakes it, which may have other workers to wake, and on which core
    it runs; None: on any."""
    # The id of a forked process's first thread is still its parent's.
    others = [each.native_id for each in threading.enumerate() if each is not threading.current_thread()]
    for thread in (threading.get_native_id(), *filter(None, others)):
        with suppress(OSError):  # it may be forbidden, which changes no result
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            if core is not None:
                os.sched_setaffinity(thread, {core})


def lower_priority() -> None:
    """Sets low priority, no core dumps, and a high chance to be killed first when the machine is out of memory."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJUSTMENT)


def limit_memory(limit_bytes: int) -> None:
    """Has the kernel refuse more memory than the limit; 0: no limit.

    RLIMIT_DATA, not RLIMIT_AS: frameworks reserve many gigabytes of address space that they never touch, which
    RLIMIT_AS would count and RLIMIT_DATA, which counts private writable memory, does not. That is still more than
    the resident memory, so `UNTOUCHED_BYTES` are left above.
    """
    set_soft_limit(resource.RLIMIT_DATA, limit_bytes + UNTOUCHED_BYTES if limit_bytes else 0)


def set_soft_limit(which: int, value: int) -> None:
    """Sets a soft limit; 0: as high as allowed."""
    hard = resource.getrlimit(which)[1]
    soft = value or resource.RLIM_INFINITY
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(which, (soft, hard))


def resident_bytes() -> int:
    """Resident memory of this process now; resets the peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def peak_bytes() -> int:
    """Peak resident memory of this process since the last call of `resident_bytes`, or its start.

    Not `ru_maxrss`: it is inherited from the process that started this one.
    """
    return _memory("VmHWM")


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def tie_to_parent(command: Sequence[str]) -> list[str]:
    """`command` wrapped so that it dies with this process; start it with `worker_environment()`.

    For programs that do not call `die_with_parent` themselves: this module calls it and executes the program.
    """
    return [sys.executable, "-P", "-m", "edge_client.processes.process", *command]


class ProcessFailed(Exception):
    """A program ended without an answer; the message says how, in one line.

    Attributes:
        status: its exit status; negative: killed by this signal; None: stopped because it took too long.
        output: what it wrote to standard error.
    """

    def __init__(self, message: str, status: int | None, output: str) -> None:
        super().__init__(message)
        self.status = status
        self.output = output


def run_once(
    command: Sequence[str],
    seconds: float,
    *,
    document: object = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The answer of a program: the last line of its standard output, a JSON object.

    Args:
        document: sent as JSON to its standard input; paths as text.
        folder: its working directory, by default ours.
        environment: all its variables, by default `worker_environment()`.

    Raises:
        ProcessFailed: it gave no answer within `seconds`.
    """
    try:
        done = subprocess.run(
            command,
            input=json.dumps(document, default=str),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            cwd=folder,
            env=worker_environment() if environment is None else environment,
        )
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"it did not finish within {seconds:g} s", None, "") from None
    with suppress(ValueError, IndexError):
        answer = json.loads(done.stdout.splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:300]
    end = f"ended with status {done.returncode}"
    if done.returncode < 0:
        end = f"crashed ({signal.Signals(-done.returncode).name})"
    raise ProcessFailed(f"it {end}: {last}", done.returncode, done.stderr)


Work = Callable[[Path, Report], None]
"""What a worker does with a job file."""

FROM_INPUT = "-"
"""In place of a job file: jobs come over standard input, see `serve`."""


def serve(work: Work, first: Mapping[str, Work] | None = None) -> NoReturn:
    """Runs a worker: `work(job file, report)`, then exits with 0, or with 1 after an error line.

    With `FROM_INPUT` for the job file, it runs the jobs that `run_from_input` reads; `first` are other kinds of work.

    Our own errors are subclasses of ValueError with a message for people; for any other error, a bare ValueError
    included, the traceback goes to standard error as well.
    """
    die_with_parent()
    report = reporter(own_stdout())
    if len(sys.argv) != 2:
        report(error=f"expected one argument, the job file, got {len(sys.argv) - 1}")
        raise SystemExit(2)
    if sys.argv[1] != FROM_INPUT:
        raise SystemExit(_run(work, Path(sys.argv[1]), report))
    raise SystemExit(run_from_input({"": work, **(first or {})}, report))


def run_from_input(works: Mapping[str, Work], report: Report) -> int:
    """Runs the jobs that standard input names, for a worker that has imported its modules before there was a job.

    A line is a key of `works`, a space, and a job file. Each job ends with a report of its exit status, `ended`. Returns the
    last one when standard input is closed.
    """
    status = 0
    for line in sys.stdin:
        kind, _, path = line.rstrip("\n").partition(" ")
        status = _run(works[kind], Path(path), report)
        report(ended=status)
    return status


def _run(work: Work, path: Path, report: Report) -> int:
    """The exit status of a job."""
    try:
        work(path, report)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        ours = isinstance(error, ValueError) and type(error) is not ValueError
        if not ours:
            traceback.print_exc()
        report(error=str(error) if ours else f"{type(error).__name__}: {error}")
        return 1
    return 0


def reporter(stream: TextIO) -> Report:
    """A `Report` that writes each line to `stream` in one call, so that two processes can share a pipe."""

    def report(**fields: object) -> None:
        stream.write(json.dumps(fields) + "\n")
        stream.flush()

    return report


def own_stdout() -> TextIO:
    """Standard output reserved for reports; what libraries print there, from C too, goes to standard error."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
