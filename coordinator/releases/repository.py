"""The TUF repository of releases: reads, publication, renewal and online keys.

A change is written from the leaves up, each file durable before the next, the timestamp last. A crash at any point
therefore leaves the previous state, and repeating the change completes it. A new root becomes valid as soon as its file
exists, so the metadata that it requires is written first, signed with the old and the new online keys. Only if a targets
key was lost, and no targets can satisfy both roots, the root is written first, and devices wait for the rest.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from securesystemslib.signer import SSlibKey
from tuf.api.exceptions import LengthOrHashMismatchError
from tuf.api.metadata import Metadata, Root, Snapshot, TargetFile, Targets, Timestamp

from coordinator.errors import Refusal
from coordinator.failpoints import reach
from coordinator.releases import checks, roles
from coordinator.releases.role_states import RoleState, role_state
from coordinator.releases.roles import LIFETIMES, ONLINE_ROLES, ReleaseName
from coordinator.releases.stored import TIMESTAMP, OnlineKeys, StoredRepository
from edge_client.wire import inference
from edge_client.wire.rollouts import LARGEST_DOCUMENT_BYTES, rollouts_path

_Online = TypeVar("_Online", Targets, Snapshot, Timestamp)


@dataclass(frozen=True)
class Release:
    """A published release, with the sizes and hashes that the targets key signed."""

    name: ReleaseName
    manifest_sha256: str
    model_sha256: str
    model_bytes: int


class Repository:
    """The repository in `folder`, empty until the first `publish`. One process writes it, from any of its threads."""

    def __init__(self, folder: Path, clock: Callable[[], datetime]) -> None:
        self.stored = StoredRepository(folder)
        self._keys = OnlineKeys(folder / "keys")
        self._clock = clock
        self._lock = threading.RLock()
        self._listed: tuple[str, tuple[Release, ...]] = ("", ())

    # -- reads ---------------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether anything was published yet."""
        return self.stored.exists

    def root(self, version: int | None = None) -> bytes:
        """The root of this version, by default the newest.

        Raises:
            Refusal: 404 `no_repository`; 404 `not_found`.
        """
        self._require_repository()
        path = self.stored.metadata_file(f"{version or self.stored.newest_root()}.root.json")
        if path is None:
            raise Refusal(404, "not_found", f"there is no root {version}")
        return path.read_bytes()

    def roots(self) -> list[bytes]:
        """Every root, in order of version. Raises: Refusal: 404 `no_repository`."""
        self._require_repository()
        return [self.root(version) for version in range(1, self.stored.newest_root() + 1)]

    def targets(self) -> bytes:
        """The current targets. Raises: Refusal: 404 `no_repository`."""
        self._require_repository()
        with self._lock:
            return self.stored.bytes_of(self.stored.targets_name())

    def releases(self) -> Sequence[Release]:
        """The published releases, by name and version; none without a repository."""
        if not self.exists:
            return ()
        with self._lock:
            name = self.stored.targets_name()
            if (
                name != self._listed[0]
            ):  # cached: a file of some megabytes, read in every pass over the rollouts
                releases = checks.releases_in(checks.read_targets(self.targets()).signed.targets)
                listed = [
                    Release(name, manifest.hashes["sha256"], file.hashes["sha256"], file.length)
                    for name, (manifest, file) in releases.items()
                ]
                self._listed = name, tuple(listed)
            return self._listed[1]

    def task_of(self, model: str, version: int) -> str | None:
        """What a published release predicts, as its manifest says; None if it is not published."""
        for release in self.releases():
            if (release.name.model, release.name.version) == (model, version):
                folder, _, name = release.name.manifest.rpartition("/")
                path = self.stored.target_file(f"{folder}/{release.manifest_sha256}.{name}")
                return None if path is None else inference.from_json(path.read_bytes(), str(path)).task
        return None

    def state(self) -> list[RoleState]:
        """Every role's version and expiry, the most trusted first; empty without a repository."""
        if not self.exists:
            return []
        with self._lock:
            now, root, targets = self._clock(), self._root(), checks.read_targets(self.targets())
            return [
                role_state(roles.ROOT, root, root.signed, now),
                role_state(roles.TARGETS, targets, root.signed, now),
                role_state(roles.ROLLOUTS, self.stored.rollouts(), targets.signed, now),
                role_state(roles.SNAPSHOT, self.stored.snapshot(), root.signed, now),
                role_state(roles.TIMESTAMP, self.stored.timestamp(), root.signed, now),
            ]

    # -- keys ----------------------------------------------------------------------------------------------------

    def online_keys(self, *, rotate: bool = False) -> dict[str, SSlibKey]:
        """Role -> the public key that the next root, or for rollouts the next targets, must name.

        Generates missing keys. `rotate` generates new ones for all roles and removes keys that no metadata names yet: after
        a break-in these may be stolen too.
        """
        with self._lock:
            return {role: self._online_key(role, rotate) for role in ONLINE_ROLES}

    def unnamed_online_roles(self) -> list[str]:
        """Online roles with a new key that no published root or targets names yet."""
        if not self.exists:
            return []
        with self._lock:
            return [role for role in ONLINE_ROLES if self._keys.public(role).keys() - self._named_keys(role)]

    def _online_key(self, role: str, rotate: bool) -> SSlibKey:
        held = self._keys.public(role)
        named = self._named_keys(role)
        waiting = [key for key_id, key in held.items() if key_id not in named]
        in_use = [key for key_id, key in held.items() if key_id in named]
        if not rotate and (waiting or in_use):
            return (waiting or in_use)[0]
        key = self._keys.generate(role)
        self._keys.remove(key.keyid for key in waiting)
        return key

    def _named_keys(self, role: str) -> set[str]:
        """Ids of the keys that the current root, or targets, trusts for an online role."""
        if not self.exists:
            return set()
        if role == roles.ROLLOUTS:
            return set(checks.read_targets(self.targets()).signed.get_delegated_role(role).keyids)
        return set(self._root().signed.get_delegated_role(role).keyids)

    # -- changes -------------------------------------------------------------------------------------------------

    def publish(self, targets: bytes, files: Mapping[str, Path], roots: Sequence[bytes] = ()) -> int:
        """Publishes signed targets, with new roots if any; returns the version of targets.

        `files`: target path -> a file with its bytes, for exactly the targets that are not stored yet. `roots`: those after
        the current one, in order; known ones are ignored. Nothing changes unless all checks pass. Idempotent: a call that
        a crash interrupted can be repeated.

        Raises:
            Refusal: 413 or 422 with the codes of `checks`, and `missing_file`, `extra_file`, `wrong_bytes`,
                `wrong_manifest`.
            OSError: the disk is full; the previous state stays.
        """
        with self._lock:
            now = self._clock()
            trusted = self._root() if self.exists else None
            chain = [root for root in map(checks.read_root, roots) if not self._is_known(root)]
            root = checks.check_chain(trusted, chain, now)
            signed = checks.read_targets(targets)
            before = checks.read_targets(self.targets()) if self.exists else None
            held = {role: self._keys.public(role).keys() for role in ONLINE_ROLES}
            checks.require_online_keys(root, held)
            if before is None or before.to_bytes() != signed.to_bytes():
                checks.check_targets(
                    root, before.signed if before is not None else None, signed, held[roles.ROLLOUTS], now
                )
                self._require_unchanged_releases(before, signed)
            elif not checks.is_signed(root, roles.TARGETS, signed):
                raise Refusal(
                    422, "bad_signature", "the new root needs targets signed by its own targets key"
                )
            self._check_files(signed.signed.targets, files)
            self._write_publication(trusted, chain, root, signed, files, now)
            return signed.signed.version

    def set_rollouts(self, model: str, document: Mapping[str, Any]) -> None:
        """Signs which devices must run which version of a model: `{"model": …, "rollouts": [{"rollout", "version", …}]}`.

        Raises:
            Refusal: 404 `no_repository`; 422 `malformed`, also for another model; 409 `unknown_release`: it installs a
                version that does not exist; 413 `oversized`: devices would refuse it.
        """
        with self._lock:
            self._require_repository()
            checks.check_rollouts(model, document, {each.name for each in self.releases()})
            data = (json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode()
            if len(data) > LARGEST_DOCUMENT_BYTES:
                raise Refusal(
                    413,
                    "oversized",
                    f"{rollouts_path(model)} would have {len(data)} bytes, and devices accept {LARGEST_DOCUMENT_BYTES}: "
                    "it names too many devices",
                )
            target = TargetFile.from_data(rollouts_path(model), data, ["sha256"])
            now, rollouts = self._clock(), self.stored.rollouts().signed
            self.stored.store_bytes(target, data)
            rollouts.targets[target.path] = target
            self._advance(now, checks.read_targets(self.targets()), rollouts, [self._root().signed])
            self.stored.sweep()

    def renew(self, now: datetime) -> list[str]:
        """Signs online roles again that are past half of their lifetime or no longer valid; returns these roles."""
        with self._lock:
            if not self.exists:
                return []
            due = [
                each.role
                for each in self.state()
                if not each.offline and (not each.is_valid or now >= each.expires - LIFETIMES[each.role] / 2)
            ]
            targets = checks.read_targets(self.targets())
            if roles.ROLLOUTS in due:
                self._advance(now, targets, self.stored.rollouts().signed, [self._root().signed])
            elif roles.SNAPSHOT in due:
                self._advance(now, targets, None, [self._root().signed])
            elif due:
                self._write_timestamp(now, self.stored.snapshot(), [self._root().signed])
            if due:
                self.stored.sweep()
                self.stored.sweep_releases()
            return due

    # -- writes --------------------------------------------------------------------------------------------------

    def _write_publication(
        self,
        trusted: Metadata[Root] | None,
        chain: Sequence[Metadata[Root]],
        root: Root,
        targets: Metadata[Targets],
        files: Mapping[str, Path],
        now: datetime,
    ) -> None:
        old = trusted.signed if trusted is not None else None
        for path, source in files.items():
            try:
                self.stored.store(targets.signed.targets[path], source)
            except LengthOrHashMismatchError as error:
                raise checks.wrong_bytes(path, error) from None
        reach("release.files_stored")
        roots_first = old is None or not checks.is_signed(old, roles.TARGETS, targets)
        if roots_first:
            self._write_roots(chain)
        # Rollouts of models without a release stay: they direct devices to run none.
        online = self.stored.rollouts().signed if old is not None else Targets(version=1, targets={})
        self._advance(now, targets, online, [root] if old is None else [old, root], first=old is None)
        if not roots_first:
            self._write_roots(chain)
        self._remove_old_keys()
        self.stored.sweep()
        self.stored.sweep_releases()

    def _advance(
        self,
        now: datetime,
        targets: Metadata[Targets],
        rollouts: Targets | None,
        roots: Sequence[Root],
        *,
        first: bool = False,
    ) -> None:
        """Writes targets, new rollouts if given, the snapshot that names them, and the timestamp."""
        self.stored.write(targets, f"{targets.signed.version}.targets.json")
        if rollouts is not None:
            if not first:
                rollouts.version += 1
            self._sign(rollouts, roles.ROLLOUTS, now, [targets.signed], f"{rollouts.version}.rollouts.json")
            meta = {"rollouts.json": self.stored.meta(f"{rollouts.version}.rollouts.json", rollouts.version)}
        else:
            meta = {"rollouts.json": self.stored.snapshot().signed.meta["rollouts.json"]}
        reach("release.targets_stored")
        meta["targets.json"] = self.stored.meta(
            f"{targets.signed.version}.targets.json", targets.signed.version
        )
        snapshot = Snapshot(version=1 if first else self.stored.snapshot().signed.version + 1, meta=meta)
        written = self._sign(snapshot, roles.SNAPSHOT, now, roots, f"{snapshot.version}.snapshot.json")
        reach("release.snapshot_stored")
        self._write_timestamp(now, written, roots)
        reach("release.timestamp_stored")

    def _write_timestamp(self, now: datetime, snapshot: Metadata[Snapshot], roots: Sequence[Root]) -> None:
        version = self.stored.timestamp().signed.version + 1 if self.exists else 1
        meta = self.stored.meta(f"{snapshot.signed.version}.snapshot.json", snapshot.signed.version)
        self._sign(Timestamp(version=version, snapshot_meta=meta), roles.TIMESTAMP, now, roots, TIMESTAMP)

    def _sign(
        self, signed: _Online, role: str, now: datetime, delegators: Sequence[Root | Targets], name: str
    ) -> Metadata[_Online]:
        """Signs with every held key that one of the delegators names, and writes the metadata."""
        signed.expires = now + LIFETIMES[role]
        named = {key for delegator in delegators for key in delegator.get_delegated_role(role).keyids}
        metadata = Metadata(signed)
        for signer in self._keys.signers(role):
            if signer.public_key.keyid in named:
                metadata.sign(signer, append=True)
        self.stored.write(metadata, name)
        return metadata

    def _write_roots(self, chain: Iterable[Metadata[Root]]) -> None:
        for each in chain:
            self.stored.write(each, f"{each.signed.version}.root.json")
        reach("release.root_stored")

    def _remove_old_keys(self) -> None:
        """Removes private keys that an earlier root or targets named and the current ones do not."""
        current = {role: self._named_keys(role) for role in ONLINE_ROLES}
        for role in (roles.SNAPSHOT, roles.TIMESTAMP):
            old = {key for data in self.roots() for key in checks.read_root(data).signed.roles[role].keyids}
            self._keys.remove(old - current[role])
        every = [checks.read_targets(data).signed for data in self.stored.all_targets()]
        delegated = [targets.get_delegated_role(roles.ROLLOUTS) for targets in every]
        self._keys.remove({key for role in delegated for key in role.keyids} - current[roles.ROLLOUTS])

    # -- checks that need the disk -------------------------------------------------------------------------------

    def _require_unchanged_releases(self, before: Metadata[Targets] | None, new: Metadata[Targets]) -> None:
        """Requires that a withdrawn release is republished with the same bytes only: devices may still run it."""
        for each in map(checks.read_targets, self.stored.all_targets()):
            if before is not None and each.signed.version <= before.signed.version:
                checks.require_unchanged(each.signed.targets, new.signed.targets)

    def _check_files(self, targets: Mapping[str, TargetFile], files: Mapping[str, Path]) -> None:
        needed = {path for path, target in targets.items() if not self.stored.path_of(target).exists()}
        if extra := files.keys() - targets.keys():
            raise Refusal(422, "extra_file", f"{min(extra)[:200]} is not among the signed targets")
        if missing := needed - files.keys():
            raise Refusal(422, "missing_file", f"{min(missing)} is signed but was not sent")
        checks.check_files(targets, files)

    def _require_repository(self) -> None:
        if not self.exists:
            raise Refusal(
                404, "no_repository", "there are no signed releases yet; create them: `fedloop release init`"
            )

    def _root(self) -> Metadata[Root]:
        return self.stored.read(Root, f"{self.stored.newest_root()}.root.json")

    def _is_known(self, root: Metadata[Root]) -> bool:
        path = self.stored.metadata_file(f"{root.signed.version}.root.json")
        return self.exists and path is not None and path.read_bytes() == root.to_bytes()
