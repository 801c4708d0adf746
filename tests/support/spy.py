"""A user's code that is after the coordinator's secrets: a program, and a model and a data set of the same module.

`attempts(home)` tries everything and tells what it got; run as a program, it prints that. Standard library only, because
it is copied into the folder of a user's code.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECRET = "hunter2"
"""In values of the coordinator's environment."""
FILES = ("admin.token", "fedloop.db", "pki/ca.key", "pki/ca.pem", "pki/server.key", "serve.json", ".lock")
"""In a coordinator's home."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def attempts(home: Path, coordinator: int, address: str) -> dict[str, Any]:
    """What is had of the coordinator with this home, process id and `host:port`: name of the attempt -> a summary of it."""
    own = Path(os.environ["TMPDIR"])
    host, _, port = address.rpartition(":")
    process = Path("/proc") / str(coordinator)
    tries: dict[str, Callable[[], Any]] = {
        **{f"read {name}": lambda name=name: _read(home / name) for name in FILES},  # type: ignore[misc]
        "list home": lambda: os.listdir(home),  # noqa: PTH208
        "list blobs": lambda: os.listdir(home / "blobs"),  # noqa: PTH208
        "read by folder": lambda: _by_folder(home),
        "read in a child": lambda: subprocess.check_output(["cat", home / "admin.token"], stderr=-3),
        "read in a thread": lambda: _in_thread(home / "admin.token"),
        "read users": lambda: _read(Path("/etc/shadow")),
        "environment": lambda: [name for name, value in os.environ.items() if SECRET in value],
        "its environment": lambda: _read(process / "environ"),
        "its command": lambda: _read(process / "cmdline"),
        "its memory": lambda: (process / "mem").open("rb"),
        "its files": lambda: os.listdir(process / "fd"),  # noqa: PTH208
        "attach": lambda: _call(_LIBC.ptrace, 0x4206, coordinator, 0, 0),
        "signal": lambda: os.kill(coordinator, 0) or "sent",
        "limits": lambda: _limits(coordinator),
        "open files": lambda: _open_files(home),
        "listening sockets": _listening,
        "connect": lambda: socket.create_connection((host, int(port)), 5),
        "datagram": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "unix socket": lambda: socket.socket(socket.AF_UNIX),
        "datagram pair": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
        "ring": lambda: _call(_LIBC.syscall, 425, 4, ctypes.create_string_buffer(120)),
        "write": lambda: (home / "written").write_text("x"),
        "truncate": lambda: os.truncate(home / "serve.json", 1) or "cut",
        "open to others": lambda: (home / "serve.json").chmod(0o666) or "changed",
        "rename": lambda: (home / "serve.json").rename(home / "serve.json") and "renamed",
        "link": lambda: (own / "link").symlink_to(home / "admin.token") or "made",
        "hard link": lambda: os.link(home / "admin.token", own / "hard") or "made",
        "pipe": lambda: os.mkfifo(own / "pipe") or "made",
        "mount": lambda: _mount(home, own),
    }
    return {name: summary for name, attempt in tries.items() if (summary := _glimpse(attempt))}


def build(
    input_shape: Any, classes: int, at: str = "", home: str = "", address: str = "", width: int = 8
) -> Any:
    """A model; in the process `at`, a worker or the one that exports, the attack instead, told as an error."""
    from torch import nn

    main = sys.modules["__main__"].__spec__
    if main is not None and at and main.name.endswith(at):
        got = sorted(attempts(Path(home), os.getppid(), address))
        raise RuntimeError(f"got {got}, can {abilities()}")
    inner = 1
    for extent in input_shape:
        inner *= extent
    return nn.Sequential(nn.Flatten(), nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, classes))


def abilities() -> list[str]:
    """What honest code needs."""
    own = Path(os.environ["TMPDIR"])
    tries: dict[str, Callable[[], Any]] = {
        "write": lambda: (own / "mine").write_text("x"),
        "replace": lambda: (own / "mine").replace(own / "other"),
        "read": lambda: _read(own / "other"),
        "import": lambda: __import__("sqlite3") and "imported",
        "start": lambda: subprocess.check_output([sys.executable, "-c", "print('up')"]),
        "random": lambda: _read(Path("/dev/urandom"), 8),
        "threads": lambda: _in_thread(own / "other"),
    }
    return [name for name, attempt in tries.items() if _glimpse(attempt)]


def _glimpse(attempt: Callable[[], Any]) -> str:
    try:
        return str(attempt() or "")[:40]
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""


def _read(path: Path, count: int = 40) -> bytes:
    with path.open("rb") as file:
        return file.read(count) or b"empty"


def _by_folder(home: Path) -> bytes:
    folder = os.open(home, os.O_PATH | os.O_DIRECTORY)
    try:
        with os.fdopen(os.open("admin.token", os.O_RDONLY, dir_fd=folder), "rb") as file:
            return file.read()
    finally:
        os.close(folder)


def _in_thread(path: Path) -> bytes:
    found: list[bytes] = []

    def work() -> None:
        try:
            found.append(_read(path))
        except OSError:
            found.append(b"")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def _open_files(home: Path) -> list[str]:
    """Open files that are the coordinator's."""
    own = Path(os.environ["TMPDIR"]).parent
    targets = [
        str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3, 100) if _is_open(number)
    ]
    return [
        each for each in targets if Path(each).is_relative_to(home) and not Path(each).is_relative_to(own)
    ]


def _listening() -> list[int]:
    """Open sockets that take connections."""
    found = []
    for number in filter(_is_open, range(3, 100)):
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.append(number)
    return found


def _is_open(number: int) -> bool:
    try:
        return bool(os.fstat(number))
    except OSError:
        return False


def _limits(process: int) -> Any:
    import resource

    return resource.prlimit(process, resource.RLIMIT_NOFILE)


def _call(function: Any, *arguments: Any) -> str:
    return "done" if function(*arguments) >= 0 else ""


def _mount(home: Path, own: Path) -> str:
    """Home under another name, in a namespace of its own."""
    (own / "seen").mkdir(exist_ok=True)
    new_user, new_mount, bind = 0x10000000, 0x00020000, 4096
    pid = os.fork()
    if not pid:
        mounted = not _LIBC.unshare(new_user | new_mount) and not _LIBC.mount(
            str(home).encode(), str(own / "seen").encode(), None, bind, None
        )
        os._exit(0 if mounted else 1)
    return "" if os.waitpid(pid, 0)[1] else "mounted"


if __name__ == "__main__":
    home, coordinator, address = sys.argv[1:]
    sys.stdout.write(json.dumps({"got": attempts(Path(home), int(coordinator), address), "can": abilities()}))
