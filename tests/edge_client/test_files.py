"""Folders that outlast a power cut, and files that are read only where they are files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest

from edge_client import files


def test_every_folder_above_that_was_missing_is_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def refusal(path: Path, **more: int) -> str:
    with pytest.raises(OSError, match=r".") as raised:
        files.read_regular(path, **more)
    return str(raised.value.strerror)


def test_only_regular_files_up_to_a_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert files.read_regular(tmp_path / "file", 3) == files.read_regular(tmp_path / "link") == b"abc"
    assert refusal(tmp_path / "file", limit_bytes=2) == "it has 3 bytes, expected at most 2"
    assert refusal(tmp_path / "pipe") == "it is a pipe, expected a regular file"
    assert refusal(tmp_path) == "it is a folder, expected a regular file"
    assert refusal(Path("/dev/zero")) == "it is a device, expected a regular file"
    assert refusal(tmp_path / "none") == "No such file or directory"


def opened(path: Path, folder: Path) -> bytes:
    with files.open_beneath(path, [folder]) as file:
        return files.read_all(file)


def test_a_file_beneath_a_folder_is_read_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_bytes(b"in")
    (folder / "within").symlink_to(folder / "a" / "b")
    (tmp_path / "file").write_bytes(b"out")
    (folder / "out").symlink_to(tmp_path)
    (tmp_path / "data2").mkdir()
    (tmp_path / "data2" / "file").write_bytes(b"out")

    assert opened(folder / "a" / "b" / "file", folder) == opened(folder / "within" / "file", folder) == b"in"
    outside = ("../file", "out/file", "out/data2/file", "a/../../file", "../data2/file")
    for path in (*(folder / each for each in outside), Path("/dev/zero")):
        assert not files.is_beneath(path, [folder])
        with pytest.raises(PermissionError):
            files.open_beneath(path, [folder])
    for path in (folder, folder / "a"):
        with pytest.raises(OSError, match="it is a folder"):
            files.open_beneath(path, [folder])


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("data/sub", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "file").write_bytes(place.encode())
    find = files._folder_of

    def swapped(real: Path, folders: Iterable[Path]) -> Path | None:
        found = find(real, folders)
        (tmp_path / "data" / "sub").rename(tmp_path / "data" / "moved")
        (tmp_path / "data" / "sub").symlink_to(tmp_path / "elsewhere")
        return found

    monkeypatch.setattr(files, "_folder_of", swapped)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        files.open_beneath(tmp_path / "data" / "sub" / "file", [tmp_path / "data"])
