"""Blobs and durable writes: whole or not at all, named by what they hold."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from coordinator.storage.blobs import (
    GRACE_SECONDS,
    BlobDamaged,
    Blobs,
)
from edge_client.files import write_durably
from edge_client.wire import arrays


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_blob_is_named_by_its_hash_and_read_back(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    digest = blobs.put(b"hello")
    assert digest == hashlib.sha256(b"hello").hexdigest()
    assert blobs.require_intact(digest).read_bytes() == b"hello"
    assert Blobs(tmp_path / "blobs").require_intact(digest).read_bytes() == b"hello"


def test_equal_bytes_are_stored_once(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    first = blobs.put(b"same")
    written = (tmp_path / first).stat().st_ino
    assert blobs.put(b"same") == first
    assert (tmp_path / first).stat().st_ino == written
    assert [path.name for path in tmp_path.iterdir()] == [first]


def test_a_changed_blob_is_damaged_and_named(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    digest = blobs.put(b"hello")
    (tmp_path / digest).write_bytes(b"hellp")
    with pytest.raises(BlobDamaged, match=f"{tmp_path / digest} does not hold what its name says"):
        blobs.require_intact(digest)


def test_a_missing_blob_is_damaged_and_named(tmp_path: Path) -> None:
    with pytest.raises(BlobDamaged, match=f"{tmp_path / ('0' * 64)} is missing"):
        Blobs(tmp_path).require_intact("0" * 64)


def test_files_that_are_not_kept_are_removed(tmp_path: Path) -> None:
    kept, other = Blobs(tmp_path).put(b"kept"), Blobs(tmp_path).put(b"other")
    Blobs(tmp_path).keep_only({kept})
    assert names(tmp_path) == {kept}
    assert other != kept


def test_half_written_files_of_a_crash_are_removed_once_nobody_can_be_writing_them(tmp_path: Path) -> None:
    old, new = tmp_path / ".arrays.123.123.tmp", tmp_path / ".arrays.124.124.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - GRACE_SECONDS - 60,) * 2)
    Blobs(tmp_path).keep_only(())
    assert names(tmp_path) == {new.name}


def test_a_blob_stored_for_a_row_to_come_is_not_removed_before_the_row_can_be_there(tmp_path: Path) -> None:
    """Another run commits, and sweeps, between this one's blob and its transaction."""
    now = 0.0
    blobs = Blobs(tmp_path, monotonic=lambda: now)
    ours, theirs = blobs.put(b"ours"), blobs.put(b"theirs")
    blobs.keep_only({theirs})
    assert names(tmp_path) == {ours, theirs}
    blobs.keep_only({ours, theirs})  # now a row names it
    blobs.keep_only({theirs})  # and now no more
    assert names(tmp_path) == {theirs}

    forgotten = blobs.put(b"forgotten")
    now = GRACE_SECONDS
    blobs.keep_only({theirs})
    assert names(tmp_path) == {theirs}
    assert forgotten not in names(tmp_path)


def test_blobs_removed_by_name_are_gone_at_once_unless_held(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    gone, held = blobs.put(b"gone"), blobs.put(b"held")
    with blobs.held(held):
        blobs.remove({gone, held, "0" * 64})
    assert names(tmp_path) == {held}


PARAMS = {"fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "scale": np.array(2, np.float32)}


def test_arrays_are_stored_as_they_are_encoded_and_read_one_by_one(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    info = blobs.put_arrays(PARAMS, {"round": 3})
    payload = arrays.encode(PARAMS, {"round": 3})
    assert (info.sha256, info.size_bytes) == (arrays.sha256(payload), len(payload))
    assert blobs.require_intact(info.sha256).read_bytes() == payload
    stored = blobs.open_arrays(info.sha256)
    assert stored.header.values == {"round": 3}
    assert {name: value.tobytes() for name, value in stored.items()} == {
        name: value.tobytes() for name, value in PARAMS.items()
    }


def test_arrays_read_from_a_blob_are_put_back_without_a_write(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    stored = blobs.open_arrays(blobs.put_arrays(PARAMS).sha256)
    (written,) = tmp_path.iterdir()
    before = written.stat()
    assert blobs.put_arrays(stored).sha256 == written.name
    assert (written.stat().st_ino, written.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert blobs.put_arrays(stored, {"round": 3}).sha256 != written.name


def test_damaged_arrays_are_named(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    info = blobs.put_arrays(PARAMS)
    content = bytearray(blobs.path(info.sha256).read_bytes())
    content[-1] ^= 1
    blobs.path(info.sha256).write_bytes(content)
    with pytest.raises(BlobDamaged, match="does not hold what its name says"):
        blobs.open_arrays(info.sha256)
    with pytest.raises(BlobDamaged, match="is missing"):
        blobs.open_arrays("0" * 64)
    with pytest.raises(BlobDamaged, match="does not hold arrays"):
        blobs.open_arrays(blobs.put(b"no arrays at all"))


def test_a_failed_write_of_arrays_leaves_nothing(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    with pytest.raises(ValueError, match="tensor 'w' is float64, expected float32"):
        blobs.put_arrays({"a": np.zeros(3, np.float32), "w": np.zeros(3)})
    assert names(tmp_path) == set()


def test_many_threads_may_store_the_same_at_once(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    large = {"w": np.arange(100_000, dtype=np.float32)}
    start = threading.Barrier(8)

    def store(turn: int) -> str:
        start.wait(timeout=30)
        return blobs.put_arrays(large).sha256 if turn % 2 else blobs.put(arrays.encode(large))

    with ThreadPoolExecutor(8) as threads:
        (digest,) = set(threads.map(store, range(8)))
    assert blobs.require_intact(digest).read_bytes() == arrays.encode(large)
    assert names(tmp_path) == {digest}


def test_a_durable_write_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pointer.json"
    write_durably(path, b"one")
    write_durably(path, b"two, and longer")
    assert path.read_bytes() == b"two, and longer"
    assert list(tmp_path.iterdir()) == [path]


# The kernel refuses to let a file of this process grow beyond 4,096 bytes: a disk that fills up midway.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from edge_client.files import write_durably

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_durably(Path(sys.argv[1]), b"x" * 10_000)
except OSError as error:
    sys.exit(f"refused: {error.strerror}")
"""


def test_a_write_that_the_disk_has_no_room_for_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "pointer.json"
    write_durably(path, b"one")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == (1, "refused: File too large")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
