"""`release_library_pages` takes what libraries only read while they were imported, and nothing that a process has written."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from edge_client.processes import unneeded_memory

PREPARED = """
import json, os
import numpy as np, numpy.linalg, ssl, sqlite3, lzma
from edge_client.processes.unneeded_memory import release_library_pages

def memory():
    totals, read_only, writable = {"Rss": 0, "Anonymous": 0}, 0, True
    for line in open("/proc/self/smaps"):
        first, *fields = line.split()
        if not first.endswith(":"):
            writable = "w" in fields[0]
        elif first[:-1] in totals:
            totals[first[:-1]] += int(fields[0])
            read_only += int(fields[0]) if first == "Anonymous:" and not writable else 0
    return {"files": totals["Rss"] - totals["Anonymous"], "relocated": read_only}

def answer():
    x = np.random.default_rng(0).random((60, 60))
    error = float(np.abs(x @ np.linalg.inv(x) - np.eye(60)).max())
    digest = ssl.OPENSSL_VERSION, sqlite3.connect(":memory:").execute("select 6 * 7").fetchone()[0]
    return error < 1e-8 and digest[1] == 42 and lzma.decompress(lzma.compress(b"abc" * 99)) == b"abc" * 99

before = memory()
release_library_pages()
after = memory()
if not (child := os.fork()):
    os._exit(0 if answer() else 1)
print(json.dumps({"before": before, "after": after, "child": os.waitpid(child, 0)[1], "answers": answer(), "used": memory()}))
"""


@pytest.fixture(scope="module")
def prepared() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PREPARED],
        cwd=Path(__file__).parents[2],
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_the_import_of_libraries_has_read_leaves_memory(prepared: dict[str, Any]) -> None:
    assert prepared["before"]["files"] > 12_000, "kB: the interpreter and NumPy have more"
    assert prepared["after"]["files"] < prepared["before"]["files"] / 2


def test_pages_with_relocated_addresses_stay(prepared: dict[str, Any]) -> None:
    assert prepared["before"]["relocated"] > 100, "kB: the tables of addresses of these libraries"
    assert prepared["after"]["relocated"] == prepared["before"]["relocated"]


def test_libraries_compute_as_before_also_in_a_fork(prepared: dict[str, Any]) -> None:
    assert prepared["answers"]
    assert prepared["child"] == 0
    assert prepared["used"]["files"] > prepared["after"]["files"], "what is used comes back"


def _mapping(address: int, rights: str, name: str, **kilobytes: int) -> str:
    numbers = {
        "Size": 64,
        "Rss": 8,
        "Pss": 8,
        "Anonymous": 0,
        "LazyFree": 0,
        "Swap": 0,
        "SwapPss": 0,
    } | kilobytes
    lines = [f"{address:x}-{address + 0x10000:x} {rights} 00001000 fe:00 123 {name}"]
    return "\n".join(
        [*lines, *(f"{key}: {value} kB" for key, value in numbers.items()), "VmFlags: rd ex mr", ""]
    )


def test_only_mappings_of_files_without_pages_of_ones_own_are_taken(tmp_path: Path) -> None:
    mappings = (
        _mapping(0x10000, "r-xp", "/lib/a b.so"),
        _mapping(0x20000, "rw-p", "/lib/a b.so"),
        _mapping(0x30000, "r--p", "/lib/a b.so", Anonymous=4),
        _mapping(0x40000, "r--p", "/lib/a b.so", Swap=4),
        _mapping(0x50000, "r--p", "/lib/c.so (deleted)", Rss=64),
        _mapping(0x60000, "r--p", "/lib/d.so", Rss=0),
        _mapping(0x70000, "r--p", ""),
        _mapping(0x80000, "r-xp", "[vdso]"),
        _mapping(0x90000, "r--s", "/dev/zero"),
    )
    (tmp_path / "smaps").write_text("".join(mappings))
    assert list(unneeded_memory.unwritten(tmp_path / "smaps")) == [
        (0x10000, 0x10000, 8192),
        (0x50000, 0x10000, 65536),
    ]


def test_a_process_with_several_threads_keeps_its_pages() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert unneeded_memory.release_library_pages() == 0
    finally:
        end.set()
        thread.join()


def test_without_a_list_of_mappings_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unneeded_memory, "MAPPINGS", tmp_path / "none")
    assert unneeded_memory.release_library_pages() == 0
