"""Empty databases of the kinds that a coordinator uses. A test that takes `database_url` or `database` runs on each.

PostgreSQL is a cluster of this test process alone: made at the first use in a folder of its own, served on a unix
socket there and a free loopback port, with fsync on. Run as root it belongs to an unprivileged user, which is what
PostgreSQL demands. The kernel ends it should this process be killed, and the next one sweeps its folder.
"""

from __future__ import annotations

import atexit
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psycopg
import pytest

from coordinator.db.migrations import migrate
from coordinator.db.store import Database
from tests.support.require import require

_PREFIX = "fedloop-postgres-"


@dataclass(frozen=True)
class Cluster:
    """A running PostgreSQL server."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    free: list[str] = field(default_factory=list)

    def url(self, database: str) -> str:
        return f"postgresql://tester@127.0.0.1:{self.port}/{database}"

    def create(self) -> str:
        """The URL of an empty database."""
        if self.free:
            return self.free.pop()
        name = f"t{uuid.uuid4().hex}"
        self._run(f"CREATE DATABASE {name}")
        return self.url(name)

    def drop(self, url: str) -> None:
        """Takes a database back. It is emptied and used again: to make and drop one costs half a second of fsyncs."""
        name = url.rpartition("/")[2]
        self._run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        self._run("DROP SCHEMA public CASCADE; CREATE SCHEMA public", name)
        self.free.append(url)

    def cut_connections(self) -> None:
        """Ends every session from the server's side, as its restart would."""
        self._run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def _run(self, statement: str, database: str = "postgres") -> None:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(statement.encode())


@cache
def postgres() -> Cluster:
    """The cluster of this test process. Skips the calling test where PostgreSQL is not installed."""
    binaries = _binaries()
    folder = _folder()
    account, as_account = _account()
    shutil.chown(folder, account.pw_uid, account.pw_gid)
    data = folder / "data"
    subprocess.run(
        [
            *as_account,
            binaries / "initdb",
            "-D",
            data,
            "-U",
            "tester",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
        ],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    return _started(binaries / "postgres", folder, data, as_account)


def _started(program: Path, folder: Path, data: Path, as_account: list[str]) -> Cluster:
    port = _free_port()
    options = ["-k", str(folder), "-p", str(port), "-h", "127.0.0.1", "-c", "max_connections=50"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*as_account, program, "-D", data, *options, "-c", "shared_buffers=16MB"],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    cluster = Cluster(folder, port, process)
    atexit.register(_stop, cluster)
    _wait_until_it_answers(cluster)
    return cluster


def _stop(cluster: Cluster) -> None:
    cluster.process.terminate()
    try:
        cluster.process.wait(20)
    except subprocess.TimeoutExpired:
        cluster.process.kill()
        cluster.process.wait()
    shutil.rmtree(cluster.folder, ignore_errors=True)


def _wait_until_it_answers(cluster: Cluster) -> None:
    while True:
        try:
            psycopg.connect(cluster.url("postgres"), connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            try:
                cluster.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"PostgreSQL did not start: {(cluster.folder / 'log').read_text()[-2000:]}")


def _binaries() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    if not found:
        require("postgres", "no /usr/lib/postgresql/*/bin/postgres; apt-get install postgresql")
    if shutil.which("setpriv") is None:
        require("postgres", "no setpriv; apt-get install util-linux")
    return found[-1].parent


def _account() -> tuple[pwd.struct_passwd, list[str]]:
    """Who the cluster belongs to, and how to start a program as them that ends when this process does."""
    bound = ["setpriv", "--pdeathsig", "INT"]  # PostgreSQL's fast shutdown
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()), bound
    names = {entry.pw_name for entry in pwd.getpwall()}
    account = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    who = ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--clear-groups"]
    return account, [*bound, *who]


def _folder() -> Path:
    """A new folder outside pytest's, which only its own user may enter; those of dead processes go."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", old.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_tables(url: str) -> None:
    """`migrate`; a new SQLite file is a copy of one that this process migrated, a twentieth of a second less each time."""
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not path.exists():
        path.write_bytes(_migrated_file())
    else:
        migrate(url)


@cache
def _migrated_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fedloop.db"
        migrate(f"sqlite:///{path}")
        return path.read_bytes()


KINDS = ("sqlite", "postgresql")


def _environment(kind: str) -> Iterator[Mapping[str, str]]:
    if kind == "sqlite":
        yield {}  # in the home
        return
    url = postgres().create()
    yield {"FEDLOOP_DATABASE_URL": url}
    postgres().drop(url)


@pytest.fixture(params=KINDS)
def served_on(request: pytest.FixtureRequest) -> Iterator[Mapping[str, str]]:
    """The environment of a `fedloop serve` on an empty database, once for each kind."""
    yield from _environment(request.param)


@pytest.fixture(scope="module", params=KINDS)
def module_served_on(request: pytest.FixtureRequest) -> Iterator[Mapping[str, str]]:
    """The same for the one coordinator of a module."""
    yield from _environment(request.param)


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database, once for each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/fedloop.db"
        return
    url = postgres().create()
    yield url
    postgres().drop(url)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An open database with all tables, once for each kind."""
    with_tables(database_url)
    opened = Database(database_url)
    yield opened
    opened.close()
