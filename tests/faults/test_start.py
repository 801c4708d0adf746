"""`fedloop serve` on a full disk, on a database that was damaged or emptied, on a read-only home: words, and exit code 2."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import inspect

from coordinator.db.store import open_engine, require_intact
from coordinator.errors import UserError
from tests.support.cli import assert_refused, run_cli, run_here
from tests.support.databases import database_url, with_tables
from tests.support.small_disk import fill, read_only, small_disk

__all__ = ["database_url"]

PAGE_BYTES = 4096


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of a coordinator whose runs left a blob."""
    blobs = tmp_path / "home" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / ("ab" * 32)).write_bytes(b"a model")
    return tmp_path / "home"


@pytest.fixture
def file(home: Path) -> Iterator[Path]:
    """The SQLite database of that home, with as many pages as one gets in use, all of them written back."""
    path = home / "fedloop.db"
    with_tables(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as connection:
        values = ((f"s{number}", "g" * 200, "2026-01-01 00:00:00") for number in range(500))
        connection.executemany(
            "INSERT INTO serials (serial_number, device_group, added_at) VALUES (?, ?, ?)", values
        )
        connection.commit()
        connection.execute("VACUUM")  # no page is free
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    yield path


def serve(home: Path, url: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {"FEDLOOP_DATABASE_URL": url} if url is not None else None
    command = ("serve", "--home", home, "--operator", "127.0.0.1:0", "--device", "127.0.0.1:0")
    return run_here(*command, env=env)


@pytest.mark.slow
def test_a_full_disk_is_reported(tmp_path: Path, database_url: str) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        fill(disk / "filler")
        url = database_url if database_url.startswith("postgresql") else None
        assert_refused(serve(disk / "home", url), str(disk / "home"), "ENOSPC", "free some space there")


@pytest.mark.slow
@pytest.mark.parametrize("left_bytes", [120_000, 420_000], ids=["for the token", "for the tables"])
def test_so_is_one_without_room_for_everything(tmp_path: Path, left_bytes: int) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        fill(disk / "filler", leave_bytes=left_bytes)
        assert_refused(serve(disk / "home"), str(disk / "home"), "free some space there")


@pytest.mark.slow
def test_a_read_only_home_is_reported(tmp_path: Path, database_url: str) -> None:
    with small_disk(tmp_path / "disk", 1) as disk, read_only(disk):
        url = database_url if database_url.startswith("postgresql") else None
        assert_refused(serve(disk / "home", url), str(disk / "home"), "EROFS", "mount it writable again")


@pytest.mark.slow
def test_a_zeroed_page_is_reported(home: Path, file: Path) -> None:
    zero(file, 20)
    done = run_cli("serve", "--home", home, "--operator", "127.0.0.1:0", "--device", "127.0.0.1:0")
    assert_refused(done, f"{file} is damaged", "restore the database", "nothing was changed")


def test_whichever_page_it_is(home: Path, file: Path) -> None:
    full = file.read_bytes()
    url = f"sqlite:///{file}"
    require_intact(url, home)
    assert len(full) // PAGE_BYTES > 50
    for page in range(len(full) // PAGE_BYTES):
        zero(file, page)
        with pytest.raises(UserError, match=rf"{file} is (damaged|emptied)"):
            require_intact(url, home)
        file.write_bytes(full)
    require_intact(url, home)


@pytest.mark.parametrize("make", [lambda full: b"rubbish" * 1000, lambda full: full[: len(full) // 2]])
def test_another_file_and_half_of_one_are_reported(
    home: Path, file: Path, make: Callable[[bytes], bytes]
) -> None:
    file.write_bytes(make(file.read_bytes()))
    with pytest.raises(UserError, match=rf"{file} is damaged"):
        require_intact(f"sqlite:///{file}", home)


@pytest.mark.slow
def test_an_emptied_database_is_reported_and_not_filled_again(home: Path, database_url: str) -> None:
    emptied = f"sqlite:///{home / 'fedloop.db'}"
    if database_url.startswith("postgresql"):
        emptied = database_url
    else:
        (home / "fedloop.db").touch()
    assert_refused(serve(home, emptied), "has no tables", f"{home}/blobs holds", "move blobs and runs out")
    assert tables_of(emptied) == []


@pytest.mark.parametrize("lose", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_one_that_is_gone_leaves_its_log_alone(home: Path, file: Path, lose: Callable[[Path], None]) -> None:
    """SQLite removes a write-ahead log whose database is empty; what is in it may be all that is left."""
    log = file.with_name("fedloop.db-wal")
    log.write_bytes(b"frames")
    lose(file)
    with pytest.raises(UserError, match="has no tables"):
        require_intact(f"sqlite:///{file}", home)
    assert log.read_bytes() == b"frames"


def test_a_new_home_is_sound(tmp_path: Path, database_url: str) -> None:
    (tmp_path / "new" / "blobs").mkdir(parents=True)
    require_intact(database_url, tmp_path / "new")
    with_tables(database_url)
    (tmp_path / "new" / "blobs" / ("ab" * 32)).touch()
    require_intact(database_url, tmp_path / "new")


def zero(file: Path, page: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(page * PAGE_BYTES)
        opened.write(bytes(PAGE_BYTES))


def tables_of(url: str) -> list[str]:
    engine = open_engine(url)
    with engine.connect() as connection:
        names = inspect(connection).get_table_names()
    engine.dispose()
    return names
