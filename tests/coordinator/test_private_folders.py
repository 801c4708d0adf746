"""Private folders: for one user alone, gone when the work is done, and after a SIGKILL with the next one."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.storage.private_folders import PREFIX, private_folder

HOLDER = """
import sys, time
from coordinator.storage.private_folders import private_folder
with private_folder() as folder:
    (folder / "rows.npy").write_bytes(b"rows")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def held() -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a private folder until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def ended(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_it_is_for_its_user_alone_and_goes_when_done(root: Path) -> None:
    with private_folder() as folder:
        assert folder.parent == root
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "deep").mkdir()
        (folder / "deep" / "rows.npy").touch()
    assert list(root.iterdir()) == []


def test_it_goes_when_the_work_fails(root: Path) -> None:
    with pytest.raises(RuntimeError), private_folder() as folder:
        (folder / "rows.npy").touch()
        raise RuntimeError
    assert list(root.iterdir()) == []


def test_files_of_a_killed_process_are_removed_by_the_next(root: Path) -> None:
    process, left = held()
    process.send_signal(signal.SIGKILL)
    ended(process)
    assert (left / "rows.npy").exists()

    with private_folder() as folder:
        assert list(root.iterdir()) == [folder]


def test_files_of_a_living_process_stay(root: Path) -> None:
    process, other = held()
    with private_folder():
        assert (other / "rows.npy").exists()
    assert (other / "rows.npy").exists()

    ended(process)
    assert list(root.iterdir()) == []


def test_links_and_files_of_that_name_stay(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").touch()
    (root / f"{PREFIX}link").symlink_to(elsewhere)
    (root / f"{PREFIX}file").touch()

    with private_folder():
        pass

    assert (elsewhere / "kept").exists()
    assert {path.name for path in root.iterdir()} == {f"{PREFIX}link", f"{PREFIX}file"}
