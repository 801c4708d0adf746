"""Folders that outlast a power cut: whatever names them is synced too."""

from __future__ import annotations

import stat
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
