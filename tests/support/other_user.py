"""Programs as another user than root, who reads no file that permissions keep from that user; and a coordinator run so.

Python itself may be installed in root's private home, as pyenv does. Then the program gets a mount namespace of its own, where that
home shows nothing but the installation.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coordinator.demos.local_fleet import Daemon, LocalFleet
from tests.support.require import require

USER = 65533
"""An id without an account and without any file."""
_INSTALLED = (Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2])


def as_other_user(command: Sequence[str]) -> list[str]:
    """`command` with the rights of `USER`; it dies with the thread that starts it."""
    lines = ["set -e"]
    for closed, paths in _closed_folders().items():
        lines.append("mount -t tmpfs -o mode=755 tmpfs /mnt")
        for path in paths:
            shown = shlex.quote(str(Path("/mnt") / path.relative_to(closed)))
            lines += [f"mkdir -p {shown}", f"mount --rbind {shlex.quote(str(path))} {shown}"]
        lines.append(f"mount --move /mnt {shlex.quote(str(closed))}")
    rights = f"--reuid {USER} --regid {USER} --clear-groups --pdeathsig KILL"
    lines.append(f'exec setpriv {rights} "$@"')
    apart = [shutil.which("unshare") or "unshare", "--mount", "--propagation", "private"]
    return [*apart, "sh", "-c", "\n".join(lines), "sh", *command]


def is_closed(folder: Path) -> bool:
    """Whether `USER` cannot read a folder that is there."""
    listed = subprocess.run(as_other_user(["ls", str(folder)]), capture_output=True, text=True, check=False)
    return listed.returncode != 0 and f"'{folder}': Permission denied" in listed.stderr


class OtherUsersFleet(LocalFleet):
    """A fleet whose coordinator is `USER`. Devices and commands remain those of the user who runs the tests."""

    def __post_init__(self) -> None:
        home = self.folder / "coordinator"
        home.mkdir(mode=0o700)
        os.chown(home, USER, USER)
        super().__post_init__()

    def _serve(self, operator: str, device: str) -> Daemon:
        daemon = super()._serve(operator, device)
        daemon.command = as_other_user(daemon.command)
        daemon.environment = {**daemon.environment, "HOME": str(self.home)}
        return daemon


@contextmanager
def other_users_fleet() -> Iterator[OtherUsersFleet]:
    """A fleet in a folder that `USER` can enter, unlike pytest's; its coordinator is not started yet."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare"))):
        require("root", "to start a program as another user needs root, setpriv and unshare")
    tried = subprocess.run(as_other_user([sys.executable, "-V"]), capture_output=True, text=True, check=False)
    if tried.returncode:
        require("root", f"Python cannot be started as another user: {tried.stderr.strip()}")
    with tempfile.TemporaryDirectory(prefix="fedloop-fleet-") as folder:
        Path(folder).chmod(0o755)
        fleet = OtherUsersFleet(Path(folder))
        try:
            yield fleet
        finally:
            fleet.kill()


def _closed_folders() -> dict[Path, list[Path]]:
    """Folders that `USER` may not enter, each with what is installed within."""
    found: dict[Path, list[Path]] = {}
    for path in _INSTALLED:
        ancestors = reversed(path.resolve().parents)
        closed = next((each for each in ancestors if not each.stat().st_mode & 0o001), None)
        if closed is not None:
            found.setdefault(closed, []).append(path.resolve())
    return found
