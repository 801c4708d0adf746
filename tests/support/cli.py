"""The `fedloop` command as a user runs it: real processes, their exit codes, and what they leave behind.

Every process of a run bears a mark of its own (`tests.support.processes`). LiteRT conversions are kept between
test runs, in one folder for all tests.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from coordinator.commands import cli
from tests.support.processes import HANGS_SECONDS, Marked, pidfd, pids, read_proc

FEDLOOP = Path(sys.executable).parent / "fedloop"
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "conversions"
_MARK = "FEDLOOP_TEST_RUN"
_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")
_OTHERS = ("faketime", "sem.mp-")
"""Names that another test may leave at the same time: under a shifted clock, and of a pretraining that is killed whole."""


def run_cli(
    *args: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A whole `fedloop` command. `env` is added to the tests' own environment."""
    return subprocess.run(
        [FEDLOOP, *args],
        cwd=cwd,
        env=_environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        check=False,
    )


def run_here(
    *args: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in this process, which spares a second: for what the command refuses before it starts anything."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(sys, "argv", [str(FEDLOOP), *map(str, args)])
        for name, value in _environment(env).items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
    return subprocess.CompletedProcess(list(args), code, out.getvalue(), errors.getvalue())


def simulate(
    out: Path, sets: Sequence[str] = (), *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The report of `fedloop simulate --out OUT --set …`, which must end well."""
    done = run_cli("simulate", "--out", out, *options(sets), cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return report_of(out)


def options(sets: Sequence[str]) -> list[str]:
    """`["--set", "a=1", …]`."""
    return [part for each in sets for part in ("--set", each)]


def report_of(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "report.json").read_text("utf-8"))
    return document


def assert_refused(done: subprocess.CompletedProcess[str], *arguments: str) -> None:
    """Exit code 2 and one message for a person, which has all of `words`."""
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout == ""
    missing = [word for word in arguments if word not in done.stderr]
    assert not missing, (missing, done.stderr)


@dataclass(frozen=True)
class Started:
    """A running command, leader of a process group of its own."""

    process: subprocess.Popen[bytes]
    marked: Marked
    _errors: IO[bytes]

    def reaches(self, condition: Callable[[], bool]) -> bool:
        """Waits for a condition; False when the command ended before it held."""
        with pidfd(self.process.pid) as ended:
            while not condition():
                if ended.poll(5):
                    return False
        return True

    def send(self, number: signal.Signals) -> None:
        """A signal to the command itself."""
        self.process.send_signal(number)

    def send_group(self, number: signal.Signals) -> None:
        """A signal to all in its process group, as a terminal sends it, or whoever kills a job."""
        os.killpg(self.process.pid, number)

    def ended(self) -> int:
        """The exit code, once the command is done."""
        return self.process.wait(HANGS_SECONDS)

    def errors(self) -> str:
        """What it has said on standard error."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def alive(self) -> list[str]:
        """Command lines of all living processes of this run, the command's own among them."""
        return self.marked.alive()

    def pids_of(self, message: str) -> list[int]:
        """Its living processes with `words` in their command lines, the oldest first."""
        return self.marked.pids_of(message)

    def all_gone(self) -> bool:
        """Waits until no process of this run is left; False where one stays for good."""
        return self.marked.all_gone()


@contextmanager
def started(
    *args: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    output: Path = Path(os.devnull),
) -> Iterator[Started]:
    """A `fedloop` command in the background, with its standard output in `output`; whatever of it still runs at the end is killed."""
    marked = Marked(_MARK, uuid.uuid4().hex)
    with tempfile.TemporaryFile() as errors, output.open("wb") as written:
        process = subprocess.Popen(
            [FEDLOOP, *args],
            cwd=cwd,
            env=_environment(env) | marked.environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=errors,
            start_new_session=True,
        )
        run = Started(process, marked, errors)
        try:
            yield run
        finally:
            if process.poll() is None:
                run.send_group(signal.SIGKILL)
                process.wait()


@contextmanager
def no_shared_memory_left() -> Iterator[None]:
    """What appears in /dev/shm meanwhile and stays without any process that holds it was leaked."""
    before = _shared_memory()
    yield
    left = _shared_memory() - before
    # Looked at twice: a semaphore of whoever runs at the same time has its name for an instant only.
    leaked = (left - _held()) & _shared_memory() if left else set()
    assert not leaked, leaked


def _shared_memory() -> set[str]:
    names = {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()
    return {name for name in names if not any(mark in name for mark in _OTHERS)}


def _held() -> set[str]:
    """Names in /dev/shm that a living process has open or mapped."""
    held = set()
    for pid in pids():
        for line in read_proc(pid, "maps").splitlines():
            held.add(line.rpartition("/dev/shm/")[2].partition("/")[0])
        try:
            targets = [str(path.readlink()) for path in (_PROC / str(pid) / "fd").iterdir()]
        except OSError:
            continue
        held |= {target.removeprefix("/dev/shm/").partition("/")[0] for target in targets}
    return held


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    ours = {"FEDLOOP_CACHE_DIR": str(CACHE), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours, **(extra or {})}
