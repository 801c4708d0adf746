"""Verification of signed metadata before any of it is stored, and of the files and rollouts that come with it.

`tuf` itself checks signatures, thresholds and expiry, as on a device. Our own rules come on top: versions are
consecutive, a release has its two files and never changes, and only rollouts are delegated. Nothing here writes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from securesystemslib.signer import Key
from tuf.api.exceptions import LengthOrHashMismatchError, RepositoryError
from tuf.api.metadata import Metadata, Root, TargetFile, Targets
from tuf.api.serialization import DeserializationError

from coordinator.errors import Refusal
from coordinator.model_references import is_sha256
from coordinator.releases import roles
from coordinator.releases.roles import METADATA_LIMITS_BYTES, ReleaseName, release_of
from edge_client.wire import inference
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import from_json as read_rollouts
from edge_client.wire.strict import InvalidDocument


def read_root(data: bytes) -> Metadata[Root]:
    """A root as sent. Raises: Refusal: 413 `oversized`, 422 `malformed`."""
    return _read(data, Root, roles.ROOT)


def read_targets(data: bytes) -> Metadata[Targets]:
    """Targets as sent. Raises: Refusal: 413 `oversized`, 422 `malformed`."""
    return _read(data, Targets, roles.TARGETS)


def check_chain(trusted: Metadata[Root] | None, chain: Sequence[Metadata[Root]], now: datetime) -> Root:
    """The root to trust after `chain`; its predecessor's keys and its own must have signed each root (spec 5.3).

    `trusted`: None for a new repository.

    Raises:
        Refusal: 422 `wrong_version`, `bad_signature`, `expired`, `weak_root`.
    """
    newest = trusted
    for each in chain:
        version = newest.signed.version + 1 if newest is not None else 1
        if each.signed.version != version:
            raise Refusal(422, "wrong_version", f"root has version {each.signed.version}, expected {version}")
        for signer in (each,) if newest is None else (newest, each):
            _verify(signer.signed, roles.ROOT, each)
        newest = each
    if newest is None:
        raise Refusal(422, "no_root", "a new repository needs a root: `fedloop release init`")
    require_strong(newest.signed)
    _require_fresh(newest.signed, roles.ROOT, now)
    return newest.signed


def check_targets(
    root: Root, current: Targets | None, new: Metadata[Targets], rollouts_keys: Collection[str], now: datetime
) -> None:
    """Requires that `new` may follow `current` under `root`. `rollouts_keys`: ids of those that the coordinator holds.

    Raises:
        Refusal: 422 `bad_signature`, `wrong_version`, `expired`, `bad_path`, `incomplete_release`, `changed_release`,
            `bad_delegation`, `other_online_keys`; 413 `oversized`.
    """
    _verify(root, roles.TARGETS, new)
    expected = 1 if current is None else current.version + 1
    if new.signed.version != expected:
        raise Refusal(
            422,
            "wrong_version",
            f"targets has version {new.signed.version}, expected {expected}; first run `fedloop release fetch`",
        )
    _require_fresh(new.signed, roles.TARGETS, now)
    require_valid_targets(current, new.signed)
    role = new.signed.get_delegated_role(roles.ROLLOUTS)
    if role.threshold != 1 or not set(role.keyids) & set(rollouts_keys):
        raise _other_keys("targets trusts for rollouts")


def require_valid_targets(current: Targets | None, new: Targets) -> None:
    """Requires that `new` holds complete releases, changes none of `current`, and delegates rollouts only.

    Raises:
        Refusal: 422 `bad_path`, `incomplete_release`, `changed_release`, `bad_delegation`; 413 `oversized`.
    """
    _require_releases(new.targets)
    if current is not None:
        require_unchanged(current.targets, new.targets)
    delegated = (new.delegations.roles or {}) if new.delegations is not None else {}
    role = delegated.get(roles.ROLLOUTS)
    if role is None or len(delegated) != 1 or role.paths != [roles.ROLLOUTS_PATHS] or not role.terminating:
        raise Refusal(
            422,
            "bad_delegation",
            f"targets must delegate {roles.ROLLOUTS_PATHS} to the role {roles.ROLLOUTS}, terminating, and nothing else",
        )


def require_strong(root: Root) -> None:
    """Requires that two people must sign the root, with keys that are all offline.

    Keys are compared by content: one key under two ids would allow one person two signatures.

    Raises:
        Refusal: 422 `weak_root`.
    """
    role = root.get_delegated_role(roles.ROOT)
    if role.threshold < 2 or not root.consistent_snapshot:
        raise Refusal(422, "weak_root", "root must need two signatures, and consistent snapshots")
    if len(_keys_of(root, roles.ROOT)) < len(role.keyids):
        raise Refusal(422, "weak_root", "root names one key under two ids; two signatures need two keys")
    offline = _keys_of(root, roles.ROOT) | _keys_of(root, roles.TARGETS)
    if offline & (_keys_of(root, roles.SNAPSHOT) | _keys_of(root, roles.TIMESTAMP)):
        raise Refusal(422, "weak_root", "an online key may not sign root or targets")


def require_online_keys(root: Root, held: Mapping[str, Collection[str]]) -> None:
    """Requires that this coordinator can sign under the root. `held`: role -> ids of its keys."""
    for role in (roles.SNAPSHOT, roles.TIMESTAMP):
        named = root.get_delegated_role(role)
        if named.threshold != 1 or not set(named.keyids) & set(held[role]):
            raise _other_keys(f"root trusts for {role}")


def releases_in(targets: Mapping[str, TargetFile]) -> dict[ReleaseName, tuple[TargetFile, TargetFile]]:
    """Each release's manifest and model file."""
    names = sorted({name for path in targets if (name := release_of(path)) is not None})
    return {name: (targets[name.manifest], targets[name.file]) for name in names}


def content_of(key: Key) -> str:
    """A key's identity without its id: metadata may give any id to any key."""
    return json.dumps([key.keytype, key.scheme, key.keyval], sort_keys=True)


def is_signed(delegator: Root | Targets, role: str, metadata: Metadata[Root] | Metadata[Targets]) -> bool:
    """Whether enough of the keys that `delegator` names for a role have signed."""
    try:
        _verify(delegator, role, metadata)
    except Refusal:
        return False
    return True


def _read(data: bytes, kind: type, role: str) -> Metadata:  # type: ignore[type-arg]
    if len(data) > METADATA_LIMITS_BYTES[role]:
        limit = METADATA_LIMITS_BYTES[role]
        raise Refusal(413, "oversized", f"{role} has {len(data)} bytes, expected at most {limit}")
    try:
        metadata: Metadata = Metadata.from_bytes(data)  # type: ignore[type-arg]
    except (DeserializationError, RecursionError) as error:
        raise Refusal(
            422, "malformed", f"{role} is not TUF metadata: {str(error.__cause__ or error)[:200]}"
        ) from None
    if not isinstance(metadata.signed, kind):
        raise Refusal(422, "malformed", f"expected {role} metadata, this is {metadata.signed.type}")
    return metadata


def _verify(delegator: Root | Targets, role: str, metadata: Metadata[Root] | Metadata[Targets]) -> None:
    try:
        delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError) as error:
        delegating = f"root {delegator.version}" if isinstance(delegator, Root) else "targets"
        raise Refusal(
            422,
            "bad_signature",
            f"{role} {metadata.signed.version} is not signed as {delegating} requires: {error}",
        ) from None


def _keys_of(root: Root, role: str) -> set[str]:
    """The public keys of a role (`content_of`)."""
    named = (root.keys.get(key_id) for key_id in root.get_delegated_role(role).keyids)
    return {content_of(key) for key in named if key is not None}


def _require_fresh(signed: Root | Targets, role: str, now: datetime) -> None:
    if signed.is_expired(now):
        raise Refusal(
            422, "expired", f"{role} {signed.version} expired at {signed.expires:%Y-%m-%d %H:%M} UTC"
        )


def _require_releases(targets: Mapping[str, TargetFile]) -> None:
    for path, target in targets.items():
        name = release_of(path)
        if name is None:
            raise Refusal(
                422,
                "bad_path",
                f"target {path[:200]!r} is not a file of a release, such as `model/1/manifest.json`",
            )
        if missing := {name.manifest, name.file} - targets.keys():
            raise Refusal(422, "incomplete_release", f"release {name} lacks {min(missing)}")
        if set(target.hashes) != {"sha256"} or not is_sha256(target.hashes["sha256"]):
            raise Refusal(422, "malformed", f"target {path} must have one hash, SHA-256 in hex")
        limit = roles.MANIFEST_LIMIT_BYTES if path == name.manifest else roles.TARGET_LIMIT_BYTES
        if target.length > limit:
            raise Refusal(
                413, "oversized", f"target {path} has {target.length} bytes, expected at most {limit}"
            )


def require_unchanged(before: Mapping[str, TargetFile], after: Mapping[str, TargetFile]) -> None:
    """Requires that no target changes its bytes: devices that run a release must never find another under its name.

    Raises:
        Refusal: 422 `changed_release`.
    """
    for path in sorted(before.keys() & after.keys()):
        if (before[path].length, before[path].hashes) != (after[path].length, after[path].hashes):
            raise Refusal(
                422, "changed_release", f"{path} was released with other bytes; release a new version instead"
            )


def _other_keys(what: str) -> Refusal:
    return Refusal(
        422,
        "other_online_keys",
        f"{what} no key of this coordinator; see `fedloop release online-keys`",
    )


def check_files(targets: Mapping[str, TargetFile], files: Mapping[str, Path]) -> None:
    """Checks that files have the signed bytes, and manifests describe their releases.

    `files`: target path -> file.

    Raises:
        Refusal: 422 `wrong_bytes`, `wrong_manifest`, `missing_file`.
    """
    for path, source in files.items():
        try:
            with source.open("rb") as file:
                targets[path].verify_length_and_hashes(file)
        except LengthOrHashMismatchError as error:
            raise wrong_bytes(path, error) from None
        except FileNotFoundError:  # another call published the same upload meanwhile
            raise Refusal(422, "missing_file", f"{path}: its upload is gone; publish again") from None
    for name, (_, model) in releases_in(targets).items():
        if name.manifest in files:
            _check_manifest(name, files[name.manifest], model)


def check_rollouts(model: str, document: Mapping[str, Any], released: Collection[ReleaseName]) -> None:
    """Checks a rollouts document of a model.

    Raises:
        Refusal: 422 `malformed`, also for another model; 409 `unknown_release`.
    """
    try:
        parsed = read_rollouts(json.dumps(document).encode(), model)
    except (InvalidDocument, TypeError, ValueError) as error:
        raise Refusal(422, "malformed", str(error)) from None
    for each in parsed.rollouts:
        name = ReleaseName(model, each.version)
        if each.action == "install" and name not in released:
            raise Refusal(409, "unknown_release", f"{name} is not a release; sign and publish it first")


def wrong_bytes(path: str, error: LengthOrHashMismatchError) -> Refusal:
    """The refusal of a file that is not the signed one."""
    return Refusal(422, "wrong_bytes", f"{path} is not the signed file: {error}")


def _check_manifest(name: ReleaseName, path: Path, model: TargetFile) -> None:
    try:
        manifest = inference.from_json(path.read_bytes(), name.manifest)
    except ManifestError as error:
        raise Refusal(422, "wrong_manifest", str(error)) from None
    described = ReleaseName(manifest.model, manifest.version)
    if described != name:
        raise Refusal(422, "wrong_manifest", f"{name.manifest} describes {described}")
    if manifest.file.sha256 != model.hashes["sha256"]:
        raise Refusal(422, "wrong_manifest", f"{name.manifest} describes another file than {name.file}")
