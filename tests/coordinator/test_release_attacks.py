"""Attacks on what devices read, by whoever holds the server's disk, or an online key: TUF's client refuses each.

Everything goes over the device API. The device knows release 1 of `cnn` and has its file when an attack begins.
"""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import (
    BadVersionNumberError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import Metadata, MetaFile, Snapshot, TargetFile, Targets, Timestamp

from coordinator.operator import signed_documents
from tests.support import device_world
from tests.support.device_world import NO_TLS
from tests.support.signed_releases import SignedReleases, release_folder
from tests.support.tuf_client import DeviceFetcher, client

pytestmark = pytest.mark.slow

MODEL, MANIFEST, ROLLOUTS = "cnn/1/model.tflite", "cnn/1/manifest.json", "rollouts/cnn.json"
DAY = timedelta(days=1)


class World:
    """A coordinator that serves a repository, the people who sign for it, and a device that follows it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.url = f"{url}/device/v1/releases"
        self.releases = SignedReleases(folder / "releases")
        self.metadata = folder / "releases" / "metadata"
        self.fetcher = DeviceFetcher("d1")
        self.publish(1, b"first")
        self.releases.repository.set_rollouts("cnn", {"model": "cnn", "rollouts": []})
        self.root = self.fetcher.download_bytes(f"{self.url}/root", 512_000)
        assert self.fetched(MODEL) == b"first"

    def publish(self, version: int, content: bytes) -> None:
        self.releases.publish(release_folder(self.folder / f"v{version}", version=version, content=content))

    def fetched(self, path: str) -> bytes | None:
        """What a check of the device gets of a target; None: there is no such target."""
        updater = client(self.folder / "d1", Path(), self.root, url=self.url, fetcher=self.fetcher)
        info = updater.get_targetinfo(path)
        return None if info is None else Path(updater.download_target(info)).read_bytes()

    def newest(self, role: str) -> Path:
        return max(self.metadata.glob(f"*.{role}.json"), key=lambda path: int(path.name.partition(".")[0]))

    def online(self, role: str) -> CryptoSigner:
        """A stolen key."""
        (path,) = (self.folder / "releases" / "keys").glob(f"{role}-*.pem")
        return CryptoSigner(load_pem_private_key(path.read_bytes(), None))

    def forge(
        self, targets: Metadata[Targets] | None = None, rollouts: Metadata[Targets] | None = None
    ) -> None:
        """Serves these with a new snapshot and timestamp, signed with both stolen keys."""
        snapshot = Metadata[Snapshot].from_file(str(self.newest("snapshot"))).signed
        snapshot.version += 1
        for role, metadata in (("targets", targets), ("rollouts", rollouts)):
            if metadata is not None:
                version = metadata.signed.version
                (self.metadata / f"{version}.{role}.json").write_bytes(metadata.to_bytes())
                snapshot.meta[f"{role}.json"] = MetaFile(version)
        signed = Metadata(snapshot)
        signed.sign(self.online("snapshot"))
        (self.metadata / f"{snapshot.version}.snapshot.json").write_bytes(signed.to_bytes())
        timestamp = Metadata[Timestamp].from_file(str(self.metadata / "timestamp.json"))
        timestamp.signed.version += 1
        timestamp.signed.snapshot_meta = MetaFile(snapshot.version)
        timestamp.sign(self.online("timestamp"))
        (self.metadata / "timestamp.json").write_bytes(timestamp.to_bytes())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with device_world.sqlite(tmp_path) as database, device_world.serving(tmp_path, database) as serving:
        serving.enrol("d1")
        made = World(serving.url, tmp_path)
        yield made
        made.fetcher.close()


def test_rollback_to_an_older_state_is_refused(world: World) -> None:
    shutil.copytree(world.metadata, world.folder / "old")
    world.publish(2, b"second")
    assert world.fetched("cnn/2/model.tflite") == b"second"
    shutil.copytree(world.folder / "old", world.metadata, dirs_exist_ok=True)
    with pytest.raises(BadVersionNumberError):
        world.fetched("cnn/2/model.tflite")


def test_freeze_on_an_expired_state_is_refused(world: World) -> None:
    timestamp = Metadata[Timestamp].from_file(str(world.metadata / "timestamp.json"))
    timestamp.signed.version += 1
    timestamp.signed.expires = datetime.now(UTC) - DAY
    timestamp.sign(world.online("timestamp"))
    (world.metadata / "timestamp.json").write_bytes(timestamp.to_bytes())
    with pytest.raises(ExpiredMetadataError):
        world.fetched(MODEL)


def test_a_tampered_model_is_refused(world: World) -> None:
    (file,) = (world.folder / "releases/targets/cnn/1").glob("*.model.tflite")
    file.write_bytes(b"wrong")
    with pytest.raises(LengthOrHashMismatchError):
        world.fetched(MODEL)


@pytest.mark.slow
def test_endless_data_is_cut_off(world: World) -> None:
    (file,) = (world.folder / "releases/targets/cnn/1").glob("*.model.tflite")
    with file.open("r+b") as opened:
        opened.truncate(2**40)
    before = world.fetcher.received_bytes
    with pytest.raises(DownloadLengthMismatchError):
        world.fetched(MODEL)
    with (world.metadata / "timestamp.json").open("r+b") as opened:
        opened.truncate(2**26)
    with pytest.raises(DownloadLengthMismatchError):
        world.fetched(MODEL)
    assert world.fetcher.received_bytes - before < 2**20


def test_a_release_signed_with_a_wrong_key_is_refused(world: World) -> None:
    targets = signed_documents.next_targets(world.releases.targets, datetime.now(UTC))
    signed_documents.add_release(targets, release_folder(world.folder / "evil", version=2, content=b"evil"))
    signed = Metadata(targets)
    signed.sign(CryptoSigner.generate_ed25519())
    world.forge(targets=signed)
    with pytest.raises(UnsignedMetadataError):
        world.fetched("cnn/2/model.tflite")


def test_mix_and_match_of_two_states_is_refused(world: World) -> None:
    old = world.newest("targets").read_bytes()
    world.publish(2, b"second")
    world.newest("targets").write_bytes(old)
    with pytest.raises(RepositoryError):
        world.fetched("cnn/2/model.tflite")


@pytest.mark.parametrize("role", ["targets", "rollouts", "snapshot", "timestamp"])
def test_no_stolen_online_key_makes_a_release_exist(world: World, role: str) -> None:
    """Not by signing targets itself, whichever of the online keys it is."""
    targets = signed_documents.next_targets(world.releases.targets, datetime.now(UTC))
    signed_documents.add_release(targets, release_folder(world.folder / "evil", version=2, content=b"evil"))
    signed = Metadata(targets)
    signed.sign(CryptoSigner.generate_ed25519() if role == "targets" else world.online(role))
    world.forge(targets=signed)
    with pytest.raises(UnsignedMetadataError):
        world.fetched("cnn/2/model.tflite")


def test_all_stolen_online_keys_together_cannot_add_or_change_a_release_through_rollouts(
    world: World,
) -> None:
    """The delegation covers `rollouts/*` alone: of release files that its role names, nobody takes notice."""
    rollouts = Metadata[Targets].from_file(str(world.newest("rollouts")))
    rollouts.signed.version += 1
    evil = b"evil"
    for path in ("cnn/2/model.tflite", MODEL, "rollouts/deeper/cnn.json"):
        rollouts.signed.targets[path] = TargetFile.from_data(path, evil, ["sha256"])
    rollouts.sign(world.online("rollouts"))
    world.forge(rollouts=rollouts)
    assert world.fetched("cnn/2/model.tflite") is None
    assert world.fetched("rollouts/deeper/cnn.json") is None
    assert world.fetched(MODEL) == b"first"
    assert world.fetched(ROLLOUTS) is not None


def test_stolen_online_keys_cannot_take_a_release_away_by_an_older_targets(world: World) -> None:
    old = Metadata[Targets].from_file(str(world.metadata / "1.targets.json"))
    world.forge(targets=old)
    with pytest.raises(RepositoryError):
        world.fetched(MODEL)


def test_rotation_of_all_keys_passes_and_ends_a_fast_forward(world: World) -> None:
    """A thief of the timestamp and snapshot keys raises versions, so that no honest state is ever newer; new keys end it."""
    timestamp = Metadata[Timestamp].from_file(str(world.metadata / "timestamp.json"))
    honest = timestamp.to_bytes()
    timestamp.signed.version = 2**31
    timestamp.sign(world.online("timestamp"))
    (world.metadata / "timestamp.json").write_bytes(timestamp.to_bytes())
    assert world.fetched(MODEL) == b"first"
    (world.metadata / "timestamp.json").write_bytes(honest)
    with pytest.raises(BadVersionNumberError):
        world.fetched(MODEL)

    world.releases.rotate()
    assert world.fetched(MODEL) == b"first"
    world.publish(2, b"second")
    assert world.fetched("cnn/2/model.tflite") == b"second"
    assert json.loads(world.fetched(ROLLOUTS) or b"")["model"] == "cnn"


def test_old_keys_sign_nothing_after_a_rotation(world: World) -> None:
    old = dict(world.releases.signers)
    world.releases.rotate()
    assert world.fetched(MODEL) == b"first"
    targets = signed_documents.next_targets(world.releases.targets, datetime.now(UTC))
    signed = Metadata(targets)
    signed.sign(old["targets"])
    world.forge(targets=signed)
    with pytest.raises(UnsignedMetadataError):
        world.fetched(MODEL)


def test_the_first_root_is_served_whatever_came_after(world: World) -> None:
    world.releases.rotate()
    assert world.fetcher.download_bytes(f"{world.url}/root", 512_000) == world.root


def test_names_lead_nowhere_else(world: World) -> None:
    (world.folder / "releases/metadata/secret.json").write_text("{}")
    for path in (
        "metadata/secret.json",
        "metadata/..%2Fkeys",
        "metadata/..%2f..%2fadmin.token",
        "targets/..%2F..%2Fadmin.token",
        "targets/../metadata/timestamp.json",
        "targets/%2e%2e/keys/x.pem",
        "targets/cnn/1/.hidden",
        "targets/cnn/1",
        "targets/cnn",
        "targets//etc/passwd",
        "targets/cnn/1/%00",
        "keys/timestamp.pem",
    ):
        parts = urlsplit(f"{world.url}/{path}")
        connection = http.client.HTTPConnection(parts.netloc)  # sends the path as it is
        connection.request("GET", parts.path, headers={"x-device": "d1"})
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (404, "not_found"), path
        connection.close()


def test_only_devices_read(world: World) -> None:
    for path in ("root", "metadata/timestamp.json", "targets/cnn/1/x.model.tflite"):
        assert httpx.get(f"{world.url}/{path}", verify=NO_TLS).status_code == 401


def test_files_are_served_in_ranges_and_kept_for_ever(world: World) -> None:
    (file,) = (world.folder / "releases/targets/cnn/1").glob("*.model.tflite")
    url, device = f"{world.url}/targets/cnn/1/{file.name}", {"x-device": "d1"}
    full = httpx.get(url, headers=device, verify=NO_TLS)
    assert "immutable" in full.headers["cache-control"]
    part = httpx.get(url, headers=device | {"range": "bytes=2-"}, verify=NO_TLS)
    assert (part.status_code, part.content) == (206, b"rst")
    assert (
        httpx.get(url, headers=device | {"range": "bytes=9-"}, verify=NO_TLS).json()["error"]["code"]
        == "bad_range"
    )
    again = httpx.get(url, headers=device | {"if-none-match": full.headers["etag"]}, verify=NO_TLS)
    assert (again.status_code, again.content) == (304, b"")
    timestamp = httpx.get(f"{world.url}/metadata/timestamp.json", headers=device, verify=NO_TLS)
    assert timestamp.headers["cache-control"] == "no-cache"
