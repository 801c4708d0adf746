"""SIGKILL while the repository of releases changes: devices see the old state or the new one, and doing it again completes it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata

from coordinator import failpoints
from coordinator.operator import signed_documents
from coordinator.releases import roles
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME
from tests.support.long import extended
from tests.support.signed_releases import SignedReleases, release_folder
from tests.support.tuf_client import client

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OLD, NEW = "cnn/1/model.tflite", "cnn/2/model.tflite"


def run(arguments: Sequence[str | Path], point: str = "") -> int:
    environment = {**os.environ, "FEDLOOP_FAILPOINT": point}
    command = [sys.executable, "-m", "tests.support.publishing", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=600).returncode


def seen(device: Path, repository: Path, bootstrap: bytes, path: str) -> bytes | None:
    updater = client(device, repository, bootstrap)
    info = updater.get_targetinfo(path)
    return None if info is None else Path(updater.download_target(info)).read_bytes()


def prepared(folder: Path, *, rotated: bool) -> tuple[SignedReleases, list[str | Path]]:
    """A repository with version 1, and what publishes version 2, with every key for a new one where `rotated`."""
    releases = SignedReleases(folder / "releases")
    releases.publish(release_folder(folder / "one"))
    new = release_folder(folder / "two", version=2, content=b"second" * 1000)
    targets = signed_documents.next_targets(releases.targets, datetime.now(UTC))
    signed_documents.add_release(targets, new)
    old = dict(releases.signers)
    root: Path | str = "-"
    if rotated:
        fresh = SignedReleases(folder / "unused").signers
        releases.signers = fresh
        online = releases.repository.online_keys(rotate=True)
        signed_documents.delegate_rollouts(targets, online[roles.ROLLOUTS])
        root = folder / "root.json"
        root.write_bytes(releases.signed_root(2, old["root-1"], old["root-2"]).to_bytes())
    signed = Metadata.from_bytes(releases.signed_targets(targets))
    signed.sign(old["targets"], append=True)
    (folder / "targets.json").write_bytes(signed.to_bytes())
    name = signed_documents.release_in(new)
    files = [f"{name.manifest}={new / MANIFEST_NAME}", f"{name.file}={new / MODEL_NAME}"]
    return releases, [folder / "releases", folder / "targets.json", root, *files]


@pytest.mark.parametrize("point", [failpoints.RELEASE_NAMES[-1], *extended(*failpoints.RELEASE_NAMES[:-1])])
def test_killed_while_publishing_with_a_rotation(tmp_path: Path, point: str) -> None:
    releases, publishing = prepared(tmp_path, rotated=True)
    bootstrap = releases.repository.root(1)
    follower = tmp_path / "follower"
    assert seen(follower, tmp_path / "releases", bootstrap, OLD) == b"weights"
    assert run(publishing, point) == -signal.SIGKILL
    for device in (follower, tmp_path / "newcomer"):
        assert seen(device, tmp_path / "releases", bootstrap, OLD) == b"weights"
        assert seen(device, tmp_path / "releases", bootstrap, NEW) in (None, b"second" * 1000)
    assert run(publishing) == 0
    for device in (follower, tmp_path / "newcomer"):
        assert seen(device, tmp_path / "releases", bootstrap, NEW) == b"second" * 1000
    assert [state.is_valid for state in releases.repository.state()] == [True] * 5
    assert len(list((tmp_path / "releases/keys").iterdir())) == 3
    assert not list((tmp_path / "releases").rglob("*.tmp"))


@pytest.mark.parametrize("change", [["rollouts", "cnn"], *extended(["renew", "1900000"])])
def test_killed_while_the_coordinator_signs(tmp_path: Path, change: list[str]) -> None:
    releases, _ = prepared(tmp_path, rotated=False)
    bootstrap = releases.repository.root(1)
    device, repository = tmp_path / "device", tmp_path / "releases"
    assert seen(device, repository, bootstrap, OLD) == b"weights"
    assert run([repository, *change], "release.snapshot_stored") == -signal.SIGKILL
    assert seen(device, repository, bootstrap, OLD) == b"weights"
    assert run([repository, *change]) == 0
    assert seen(device, repository, bootstrap, OLD) == b"weights"
    assert [state.is_valid for state in releases.repository.state()] == [True] * 5


@pytest.mark.extended
def test_killed_while_the_first_root_is_published(tmp_path: Path) -> None:
    """There is a repository only once it is whole; another root may then still be the first."""
    releases = SignedReleases(tmp_path / "source")
    fresh = tmp_path / "releases"
    shutil.copytree(tmp_path / "source/keys", fresh / "keys")
    (tmp_path / "root.json").write_bytes(releases.root.to_bytes())
    (tmp_path / "targets.json").write_bytes(releases.signed_targets())
    publishing = [fresh, tmp_path / "targets.json", tmp_path / "root.json"]
    assert run(publishing, "release.snapshot_stored") == -signal.SIGKILL
    assert not (fresh / "metadata/timestamp.json").exists()
    assert run(publishing) == 0
    assert seen(tmp_path / "device", fresh, releases.root.to_bytes(), OLD) is None
