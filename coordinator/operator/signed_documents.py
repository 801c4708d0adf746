"""The documents that offline keys sign: a root, targets, and their next versions. Builds them; does not sign."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from securesystemslib.signer import Key
from tuf.api.metadata import DelegatedRole, Delegations, Metadata, Root, TargetFile, Targets

from coordinator.errors import UserError
from coordinator.releases import roles
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
