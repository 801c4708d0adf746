"""The sandbox around a program that wants what is the coordinator's; and the same program without it, which gets it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import UserError
from coordinator.sandbox import enter, policy
from coordinator.settings import Settings
from coordinator.workers.pool import WorkerPool
from tests.coordinator.test_pool import preparing
from tests.support import spy
from tests.support.databases import postgres
from tests.support.require import require

pytestmark = [pytest.mark.slow, pytest.mark.fresh_workers]

ALWAYS = {"write", "replace", "read", "import", "start", "random", "threads"}
"""What honest code can do, confined or not."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A coordinator's home, with what is in one."""
    home = tmp_path / "home"
    for name in spy.FILES:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"secret of {name}")
    (home / "blobs").mkdir()
    (home / "blobs" / "ab").touch()
    return home


@pytest.fixture
def settings(home: Path) -> Settings:
    return Settings(home, f"sqlite:///{home}/fedloop.db")


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def confined() -> None:
    if reason := enter.unavailable_reason():
        require("landlock", reason)


def ran(settings: Settings, *command: str, run: str = "a") -> subprocess.CompletedProcess[str]:
    """Python with these arguments, as a worker of a run is started."""
    launch = policy.launch(settings, settings.home / "runs" / run)
    return subprocess.run(
        launch.command(*command), env=launch.environment(), capture_output=True, text=True, check=False
    )


def spied(settings: Settings, address: str) -> dict[str, Any]:
    """What the spy tells; its code lies with the coordinator's."""
    arguments = (str(settings.home), str(os.getpid()), address)
    done = ran(settings, str(Path(spy.__file__)), *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_confined_process_gets_nothing_of_the_coordinators(
    settings: Settings, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined()
    monkeypatch.setenv("FEDLOOP_DATABASE_URL", f"postgresql://fedloop:{spy.SECRET}@db/fedloop")
    monkeypatch.setenv("PGPASSWORD", spy.SECRET)

    found = spied(settings, address)

    assert found["got"] == {}
    assert set(found["can"]) == ALWAYS


def test_the_same_process_unconfined_gets_it(settings: Settings, address: str) -> None:
    """So that the test above is one of the sandbox and not of the spy."""
    found = spied(replace(settings, no_sandbox=True), address)

    assert set(found["can"]) == ALWAYS
    missed = {"read in a child", "connect", "write", "truncate", "open to others", "link", "datagram"} - set(
        found["got"]
    )
    assert not missed
    assert {f"read {name}" for name in spy.FILES} <= set(found["got"])


CONNECTING = """
import sys, psycopg
for place in sys.argv[1:]:
    try:
        psycopg.connect(place, connect_timeout=5).close()
        print("connected")
    except psycopg.OperationalError:
        print("refused")
"""


def test_a_postgresql_that_trusts_the_coordinators_user_does_not_trust_its_workers(
    settings: Settings,
) -> None:
    confined()
    cluster = postgres()
    places = (
        cluster.url("postgres"),
        f"host={cluster.folder} port={cluster.port} user=tester dbname=postgres",
    )
    for chosen, answer in (
        (replace(settings, no_sandbox=True), "connected"),
        (settings, "refused"),
    ):
        assert ran(chosen, "-c", CONNECTING, *places).stdout.split("\n") == [answer, answer, ""]


READING = "import sys; from pathlib import Path; print(Path(sys.argv[1]).read_text()[:6])"


def reads(settings: Settings, path: Path, run: str = "a") -> bool:
    """Whether a worker of a run can read a file."""
    done = ran(settings, "-c", READING, str(path), run=run)
    assert done.stdout == "secret\n" or "PermissionError" in done.stderr, done.stderr
    return done.stdout == "secret\n"


def with_secret(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("secret")
    return path


def test_a_run_has_its_own_folder_and_no_other(settings: Settings) -> None:
    confined()
    kept = with_secret(settings.home / "runs" / "a" / "kept")
    assert reads(settings, kept, run="a")
    assert not reads(settings, kept, run="b")


def test_data_folders_can_be_read_and_nothing_else_changed_or_reached_from_them(
    settings: Settings, tmp_path: Path
) -> None:
    confined()
    data = with_secret(tmp_path / "data" / "rows.csv")
    (data.parent / "link").symlink_to(with_secret(tmp_path / "elsewhere"))
    given = replace(settings, data_dir=data.parent)

    assert not reads(settings, data)
    assert reads(given, data)
    assert not reads(given, data.parent / "link")
    done = ran(given, "-c", "import sys; open(sys.argv[1], 'a')", str(data))
    assert "PermissionError" in done.stderr


def test_modules_are_read_beside_a_home_that_is_not(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined()
    monkeypatch.chdir(tmp_path)  # holds the home
    beside, below = with_secret(tmp_path / "mine.py"), with_secret(tmp_path / "more" / "own.py")
    allowed = replace(settings, allow_code=("mine:build",))

    assert not reads(settings, beside)
    assert reads(allowed, beside) and reads(allowed, below)
    assert not reads(allowed, with_secret(settings.home / "admin.token"))


def test_a_database_beside_the_modules_is_not_read(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined()
    monkeypatch.chdir(tmp_path)
    files = [with_secret(tmp_path / f"rows.db{ending}") for ending in ("", "-wal", "-journal")]
    allowed = replace(settings, allow_code=("mine:build",), database_url=f"sqlite:///{tmp_path}/rows.db")

    assert not any(reads(allowed, file) for file in files)


def test_a_whole_home_directory_is_never_read(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined()
    person = tmp_path / "person"
    key = with_secret(person / ".ssh" / "id")
    monkeypatch.setenv("HOME", str(person))
    for working_directory in (person, tmp_path):
        monkeypatch.chdir(working_directory)
        assert not reads(replace(settings, allow_code=("mine:build",)), key)


def test_workers_have_no_core_dumps_and_no_more_of_the_environment_than_they_need(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    code = "import json, os, resource; print(json.dumps([resource.getrlimit(resource.RLIMIT_CORE), list(os.environ)]))"
    limits, names = json.loads(ran(settings, "-c", code).stdout)
    assert limits == [0, 0]
    assert "PYTHONPATH" in names and "OMP_NUM_THREADS" in names
    assert not [name for name in names if name.startswith(("AWS_", "PYTEST_", "FEDLOOP_DATABASE"))]


@pytest.mark.parametrize("size", [1, 2], ids=["started", "forked"])
def test_workers_of_a_pool_are_confined_and_run_listed_code_only(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    confined()
    monkeypatch.chdir(tmp_path)
    token = with_secret(settings.home / "admin.token")
    for name in ("mine", "yours"):
        code = f"from pathlib import Path\n\n\ndef load():\n    return Path({str(token)!r}).read_text()\n"
        (tmp_path / f"{name}.py").write_text(code)
    allowed = replace(settings, allow_code=("mine:load",))
    launch = policy.launch(allowed, settings.home / "runs" / "a")
    with WorkerPool(size, tmp_path / "workers.log", launch=launch) as pool:
        with pytest.raises(UserError, match=r"mine:load failed.*PermissionError"):
            pool.run_one(preparing(settings.home / "runs" / "a", dataset="mine:load"))
        for name in ("yours:load", "os:abort", "os:getcwd"):
            with pytest.raises(UserError, match="not among the code that this process may run"):
                pool.run_one(preparing(settings.home / "runs" / "a", dataset=name))


def test_code_is_not_run_without_a_sandbox_unless_insisted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enter, "landlock_version", lambda: 0)
    policy.require(settings)
    allowed = replace(settings, allow_code=("mine:build",))
    with pytest.raises(UserError, match=r"mine:build.*no Landlock.*--no-sandbox"):
        policy.require(allowed)
    policy.require(replace(allowed, no_sandbox=True))
    assert policy.launch(settings, settings.home / "runs" / "a").prefix == ()


def test_modules_in_a_home_directory_are_refused_at_the_start(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    allowed = replace(settings, allow_code=("mine.nets:build",))
    policy.require(allowed)  # an installed package
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="a home directory"):
        policy.require(allowed)


def test_a_home_among_too_many_files_is_refused_at_the_start(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined()
    monkeypatch.chdir(tmp_path)
    for number in range(2000):
        (tmp_path / f"file-{number}").touch()
    policy.require(settings)
    with pytest.raises(UserError, match="among too many files"):
        policy.require(replace(settings, allow_code=("mine:build",)))


def test_data_folders_and_the_coordinators_files_are_apart(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    policy.require(replace(settings, data_dir=tmp_path / "data"))
    for folder in (tmp_path, settings.home, settings.home / "blobs"):
        with pytest.raises(UserError, match="must be outside the coordinator's own files"):
            policy.require(replace(settings, allow_paths=(folder,)))
    with pytest.raises(UserError, match="must be outside"):
        policy.require(replace(settings, ca_key=tmp_path / "data" / "ca.key", data_dir=tmp_path / "data"))
