"""A disk that fills up in the middle of a run: no committed round is lost, and with room again it goes on."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.cli import assert_refused, options, report_of, run_cli, run_here, simulate, started
from tests.support.require import require

pytestmark = pytest.mark.slow

# Enough rounds that the run is still going when the disk is full, also where the test's own process has to wait for a processor.
ROUNDS = 150
SETTINGS = (
    "model.name=logreg",
    "federation.clients=6",
    f"federation.rounds={ROUNDS}",
    "federation.runtimes={torch=1}",
    "local.epochs=1",
    "strategy.name=scaffold",
    "simulation.workers=1",
)


def _has_committed(out: Path) -> bool:
    """Whether a few rounds are over and at least one of them is committed; rounds that are short share a commit."""
    return _size(out / "events.jsonl") > 3000 and (out / "checkpoint" / "checkpoint.json").exists()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of a run with room enough."""
    hashed: str = simulate(tmp_path_factory.mktemp("roomy") / "run", SETTINGS)["final"]["model_sha256"]
    return hashed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        require("mount", f"a file system cannot be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_loses_no_committed_round(small_disk: Path, expected: str) -> None:
    out, filler = small_disk / "run", small_disk / "filler"
    with started("simulate", "--out", out, *options(SETTINGS)) as run:
        assert run.reaches(lambda: _has_committed(out)), run.errors()
        _fill(filler)
        code, errors = run.ended(), run.errors()
    _assert_says_how_to_go_on(code, errors, out, "No space left on device")
    filler.unlink()
    _assert_goes_on(out, expected)


@pytest.mark.extended
@pytest.mark.parametrize("what", ["events", "checkpoint"])
def test_a_file_that_cannot_grow_loses_no_committed_round(tmp_path: Path, expected: str, what: str) -> None:
    out = tmp_path / "run"
    with started("simulate", "--out", out, *options(SETTINGS)) as run:
        assert run.reaches(lambda: _has_committed(out)), run.errors()
        # The model has 2.6 kB: either the events cannot grow any more, or no blob can be written.
        limit = _size(out / "events.jsonl") + 500 if what == "events" else 1000
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        code, errors = run.ended(), run.errors()
    _assert_says_how_to_go_on(code, errors, out, "File too large")
    _assert_goes_on(out, expected)


def test_a_disk_that_is_full_from_the_start_is_reported(small_disk: Path) -> None:
    _fill(small_disk / "filler")
    done = run_here("simulate", "--out", small_disk / "run", *options(SETTINGS))
    assert_refused(done, "No space left on device")


def test_a_disk_too_small_for_the_data_is_reported_with_the_file(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes((8 << 20) - 200_000))
    done = run_cli("simulate", "--out", small_disk / "run", *options(SETTINGS))
    assert_refused(done, "x.npy", "disk full")


def _assert_says_how_to_go_on(code: int, errors: str, out: Path, reason: str) -> None:
    assert code == 1, errors
    assert "Traceback" not in errors
    assert reason in errors
    assert f"fedloop simulate --resume {out}" in errors


def _assert_goes_on(out: Path, expected: str) -> None:
    committed = json.loads((out / "checkpoint" / "checkpoint.json").read_text())["round"]
    assert 1 <= committed < ROUNDS
    done = run_cli("simulate", "--resume", out)
    assert done.returncode == 0, done.stderr
    resumed = [line for line in (out / "events.jsonl").read_text().splitlines() if "run_resumed" in line]
    assert [json.loads(line)["round"] for line in resumed] == [committed]
    report = report_of(out)
    assert report["final"]["model_sha256"] == expected
    assert [row["round"] for row in report["rounds"]] == list(range(1, ROUNDS + 1))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fill(path: Path) -> None:
    """Writes until nothing more fits."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(path.parent).f_bavail == 0
