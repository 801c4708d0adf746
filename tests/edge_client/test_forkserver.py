"""Workers forked from one process that has imported what they need."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from edge_client.processes.forkserver import ForkServer

# Each says in the log that it is imported.
HEAVY = "print('heavy is imported', flush=True)\n"
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
CHILD = """
import os, sys, time
from edge_client.processes.process import die_with_parent

die_with_parent()
assert __name__ == "__main__" and "heavy" in sys.modules
print("said", *sys.argv[1:-1], flush=True)
os.write(int(sys.argv[-1]), b"x")
if sys.argv[1] == "waits":
    time.sleep(600)
sys.exit(3)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in (("heavy", HEAVY), ("threaded", THREADED), ("child", CHILD)):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_workers_share_what_was_imported_once_and_end_each_in_its_own_way(modules: Path) -> None:
    read, write = os.pipe()
    log = modules / "log"
    with log.open("ab") as file, ForkServer(["heavy"], file.fileno()) as server:
        first = server.start("child", "a", "b", output=file.fileno(), inherit=[write])
        second = server.start("child", "waits", output=file.fileno(), inherit=[write])
        os.close(write)
        assert first.wait() == 3
        assert len(os.read(read, 1)) == 1  # of one; of the other too once it has said so
        second.kill()
        assert second.wait() == -signal.SIGKILL
        assert (first.wait(), second.wait()) == (3, -signal.SIGKILL)
    os.close(read)
    lines = log.read_text().splitlines()
    assert lines.count("heavy is imported") == 1
    assert "said a b" in lines


def test_a_fork_server_that_is_left_ends_its_workers(modules: Path) -> None:
    read, write = os.pipe()
    with (modules / "log").open("ab") as file, ForkServer(["heavy"], file.fileno()) as server:
        server.start("child", "waits", output=file.fileno(), inherit=[write])
        os.close(write)
        assert os.read(read, 1) == b"x"
    assert os.read(read, 1) == b""  # nobody has the other end any more
    os.close(read)


def test_nothing_is_forked_where_an_import_has_started_a_thread(modules: Path) -> None:
    log = modules / "log"
    with log.open("ab") as file, ForkServer(["heavy", "threaded"], file.fileno()) as server:
        assert server.start("child", "a", output=file.fileno()).wait() == 1
    assert "an imported module has started threads" in log.read_text()
