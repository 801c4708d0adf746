"""The documents that offline keys sign: a root, targets, and their next versions.

Builds them, and describes in lines for the people who sign what they change and which signatures they need. Does not sign.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from securesystemslib.signer import Key
from tuf.api.metadata import DelegatedRole, Delegations, Metadata, Root, TargetFile, Targets

from coordinator.errors import UserError
from coordinator.releases import checks, roles
from coordinator.releases.roles import LIFETIMES, ROLLOUTS_PATHS, ReleaseName
from edge_client.wire import blocks, inference
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME

FILES = (MANIFEST_NAME, MODEL_NAME, "report.json")
"""Files of a release folder. The report says how it was made, and is not published."""


def make_root(keys: Mapping[str, Key], version: int, now: datetime) -> Root:
    """A root with the keys `root-1`, `root-2` (both must sign), `targets`, `snapshot` and `timestamp`."""
    root = Root(version=version, expires=now + LIFETIMES[roles.ROOT], consistent_snapshot=True)
    for name, key in keys.items():
        root.add_key(key, roles.ROOT if name.startswith("root-") else name)
    root.roles[roles.ROOT].threshold = 2
    return root


def first_targets(rollouts_key: Key, now: datetime) -> Targets:
    """Targets without releases."""
    targets = Targets(version=1, expires=now + LIFETIMES[roles.TARGETS])
    delegate_rollouts(targets, rollouts_key)
    return targets


def next_targets(current: Targets, now: datetime) -> Targets:
    """The next version of `current`, with the same releases."""
    following = Metadata[Targets].from_bytes(Metadata(current).to_bytes()).signed
    following.version += 1
    following.expires = now + LIFETIMES[roles.TARGETS]
    return following


def delegate_rollouts(targets: Targets, key: Key) -> None:
    """Delegates rollouts to `key`, and to no other."""
    role = DelegatedRole(roles.ROLLOUTS, [key.keyid], 1, terminating=True, paths=[ROLLOUTS_PATHS])
    targets.delegations = Delegations({key.keyid: key}, {roles.ROLLOUTS: role})


def add_release(targets: Targets, folder: Path) -> ReleaseName:
    """Adds the release in a folder of `manifest.json` and `model.tflite`; returns its name.

    Raises:
        UserError: the folder is not a release, its manifest is for another file, or this version exists with other bytes.
    """
    name = release_in(folder)
    for path, file in ((name.manifest, folder / MANIFEST_NAME), (name.file, folder / MODEL_NAME)):
        target = TargetFile.from_file(path, str(file), ["sha256"])
        if path == name.file:
            target.unrecognized_fields["custom"] = blocks.describe(file.read_bytes())
        if targets.targets.setdefault(path, target) != target:
            raise UserError(
                f"{folder}: {name} exists already, with another {file.name}; give it a new version"
            )
    return name


def withdraw_release(targets: Targets, name: ReleaseName) -> None:
    """Removes a release. Raises: UserError: it does not exist."""
    if name.manifest not in targets.targets:
        raise UserError(f"{name}: there is no such release")
    del targets.targets[name.manifest], targets.targets[name.file]


def real_rows(manifest: Path) -> int:
    """Number of rows of real data in a manifest. Raises: UserError: it cannot be read."""
    try:
        return len(inference.from_json(manifest.read_bytes(), str(manifest)).golden.real_y)
    except OSError as error:
        raise UserError(f"{manifest}: {error.strerror}") from None
    except ManifestError as error:
        raise UserError(str(error)) from None


def release_in(folder: Path) -> ReleaseName:
    """The name of the release in a folder, as its manifest has it.

    Raises:
        UserError: a file is missing or unreadable, the two do not belong together, or there are other files.
    """
    try:
        text = (folder / MANIFEST_NAME).read_bytes()
        with (folder / MODEL_NAME).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; a release is a folder of {MANIFEST_NAME} and {MODEL_NAME}"
        ) from None
    try:
        manifest = inference.from_json(text, str(folder / MANIFEST_NAME))
    except ManifestError as error:
        raise UserError(str(error)) from None
    name = ReleaseName(manifest.model, manifest.version)
    if not name.is_valid:
        raise UserError(
            f"{folder / MANIFEST_NAME}: {str(name)[:100]!r} is not the name of a release, such as cnn:1"
        )
    if sha256 != manifest.file.sha256:
        raise UserError(
            f"{folder / MANIFEST_NAME} is for another file than {MODEL_NAME}, whose SHA-256 is {sha256}"
        )
    if others := sorted(path.name for path in folder.iterdir() if path.name not in FILES):
        # The whole folder is meant to be passed on.
        raise UserError(
            f"{folder}: holds {', '.join(others)[:200]}, not a file of a release ({', '.join(FILES)}); rows of data may lie "
            "there: remove it, or export again into another folder"
        )
    return name


def describe_root(before: Root | None, root: Root) -> list[str]:
    """Version and term of a root, and how its keys differ from those of the published one."""
    lines = [f"root {root.version}, until {root.expires:%Y-%m-%d}"]
    return lines + [f"  {line}" for line in _describe_key_changes(before, root)]


def describe_targets(before: Targets | None, targets: Targets, files: Mapping[str, Path]) -> list[str]:
    """Version and term of targets, the releases they add and withdraw, and a change of the rollouts key.

    Args:
        files: target path -> file, of every new release.
    """
    lines = [f"targets {targets.version}, until {targets.expires:%Y-%m-%d}"]
    published = checks.releases_in(before.targets if before is not None else {})
    staged = checks.releases_in(targets.targets)
    for name in sorted(staged.keys() - published.keys()):
        manifest, file = staged[name]
        lines.append(f"  adds {name}: {file.length} bytes, SHA-256 {file.hashes['sha256']}")
        lines.append(f"    its manifest: SHA-256 {manifest.hashes['sha256']}")
        lines.append(f"    {_describe_real_rows(real_rows(files[name.manifest]))}")
    lines += [f"  withdraws {name}" for name in sorted(published.keys() - staged.keys())]
    keys = rollouts_keys(targets)
    if before is None or rollouts_keys(before).keys() != keys.keys():
        lines.append(f"  rollouts are signed by {', '.join(map(describe_key, keys.values()))}")
    return lines


def missing_signatures(
    published: Root | None, root: Metadata[Root] | None, targets: Metadata[Targets] | None, newest_root: Root
) -> list[str]:
    """The signatures that staged documents still need. A new root needs those of its predecessor too."""
    lines: list[str] = []
    if root is not None:
        for delegator in (published, root.signed):
            lines += _unsigned(delegator, roles.ROOT, root) if delegator is not None else ()
    if targets is not None:
        lines += _unsigned(newest_root, roles.TARGETS, targets)
    return list(dict.fromkeys(lines))


def rollouts_keys(targets: Targets) -> dict[str, Key]:
    """Content -> key, of the keys that sign rollouts."""
    delegations = targets.delegations
    assert delegations is not None
    return _keys_by_content(delegations.keys, targets.get_delegated_role(roles.ROLLOUTS).keyids)


def describe_key(key: Key) -> str:
    """`root-1 (0123456789ab)`: the name that its owner gave it, and the beginning of its id."""
    name = key.unrecognized_fields.get(roles.NAME_FIELD)
    return f"{name} ({key.keyid[:12]})" if name else f"key {key.keyid[:12]}"


def _describe_real_rows(count: int) -> str:
    if not count:
        return "no rows of real data"
    return f"PUBLISHES {count} row{'s' * (count != 1)} of real data, readable by everyone with the release"


def _describe_key_changes(before: Root | None, root: Root) -> Iterator[str]:
    """Compares keys by content: an id may be reused for another key."""
    for role, delegation in root.roles.items():
        staged = _keys_by_content(root.keys, delegation.keyids)
        published = _keys_by_content(before.keys, before.roles[role].keyids) if before is not None else {}
        for content in [each for each in staged if each not in published]:
            yield f"{role} is signed by {describe_key(staged[content])}"
        for content in [each for each in published if each not in staged]:
            yield f"{role} is no longer signed by {describe_key(published[content])}"
        if before is not None and before.roles[role].threshold != delegation.threshold:
            yield f"{role} needs {delegation.threshold} signatures, {before.roles[role].threshold} before"


def _unsigned(delegator: Root, role: str, metadata: Metadata[Root] | Metadata[Targets]) -> Sequence[str]:
    result = delegator.get_verification_result(role, metadata.signed_bytes, metadata.signatures)
    if result.verified:
        return []
    return [f"{role} {metadata.signed.version} by {describe_key(key)}" for key in result.unsigned.values()]


def _keys_by_content(keys: Mapping[str, Key], key_ids: Iterable[str]) -> dict[str, Key]:
    return {checks.content_of(keys[key_id]): keys[key_id] for key_id in key_ids if key_id in keys}
