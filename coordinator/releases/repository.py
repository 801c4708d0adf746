"""The repository of releases: what devices read, who may change it, and how a change is written.

Every change goes from the leaves up, each file durable before the next, the timestamp last; so a crash at any point leaves
the state before the change, and doing it again completes it. A new root becomes valid by itself the moment it lies
there, therefore what it is to meet lies there before it, signed with the old and the new online keys; only where a
targets key was lost, and no targets can satisfy both roots, it goes first, and devices wait for the rest.
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
from coordinator.releases.online_keys import OnlineKeys
from coordinator.releases.roles import LIFETIMES, ONLINE_ROLES, ReleaseName
from coordinator.releases.stored import TIMESTAMP, StoredRepository
from edge_client.wire import inference
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import LARGEST_DOCUMENT_BYTES, rollouts_path
from edge_client.wire.rollouts import from_json as read_rollouts
from edge_client.wire.strict import Unfit

_Online = TypeVar("_Online", Targets, Snapshot, Timestamp)


@dataclass(frozen=True)
class Release:
    """A release that exists: its files' sizes and hashes are what the targets key signed."""

    name: ReleaseName
    manifest_sha256: str
    model_sha256: str
    model_bytes: int


@dataclass(frozen=True)
class RoleState:
    """How a role stands: `is_valid` says whether its signatures satisfy those above it and it has not expired."""

    role: str
    version: int
    expires: datetime
    offline: bool
    is_valid: bool


class Repository:
    """The repository in `folder`, empty until the first `publish`. One process writes it; safe for its threads."""

    def __init__(self, folder: Path, clock: Callable[[], datetime]) -> None:
        self._stored = StoredRepository(folder)
        self._keys = OnlineKeys(folder / "keys")
        self._clock = clock
        self._lock = threading.RLock()
        self._listed: tuple[str, tuple[Release, ...]] = ("", ())

    # -- what is there -------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether there is a repository yet."""
        return self._stored.exists

    def metadata_file(self, name: str) -> Path | None:
        """Where the metadata of this file name lies, such as `3.targets.json`."""
        return self._stored.metadata_file(name)

    def target_file(self, path: str) -> Path | None:
        """Where a target lies, by its path with the hash before the file name."""
        return self._stored.target_file(path)

    def root(self, version: int | None = None) -> bytes:
        """The root of this version, by default the newest.

        Raises:
            Refusal: 404 `no_repository`; 404 `not_found`.
        """
        self._require_repository()
        path = self._stored.metadata_file(f"{version or self._stored.newest_root()}.root.json")
        if path is None:
            raise Refusal(404, "not_found", f"there is no root {version}")
        return path.read_bytes()

    def roots(self) -> list[bytes]:
        """Every root, the first one first. Raises: Refusal: 404 `no_repository`."""
        self._require_repository()
        return [self.root(version) for version in range(1, self._stored.newest_root() + 1)]

    def targets(self) -> bytes:
        """The targets that count. Raises: Refusal: 404 `no_repository`."""
        self._require_repository()
        with self._lock:
            return self._stored.bytes_of(self._stored.targets_name())

    def releases(self) -> Sequence[Release]:
        """The releases that exist, by name and version; none where there is no repository."""
        if not self.exists:
            return ()
        with self._lock:
            name = self._stored.targets_name()
            if name != self._listed[0]:  # a file of some megabytes, asked for at every turn of a rollout
                found = checks.releases_in(checks.read_targets(self.targets()).signed.targets)
                listed = [
                    Release(name, manifest.hashes["sha256"], file.hashes["sha256"], file.length)
                    for name, (manifest, file) in found.items()
                ]
                self._listed = name, tuple(listed)
            return self._listed[1]

    def rollouts(self, model: str) -> dict[str, Any] | None:
        """The document that `set_rollouts` signed last for a model; None: there is none."""
        if not self.exists:
            return None
        with self._lock:
            target = self._stored.rollouts().signed.targets.get(rollouts_path(model))
            if target is None:
                return None
            document: dict[str, Any] = json.loads(self._stored.place_of(target).read_bytes())
            return document

    def state(self) -> list[RoleState]:
        """Every role's version and expiry, the most trusted first; empty where there is no repository."""
        if not self.exists:
            return []
        with self._lock:
            root, targets = self._root(), checks.read_targets(self.targets())
            return [
                self._state(roles.ROOT, root, root.signed),
                self._state(roles.TARGETS, targets, root.signed),
                self._state(roles.ROLLOUTS, self._stored.rollouts(), targets.signed),
                self._state(roles.SNAPSHOT, self._stored.snapshot(), root.signed),
                self._state(roles.TIMESTAMP, self._stored.timestamp(), root.signed),
            ]

    # -- keys ----------------------------------------------------------------------------------------------------

    def online_keys(self, *, rotate: bool = False) -> dict[str, SSlibKey]:
        """Role -> the public key that the next root, or for rollouts the next targets, is to name.

        Keys are made where there are none; with `rotate` always, and those that waited to be named are no more: what is
        rotated after a break-in may have been stolen while it waited.
        """
        with self._lock:
            return {role: self._online_key(role, rotate) for role in ONLINE_ROLES}

    def _online_key(self, role: str, rotate: bool) -> SSlibKey:
        held = self._keys.public(role)
        named = self._named_keys(role)
        waiting = [key for key_id, key in held.items() if key_id not in named]
        in_use = [key for key_id, key in held.items() if key_id in named]
        if not rotate and (waiting or in_use):
            return (waiting or in_use)[0]
        made = self._keys.make(role)
        self._keys.forget(key.keyid for key in waiting)
        return made

    def _named_keys(self, role: str) -> set[str]:
        """Ids of the keys that the current root, or targets, trusts for an online role."""
        if not self.exists:
            return set()
        if role == roles.ROLLOUTS:
            return set(checks.read_targets(self.targets()).signed.get_delegated_role(role).keyids)
        return set(self._root().signed.get_delegated_role(role).keyids)

    # -- changes -------------------------------------------------------------------------------------------------

    def publish(self, targets: bytes, files: Mapping[str, Path], roots: Sequence[bytes] = ()) -> int:
        """Makes signed targets, and roots that come with them, what counts; returns the version of targets.

        `files`: target path -> a file with its bytes, for every target that is not here yet and for no other. `roots`:
        those after the current one, in order; ones that are here already do not matter. Nothing changes unless all of it
        holds. Published again, it is completed, so that a call cut short by a crash can be repeated.

        Raises:
            Refusal: 413 or 422 with the codes of `checks`, and `missing_file`, `extra_file`, `wrong_bytes`,
                `wrong_manifest`.
            OSError: the disk is full; the old state stays.
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
                self._require_never_other(before, signed)
            elif not checks.is_signed(root, roles.TARGETS, signed):
                raise Refusal(
                    422, "bad_signature", "the new root needs targets signed by its own targets key"
                )
            self._check_files(signed.signed.targets, files)
            self._replace(trusted, chain, root, signed, files, now)
            return signed.signed.version

    def set_rollouts(self, model: str, document: Mapping[str, Any]) -> None:
        """Signs who is to run which version of a model: `{"model": …, "rollouts": [{"rollout", "version", …}]}`.

        Raises:
            Refusal: 404 `no_repository`; 422 `malformed`: of another model, or no such document; 409 `unknown_release`: it
                has a version installed that does not exist; 413 `oversized`: no device would take it.
        """
        with self._lock:
            self._require_repository()
            self._check_rollouts(model, document)
            data = (json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode()
            if len(data) > LARGEST_DOCUMENT_BYTES:
                raise Refusal(
                    413,
                    "oversized",
                    f"{rollouts_path(model)} would have {len(data)} bytes, and devices take {LARGEST_DOCUMENT_BYTES}: "
                    "it names too many devices",
                )
            target = TargetFile.from_data(rollouts_path(model), data, ["sha256"])
            now, rollouts = self._clock(), self._stored.rollouts().signed
            self._stored.store_bytes(target, data)
            rollouts.targets[target.path] = target
            self._advance(now, checks.read_targets(self.targets()), rollouts, [self._root().signed])
            self._stored.sweep()

    def renew(self, now: datetime) -> list[str]:
        """Signs anew what is past half of its life or no longer signed as root asks; the roles that were."""
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
                self._advance(now, targets, self._stored.rollouts().signed, [self._root().signed])
            elif roles.SNAPSHOT in due:
                self._advance(now, targets, None, [self._root().signed])
            elif due:
                self._write_timestamp(now, self._stored.snapshot(), [self._root().signed])
            if due:
                self._stored.sweep()
                self._stored.sweep_releases()
            return due

    # -- how a change is written ---------------------------------------------------------------------------------

    def _replace(
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
                self._stored.store(targets.signed.targets[path], source)
            except LengthOrHashMismatchError as error:
                raise _wrong_bytes(path, error) from None
        reach("release.files_stored")
        roots_first = old is None or not checks.is_signed(old, roles.TARGETS, targets)
        if roots_first:
            self._write_roots(chain)
        online = self._stored.rollouts().signed if old is not None else Targets(version=1, targets={})
        self._forget_withdrawn(online, targets.signed)
        self._advance(now, targets, online, [root] if old is None else [old, root], first=old is None)
        if not roots_first:
            self._write_roots(chain)
        self._forget_old_keys()
        self._stored.sweep()
        self._stored.sweep_releases()

    def _advance(
        self,
        now: datetime,
        targets: Metadata[Targets],
        rollouts: Targets | None,
        roots: Sequence[Root],
        *,
        first: bool = False,
    ) -> None:
        """Writes targets, new rollouts where given, the snapshot that names them, and the timestamp."""
        self._stored.write(targets, f"{targets.signed.version}.targets.json")
        if rollouts is not None:
            if not first:
                rollouts.version += 1
            self._sign(rollouts, roles.ROLLOUTS, now, [targets.signed], f"{rollouts.version}.rollouts.json")
            meta = {"rollouts.json": self._stored.meta(f"{rollouts.version}.rollouts.json", rollouts.version)}
        else:
            meta = {"rollouts.json": self._stored.snapshot().signed.meta["rollouts.json"]}
        reach("release.targets_stored")
        meta["targets.json"] = self._stored.meta(
            f"{targets.signed.version}.targets.json", targets.signed.version
        )
        snapshot = Snapshot(version=1 if first else self._stored.snapshot().signed.version + 1, meta=meta)
        written = self._sign(snapshot, roles.SNAPSHOT, now, roots, f"{snapshot.version}.snapshot.json")
        reach("release.snapshot_stored")
        self._write_timestamp(now, written, roots)
        reach("release.timestamp_stored")

    def _write_timestamp(self, now: datetime, snapshot: Metadata[Snapshot], roots: Sequence[Root]) -> None:
        version = self._stored.timestamp().signed.version + 1 if self.exists else 1
        meta = self._stored.meta(f"{snapshot.signed.version}.snapshot.json", snapshot.signed.version)
        self._sign(Timestamp(version=version, snapshot_meta=meta), roles.TIMESTAMP, now, roots, TIMESTAMP)

    def _sign(
        self, signed: _Online, role: str, now: datetime, delegators: Sequence[Root | Targets], name: str
    ) -> Metadata[_Online]:
        """Signs with every key of ours that one of the delegators names, and writes."""
        signed.expires = now + LIFETIMES[role]
        named = {key for delegator in delegators for key in delegator.get_delegated_role(role).keyids}
        metadata = Metadata(signed)
        for signer in self._keys.signers(role):
            if signer.public_key.keyid in named:
                metadata.sign(signer, append=True)
        self._stored.write(metadata, name)
        return metadata

    def _write_roots(self, chain: Iterable[Metadata[Root]]) -> None:
        for each in chain:
            self._stored.write(each, f"{each.signed.version}.root.json")
        reach("release.root_stored")

    def _forget_withdrawn(self, rollouts: Targets, targets: Targets) -> None:
        """Models of which no release is left need no rollouts."""
        models = {name.model for name in checks.releases_in(targets.targets)}
        for path in list(rollouts.targets):
            if path not in map(rollouts_path, models):
                del rollouts.targets[path]

    def _forget_old_keys(self) -> None:
        """Private keys that an earlier root or targets named and the current ones do not."""
        current = {role: self._named_keys(role) for role in ONLINE_ROLES}
        for role in (roles.SNAPSHOT, roles.TIMESTAMP):
            old = {key for data in self.roots() for key in checks.read_root(data).signed.roles[role].keyids}
            self._keys.forget(old - current[role])
        every = [checks.read_targets(data).signed for data in self._stored.all_targets()]
        delegated = [targets.get_delegated_role(roles.ROLLOUTS) for targets in every]
        self._keys.forget({key for role in delegated for key in role.keyids} - current[roles.ROLLOUTS])

    # -- checks that need the disk -------------------------------------------------------------------------------

    def _require_never_other(self, before: Metadata[Targets] | None, new: Metadata[Targets]) -> None:
        """A release that was withdrawn comes back as it was or not at all: devices may run it still."""
        for each in map(checks.read_targets, self._stored.all_targets()):
            if before is not None and each.signed.version <= before.signed.version:
                checks.require_unchanged(each.signed.targets, new.signed.targets)

    def _check_files(self, targets: Mapping[str, TargetFile], files: Mapping[str, Path]) -> None:
        needed = {path for path, target in targets.items() if not self._stored.place_of(target).exists()}
        if extra := files.keys() - targets.keys():
            raise Refusal(422, "extra_file", f"{min(extra)[:200]} is not among the signed targets")
        if missing := needed - files.keys():
            raise Refusal(422, "missing_file", f"{min(missing)} is signed for and was not sent")
        for path, source in files.items():
            try:
                with source.open("rb") as file:
                    targets[path].verify_length_and_hashes(file)
            except LengthOrHashMismatchError as error:
                raise _wrong_bytes(path, error) from None
            except FileNotFoundError:  # the same upload was published by another call meanwhile
                raise Refusal(422, "missing_file", f"{path}: its upload is gone; publish once more") from None
        for name, (_, model) in checks.releases_in(targets).items():
            if name.manifest in files:
                _check_manifest(name, files[name.manifest], model)

    def _check_rollouts(self, model: str, document: Mapping[str, Any]) -> None:
        try:
            found = read_rollouts(json.dumps(document).encode(), model)
        except (Unfit, TypeError, ValueError) as error:
            raise Refusal(422, "malformed", str(error)) from None
        released = {each.name for each in self.releases()}
        for each in found.rollouts:
            name = ReleaseName(model, each.version)
            if each.action == "install" and name not in released:
                raise Refusal(409, "unknown_release", f"{name} is not a release; sign and publish it first")

    def _require_repository(self) -> None:
        if not self.exists:
            raise Refusal(
                404, "no_repository", "there are no signed releases here yet: `fedloop release init`"
            )

    def _root(self) -> Metadata[Root]:
        return self._stored.read(Root, f"{self._stored.newest_root()}.root.json")

    def _is_known(self, root: Metadata[Root]) -> bool:
        path = self._stored.metadata_file(f"{root.signed.version}.root.json")
        return self.exists and path is not None and path.read_bytes() == root.to_bytes()

    def _state(self, role: str, metadata: Metadata[Any], delegator: Root | Targets) -> RoleState:
        signed = metadata.signed
        valid = checks.is_signed(delegator, role, metadata) and not signed.is_expired(self._clock())
        return RoleState(role, signed.version, signed.expires, role not in ONLINE_ROLES, valid)


def _wrong_bytes(path: str, error: LengthOrHashMismatchError) -> Refusal:
    return Refusal(422, "wrong_bytes", f"{path} is not what was signed: {error}")


def _check_manifest(name: ReleaseName, path: Path, model: TargetFile) -> None:
    try:
        manifest = inference.from_json(path.read_bytes(), name.manifest)
    except ManifestError as error:
        raise Refusal(422, "wrong_manifest", str(error)) from None
    said = ReleaseName(manifest.model, manifest.version)
    if said != name:
        raise Refusal(422, "wrong_manifest", f"{name.manifest} says that it is of {said}")
    if manifest.file.sha256 != model.hashes["sha256"]:
        raise Refusal(422, "wrong_manifest", f"{name.manifest} is of another file than {name.file}")
