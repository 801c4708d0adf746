"""The files of a repository of releases, and the keys that a coordinator holds online: snapshot, timestamp, rollouts.

metadata/1.root.json      every root so far; a device follows them one by one
metadata/N.targets.json   N.rollouts.json, N.snapshot.json: consistent snapshots, never changed once named
metadata/timestamp.json   the only file that is replaced: it names the current snapshot
targets/cnn/1/<sha256>.model.tflite, targets/rollouts/<sha256>.cnn.json
keys/<role>-<key id>.pem  the online keys

The root, and for rollouts targets, decides which online keys are valid. New keys wait here until people have signed
metadata that names them, and old ones are removed once no metadata names them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner, SSlibKey
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

from coordinator.releases import roles
from coordinator.releases.roles import ONLINE_ROLES
from edge_client.files import make_durably, write_durably

KEPT_SNAPSHOTS = 16
"""Old snapshots kept for devices in the middle of an update."""
TIMESTAMP = "timestamp.json"

_METADATA = re.compile(r"[1-9][0-9]{0,9}\.(root|targets|rollouts|snapshot)\.json|timestamp\.json")
_TARGET = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+){1,2}")

_S = TypeVar("_S", Root, Targets, Snapshot, Timestamp)


class StoredRepository:
    """The files below one folder. It knows file names but no signatures; the caller serializes writes."""

    def __init__(self, folder: Path) -> None:
        self._metadata = folder / "metadata"
        self._targets = folder / "targets"

    @property
    def exists(self) -> bool:
        """Whether there is a repository; the timestamp is written last."""
        return (self._metadata / TIMESTAMP).exists()

    def metadata_file(self, name: str) -> Path | None:
        """The path of a metadata file such as `3.targets.json`."""
        path = self._metadata / name
        return path if _METADATA.fullmatch(name) and path.is_file() else None

    def target_file(self, path: str) -> Path | None:
        """The path of a target, by its target path with the hash before the file name."""
        if not _TARGET.fullmatch(path) or any(part.startswith(".") for part in path.split("/")):
            return None
        file = self._targets / path
        return file if file.is_file() else None

    def path_of(self, target: TargetFile) -> Path:
        """The path of a target with these bytes, stored or not."""
        folder, _, name = target.path.rpartition("/")
        return self._targets / folder / f"{target.hashes['sha256']}.{name}"

    # -- reading -------------------------------------------------------------------------------------------------

    def bytes_of(self, name: str) -> bytes:
        return (self._metadata / name).read_bytes()

    def read(self, kind: type[_S], name: str) -> Metadata[_S]:
        """The stored metadata of this file name."""
        return Metadata[_S].from_bytes(self.bytes_of(name))

    def newest_root(self) -> int:
        return max(_number(path) for path in self._metadata.glob("*.root.json"))

    def timestamp(self) -> Metadata[Timestamp]:
        return self.read(Timestamp, TIMESTAMP)

    def snapshot(self) -> Metadata[Snapshot]:
        """The snapshot that the timestamp names."""
        return self.read(Snapshot, f"{self.timestamp().signed.snapshot_meta.version}.snapshot.json")

    def targets_name(self) -> str:
        """File name of the targets that the snapshot names."""
        return f"{self.snapshot().signed.meta['targets.json'].version}.targets.json"

    def rollouts(self) -> Metadata[Targets]:
        """The delegated role's metadata that the snapshot names."""
        return self.read(Targets, f"{self.snapshot().signed.meta['rollouts.json'].version}.rollouts.json")

    def all_targets(self) -> list[bytes]:
        """All targets metadata so far."""
        return [path.read_bytes() for path in self._metadata.glob("*.targets.json")]

    def meta(self, name: str, version: int) -> MetaFile:
        """The reference to a file from the metadata above it: version, length and hash."""
        return MetaFile.from_data(version, self.bytes_of(name), ["sha256"])

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, metadata: Metadata[Any], name: str) -> None:
        """Writes metadata, durable on return."""
        self._metadata.mkdir(parents=True, exist_ok=True)
        write_durably(self._metadata / name, metadata.to_bytes())

    def store(self, target: TargetFile, source: Path) -> None:
        """Copies a target's bytes, durable on return.

        Raises:
            LengthOrHashMismatchError: wrong bytes; checked on the copy, since the source may still change.
        """

        def copy(temporary: Path) -> None:
            shutil.copyfile(source, temporary)
            with temporary.open("rb") as file:
                target.verify_length_and_hashes(file)

        path = self.path_of(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        make_durably(path, copy)

    def store_bytes(self, target: TargetFile, content: bytes) -> None:
        path = self.path_of(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)

    def sweep(self) -> None:
        """Removes online metadata and rollouts that only old snapshots name, and the leftovers of interrupted writes."""
        newest = self.snapshot().signed.version
        for path in self._metadata.glob("*.snapshot.json"):
            if _number(path) <= newest - KEPT_SNAPSHOTS:
                path.unlink()
        snapshots = [self.read(Snapshot, path.name) for path in self._metadata.glob("*.snapshot.json")]
        oldest = min(snapshot.signed.meta["rollouts.json"].version for snapshot in snapshots)
        named = set()
        for path in self._metadata.glob("*.rollouts.json"):
            if _number(path) < oldest:
                path.unlink()
                continue
            targets = self.read(Targets, path.name).signed.targets.values()
            named |= {self.path_of(target) for target in targets}
        for path in (self._targets / roles.ROLLOUTS).glob("*.json"):
            if path not in named:
                path.unlink()
        for path in (*self._metadata.glob(".*.tmp"), *self._targets.rglob(".*.tmp")):
            path.unlink()

    def sweep_releases(self) -> None:
        """Removes the files of withdrawn releases that no kept snapshot contains."""
        snapshots = [self.read(Snapshot, path.name) for path in self._metadata.glob("*.snapshot.json")]
        versions = {snapshot.signed.meta["targets.json"].version for snapshot in snapshots}
        states = [self.read(Targets, f"{version}.targets.json").signed for version in sorted(versions)]
        named = {self.path_of(target) for state in states for target in state.targets.values()}
        for path in self._targets.glob("*/*/*"):
            if path not in named:
                path.unlink()


def _number(path: Path) -> int:
    return int(path.name.partition(".")[0])


class OnlineKeys:
    """The key files in one folder, accessible to this user only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def signers(self, role: str) -> list[CryptoSigner]:
        """All keys of a role, by id."""
        return [_read_key(path) for path in sorted(self._folder.glob(f"{role}-*.pem"))]

    def public(self, role: str) -> dict[str, SSlibKey]:
        """Key id -> public key of a role."""
        return {signer.public_key.keyid: signer.public_key for signer in self.signers(role)}

    def generate(self, role: str) -> SSlibKey:
        """Generates a key for a role, durable on return."""
        signer = CryptoSigner.generate_ed25519()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(self._path(role, signer.public_key.keyid), signer.private_bytes, mode=0o600)
        return signer.public_key

    def remove(self, key_ids: Iterable[str]) -> None:
        """Removes keys."""
        for key_id in key_ids:
            for role in ONLINE_ROLES:
                self._path(role, key_id).unlink(missing_ok=True)

    def _path(self, role: str, key_id: str) -> Path:
        return self._folder / f"{role}-{key_id}.pem"


def _read_key(path: Path) -> CryptoSigner:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path}: not an Ed25519 key")
    return CryptoSigner(key)
