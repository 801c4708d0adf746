"""The folder that travels between those who sign and the coordinator, on a stick where need be. Nothing here uses a network.

    published/1.root.json …   every root that the coordinator has
    published/targets.json    and its targets
    root.json                 the next root, while it is being signed; often there is none
    targets.json              the next targets
    files/cnn/1/…             the files of releases that are new in it

A document that changes loses its signatures. Whoever signs reads first what changes (`Staging.changes`), and signs only
what follows from the root that lies beside the keys: whoever had this folder in between can withhold, not forge.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from securesystemslib.signer import CryptoSigner, Key
from tuf.api.metadata import Metadata, Root, Targets

from coordinator.errors import Refusal, UserError
from coordinator.releases import checks, documents, roles
from coordinator.releases.offline_keys import NAME_FIELD
from coordinator.releases.roles import LIFETIMES, ReleaseName
from edge_client.files import write_durably
from edge_client.wire.inference import MANIFEST_NAME, MODEL_NAME

TRUSTED_ROOT = "trusted-root.json"

_ROOT_NAME = re.compile(r"[1-9][0-9]{0,8}\.root\.json")


class Staging:
    """A staging folder. Every method raises `UserError` where what lies in it is not what it should be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._published = folder / "published"

    # -- what is there -------------------------------------------------------------------------------------------

    def roots(self) -> list[Metadata[Root]]:
        """Published roots, the first one first."""
        paths = [path for path in self._published.glob("*.root.json") if _ROOT_NAME.fullmatch(path.name)]
        return [self._root(path) for path in sorted(paths, key=lambda path: int(path.name.partition(".")[0]))]

    def published_targets(self) -> Metadata[Targets] | None:
        path = self._published / "targets.json"
        return self._targets(path) if path.exists() else None

    def next_root(self) -> Metadata[Root] | None:
        """The root that waits for signatures or for being published."""
        path = self.folder / "root.json"
        return self._root(path) if path.exists() else None

    def next_targets(self) -> Metadata[Targets] | None:
        path = self.folder / "targets.json"
        return self._targets(path) if path.exists() else None

    def newest_root(self) -> Root:
        """The root that what is next is to satisfy."""
        staged = self.next_root()
        found = [*self.roots(), staged] if staged is not None else self.roots()
        if not found:
            raise UserError(
                f"{self.folder}: no root is staged there; begin with `fedloop release init`, or `fedloop release fetch`"
            )
        return found[-1].signed

    def new_files(self) -> dict[str, Path]:
        """Target path -> file, of the releases that the next targets add. Hashes are checked."""
        following, before = self.next_targets(), self.published_targets()
        known = before.signed.targets if before is not None else {}
        found = {}
        for path, target in following.signed.targets.items() if following is not None else ():
            if path in known:
                continue
            file = self.folder / "files" / path
            if roles.release_of(path) is None or not file.exists():
                raise UserError(
                    f"{file}: the file of a new release is missing; `fedloop release add` it again"
                )
            with file.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != target.hashes.get("sha256"):
                    raise UserError(
                        f"{file}: not the file that targets.json names; `fedloop release add` it again"
                    )
            found[path] = file
        return found

    def changes(self) -> list[str]:
        """What those who sign agree to, a line each: all that a sound document can change is among them."""
        self._require_sound()
        lines, before = [], self.published_targets()
        if (root := self.next_root()) is not None:
            old = self.roots()[-1].signed if self.roots() else None
            lines.append(f"root {root.signed.version}, until {root.signed.expires:%Y-%m-%d}")
            lines += [f"  {line}" for line in _key_changes(old, root.signed)]
        if (targets := self.next_targets()) is not None:
            new, old_targets = targets.signed, before.signed.targets if before is not None else {}
            lines.append(f"targets {new.version}, until {new.expires:%Y-%m-%d}")
            there, here = checks.releases_in(old_targets), checks.releases_in(new.targets)
            for name in sorted(here.keys() - there.keys()):
                manifest, file = here[name]
                lines.append(f"  adds {name}: {file.length} bytes, SHA-256 {file.hashes['sha256']}")
                lines.append(f"    its manifest: SHA-256 {manifest.hashes['sha256']}")
            lines += [f"  withdraws {name}" for name in sorted(there.keys() - here.keys())]
            keys = _rollouts_keys(new)
            if before is None or _rollouts_keys(before.signed).keys() != keys.keys():
                lines.append(f"  rollouts are signed by {', '.join(map(_named, keys.values()))}")
        return lines

    def root_keys(self) -> list[str]:
        """Who signs the root that all here follows from."""
        root = self.roots()[-1].signed if self.roots() else self.newest_root()
        return [_named(root.keys[key_id]) for key_id in root.roles[roles.ROOT].keyids if key_id in root.keys]

    def missing(self) -> list[str]:
        """The signatures that are still needed, a line each."""
        lines = []
        published = [root.signed for root in self.roots()[-1:]]
        root, targets = self.next_root(), self.next_targets()
        if root is not None:
            for each in (*published, root.signed):
                lines += _unsigned(each, roles.ROOT, root)
        if targets is not None:
            lines += _unsigned(self.newest_root(), roles.TARGETS, targets)
        return list(dict.fromkeys(lines))

    # -- changes -------------------------------------------------------------------------------------------------

    def begin(self, keys: Mapping[str, Key], rollouts_key: Key, now: datetime) -> None:
        """Stages the first root and the first targets in a new folder."""
        if self.folder.exists() and any(self.folder.iterdir()):
            raise UserError(
                f"--staging {self.folder}: the folder is not empty; a repository begins in a new one"
            )
        self._write("root.json", Metadata(documents.root_naming(keys, 1, now)))
        self._write("targets.json", Metadata(documents.first_targets(rollouts_key, now)))

    def update(self, published_roots: Sequence[bytes], targets: bytes) -> list[str]:
        """Takes over what a coordinator has, if it follows from what is here.

        What was staged stays if it still comes next; the names of documents that do not, and were dropped.
        """
        try:
            chain, signed = [checks.read_root(data) for data in published_roots], checks.read_targets(targets)
        except Refusal as error:
            raise UserError(f"the coordinator's metadata: {error}; nothing was taken over") from None
        _require_chain(chain, self.roots(), "the coordinator's roots")
        if not checks.is_signed(chain[-1].signed, roles.TARGETS, signed):
            raise UserError(
                "the coordinator's targets are not signed as its root asks; nothing was taken over"
            )
        before = self.published_targets()
        if before is not None and signed.signed.version < before.signed.version:
            raise UserError("the coordinator has older targets than this folder; nothing was taken over")
        self._take_over(chain, signed)
        dropped = []
        root, following = self.next_root(), self.next_targets()
        if root is not None and root.signed.version != chain[-1].signed.version + 1:
            dropped.append("root.json")
        if following is not None and following.signed.version != signed.signed.version + 1:
            dropped.append("targets.json")
        for name in dropped:
            (self.folder / name).unlink()
        return dropped

    def add(self, folder: Path, now: datetime) -> ReleaseName:
        """Stages the release in a folder of `manifest.json` and `model.tflite`."""
        following = self._following_targets(now)
        name = documents.add_release(following, folder)
        for path, file in ((name.manifest, MANIFEST_NAME), (name.file, MODEL_NAME)):
            copy = self.folder / "files" / path
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / file, copy)
            except OSError as error:
                raise UserError(f"{copy}: {error.strerror}") from None
        self._write("targets.json", Metadata(following))
        self.new_files()
        return name

    def withdraw(self, name: ReleaseName, now: datetime) -> None:
        """Stages that a release is no more."""
        following = self._following_targets(now)
        documents.withdraw_release(following, name)
        self._write("targets.json", Metadata(following))

    def extend(self, now: datetime, *, root: bool) -> None:
        """Stages targets, and with `root` the root too, as they are, to be signed for another term."""
        self._write("targets.json", Metadata(self._following_targets(now)))
        if root:
            self._write("root.json", Metadata(self._following_root(now)))

    def change_keys(self, keys: Mapping[str, Key], now: datetime) -> None:
        """Stages a root that names these keys instead of those with the same names; `rollouts` goes to targets."""
        targets = self.next_targets() or self.published_targets()
        named = [
            *self.newest_root().keys.values(),
            *(_rollouts_keys(targets.signed).values() if targets else ()),
        ]
        if set(map(checks.content_of, keys.values())) <= set(map(checks.content_of, named)):
            raise UserError(f"{self.folder}: nothing changes: the keys given are named there already")
        if root_keys := {name: key for name, key in keys.items() if name != roles.ROLLOUTS}:
            root = self._following_root(now)
            for name, key in root_keys.items():
                _exchange(root, name, key)
            self._write("root.json", Metadata(root))
        if {roles.TARGETS, roles.ROLLOUTS} & keys.keys():
            following = self._following_targets(now)
            if roles.ROLLOUTS in keys:
                documents.delegate_rollouts(following, keys[roles.ROLLOUTS])
            self._write("targets.json", Metadata(following))

    def sign(self, signers: Sequence[CryptoSigner], trusted: Path) -> int:
        """Signs with each key whatever asks for it; how many signatures were made. `trusted`: see the module's story.

        Raises:
            UserError: the staged documents do not follow from the trusted root, or files are not what they name.
        """
        self._require_trusted(trusted)
        self._require_sound()
        self.new_files()
        published = [root.signed for root in self.roots()[-1:]]
        made = 0
        if (root := self.next_root()) is not None:
            made += _sign(root, roles.ROOT, [*published, root.signed], signers)
            self._write("root.json", root)
        if (targets := self.next_targets()) is not None:
            made += _sign(targets, roles.TARGETS, [*published, self.newest_root()], signers)
            self._write("targets.json", targets)
        if made:
            pinned = self.roots()[-1] if published else root
            assert pinned is not None
            _replace(trusted, pinned)
        return made

    def now_published(self) -> None:
        """Remembers that what was staged is what counts now."""
        roots = self.roots() + [root for root in (self.next_root(),) if root is not None]
        targets = self.next_targets() or self.published_targets()
        assert targets is not None
        self._take_over(roots, targets)
        (self.folder / "root.json").unlink(missing_ok=True)
        (self.folder / "targets.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "files", ignore_errors=True)

    # -- within ---------------------------------------------------------------------------------------------------

    def _take_over(self, roots: Sequence[Metadata[Root]], targets: Metadata[Targets]) -> None:
        for root in roots:
            self._write(f"published/{root.signed.version}.root.json", root)
        self._write("published/targets.json", targets)

    def _following_targets(self, now: datetime) -> Targets:
        staged, published = self.next_targets(), self.published_targets()
        if staged is not None and (
            published is None or staged.signed.version == published.signed.version + 1
        ):
            staged.signed.expires = now + LIFETIMES[roles.TARGETS]
            return staged.signed
        if published is None:
            self.newest_root()
            raise UserError(f"{self.folder}: no targets are staged there; `fedloop release fetch` them")
        return documents.next_targets(published.signed, now)

    def _following_root(self, now: datetime) -> Root:
        published, root = self.roots(), self.newest_root()
        if published and root.version == published[-1].signed.version:
            root.version += 1
        root.expires = now + LIFETIMES[roles.ROOT]
        return root

    def _require_sound(self) -> None:
        """That a coordinator would take what is staged: whoever carried the folder may have written what no list shows."""
        root, targets, before = self.next_root(), self.next_targets(), self.published_targets()
        path = self.folder / "root.json"
        try:
            if root is not None:
                checks.require_strong(root.signed)
            path = self.folder / "targets.json"
            if targets is not None:
                checks.require_sound(before.signed if before is not None else None, targets.signed)
        except Refusal as error:
            raise UserError(f"{path} must not be signed: {error}") from None

    def _require_trusted(self, trusted: Path) -> None:
        """That roots follow one another from the trusted one, and published targets from them."""
        roots, pinned = self.roots(), [self._root(trusted)] if trusted.exists() else []
        staged = self.next_root()
        if pinned:
            version = pinned[0].signed.version
            same = [
                root for root in [*roots, *([staged] if staged else [])] if root.signed.version == version
            ]
            if not same or same[0].signed_bytes != pinned[0].signed_bytes:
                raise UserError(
                    f"{self.folder} does not follow from {trusted}, the root these keys have signed under; if they are to "
                    "serve another repository from now on, remove that file"
                )
        _require_chain(roots, [], str(self.folder / "published"))
        published = self.published_targets()
        if published is not None and not (
            roots and checks.is_signed(roots[-1].signed, roles.TARGETS, published)
        ):
            raise UserError(f"{self._published / 'targets.json'} is not signed as the root beside it asks")

    def _root(self, path: Path) -> Metadata[Root]:
        try:
            return checks.read_root(_bytes(path))
        except Refusal as error:
            raise _damaged(path, error) from None

    def _targets(self, path: Path) -> Metadata[Targets]:
        try:
            return checks.read_targets(_bytes(path))
        except Refusal as error:
            raise _damaged(path, error) from None

    def _write(self, name: str, metadata: Metadata[Root] | Metadata[Targets]) -> None:
        _replace(self.folder / name, metadata)


def _require_chain(chain: Sequence[Metadata[Root]], known: Sequence[Metadata[Root]], what: str) -> None:
    """Roots 1, 2, 3…, each signed by its forerunner and itself, the first of them those known. Expiry does not matter here."""
    for place, root in enumerate(chain):
        expected = place < len(known) and known[place].signed_bytes != root.signed_bytes
        signers = chain[max(place - 1, 0) : place + 1]
        if (
            expected
            or root.signed.version != place + 1
            or not all(checks.is_signed(each.signed, roles.ROOT, root) for each in signers)
        ):
            raise UserError(
                f"{what}: root {root.signed.version} does not follow from the one before; nothing was done"
            )
    if len(chain) < len(known):
        raise UserError(f"{what}: older than what is here; nothing was done")


def _exchange(root: Root, name: str, key: Key) -> None:
    role = roles.ROOT if name.startswith("root-") else name
    for key_id in list(root.roles[role].keyids):
        if role != roles.ROOT or root.keys[key_id].unrecognized_fields.get(NAME_FIELD) == name:
            root.revoke_key(key_id, role)
    root.add_key(key, role)


def _sign(
    metadata: Metadata[Root] | Metadata[Targets],
    role: str,
    delegators: Sequence[Root],
    signers: Sequence[CryptoSigner],
) -> int:
    named = {key for delegator in delegators for key in delegator.roles[role].keyids}
    wanted = [signer for signer in signers if signer.public_key.keyid in named]
    for signer in wanted:
        metadata.sign(signer, append=True)
    return len(wanted)


def _unsigned(delegator: Root, role: str, metadata: Metadata[Root] | Metadata[Targets]) -> list[str]:
    result = delegator.get_verification_result(role, metadata.signed_bytes, metadata.signatures)
    if result.verified:
        return []
    return [f"{role} {metadata.signed.version} by {_named(key)}" for key in result.unsigned.values()]


def _key_changes(old: Root | None, new: Root) -> list[str]:
    """Who signs from now on, and who no more, by what keys are: an id may be given to another key."""
    lines = []
    for role, named in new.roles.items():
        here = _keys_named(new.keys, named.keyids)
        there = _keys_named(old.keys, old.roles[role].keyids) if old is not None else {}
        lines += [f"{role} is signed by {_named(here[key])}" for key in here if key not in there]
        lines += [f"{role} is signed no more by {_named(there[key])}" for key in there if key not in here]
        if old is not None and old.roles[role].threshold != named.threshold:
            lines.append(f"{role} needs {named.threshold} signatures, {old.roles[role].threshold} before")
    return lines


def _rollouts_keys(targets: Targets) -> dict[str, Key]:
    delegations = targets.delegations
    assert delegations is not None
    return _keys_named(delegations.keys, targets.get_delegated_role(roles.ROLLOUTS).keyids)


def _keys_named(keys: Mapping[str, Key], key_ids: Iterable[str]) -> dict[str, Key]:
    """Content -> key, of those that are there."""
    return {checks.content_of(keys[key_id]): keys[key_id] for key_id in key_ids if key_id in keys}


def _named(key: Key) -> str:
    name = key.unrecognized_fields.get(NAME_FIELD)
    return f"{name} ({_short(key.keyid)})" if name else f"key {_short(key.keyid)}"


def _short(key_id: str) -> str:
    return key_id[:12]


def _damaged(path: Path, error: Refusal) -> UserError:
    again = "fetch it" if path.parent.name == "published" else "stage the change"
    return UserError(f"{path}: {error}; remove it, and {again} again")


def _replace(path: Path, metadata: Metadata[Root] | Metadata[Targets]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, metadata.to_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
