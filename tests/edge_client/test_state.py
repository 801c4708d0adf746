"""The lock of a state folder: one daemon, however many look."""

from __future__ import annotations

import threading
from pathlib import Path

from edge_client.state import daemon_pid, lock


def test_a_daemon_starts_while_others_look_whether_one_runs(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            daemon_pid(tmp_path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(1000):
            file = lock(tmp_path)
            assert file is not None
            file.close()
    finally:
        ended.set()
        looking.join()


def test_a_second_daemon_is_kept_out(tmp_path: Path) -> None:
    first = lock(tmp_path)
    assert first is not None
    assert lock(tmp_path) is None
    assert daemon_pid(tmp_path) is not None
    first.close()
    assert daemon_pid(tmp_path) is None
