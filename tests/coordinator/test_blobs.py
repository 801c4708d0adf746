"""Blobs and durable writes: whole or not at all, named by what they hold."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.blobs import BlobDamaged, Blobs
from edge_client.files import write_durably


def test_a_blob_is_named_by_its_hash_and_read_back(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    digest = blobs.put(b"hello")
    assert digest == hashlib.sha256(b"hello").hexdigest()
    assert blobs.get(digest) == b"hello"
    assert Blobs(tmp_path / "blobs").get(digest) == b"hello"


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
        blobs.get(digest)


def test_a_missing_blob_is_damaged_and_named(tmp_path: Path) -> None:
    with pytest.raises(BlobDamaged, match=f"{tmp_path / ('0' * 64)} is missing"):
        Blobs(tmp_path).get("0" * 64)


def test_what_is_not_kept_goes_and_what_a_crash_left_too(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    kept, other = blobs.put(b"kept"), blobs.put(b"other")
    (tmp_path / f"{other}.12345.tmp").write_bytes(b"half")
    blobs.keep_only({kept})
    assert [path.name for path in tmp_path.iterdir()] == [kept]


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
