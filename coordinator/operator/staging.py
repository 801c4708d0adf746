"""The folder that travels between the people who sign and the coordinator, on a USB stick if necessary. Nothing here uses a network.

    published/1.root.json …   every root that the coordinator has
    published/targets.json    and its targets
    root.json                 the next root, while it is being signed; often there is none
    targets.json              the next targets
    files/cnn/1/…             the files of the new releases in it

A document that changes loses its signatures. Signers read what changes first (`Staging.describe_changes`), and sign only
what follows from the root beside their keys. Whoever held this folder in between can withhold changes, but not forge them.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from securesystemslib.signer import CryptoSigner, Key
from tuf.api.metadata import Metadata, Root, Targets

from coordinator.certificates import read_file
from coordinator.errors import Refusal, UserError
from coordinator.operator import signed_documents
from coordinator.releases import checks, roles
from coordinator.releases.roles import LIFETIMES, ReleaseName
from edge_client.files import write_durably
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME

TRUSTED_ROOT = "trusted-root.json"

Document = TypeVar("Document", Root, Targets)

_ROOT_NAME = re.compile(r"[1-9][0-9]{0,8}\.root\.json")


class Staging:
    """A staging folder. Every method raises `UserError` if the contents are missing, damaged or inconsistent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._published = folder / "published"

    # -- reading -------------------------------------------------------------------------------------------------

    def roots(self) -> list[Metadata[Root]]:
        """Published roots, oldest first."""
        paths = [path for path in self._published.glob("*.root.json") if _ROOT_NAME.fullmatch(path.name)]
        ordered = sorted(paths, key=lambda path: int(path.name.partition(".")[0]))
        return [root for path in ordered if (root := _read(path, checks.read_root)) is not None]

    def published_targets(self) -> Metadata[Targets] | None:
        return _read(self._published / "targets.json", checks.read_targets)

    def next_root(self) -> Metadata[Root] | None:
        """The root that waits for signatures or publication."""
        return _read(self.folder / "root.json", checks.read_root)

    def next_targets(self) -> Metadata[Targets] | None:
        return _read(self.folder / "targets.json", checks.read_targets)

    def newest_root(self) -> Root:
        """The root that the next documents must satisfy."""
        if (staged := self.next_root()) is not None:
            return staged.signed
        if (published := self._published_root()) is not None:
            return published
        raise UserError(
            f"{self.folder}: no root is staged there; begin with `fedloop release init`, or `fedloop release fetch`"
        )

    def new_files(self) -> dict[str, Path]:
        """Target path -> file, of the releases that the next targets add. Checks their hashes."""
        following, before = self.next_targets(), self.published_targets()
        known = before.signed.targets if before is not None else {}
        files = {}
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
            files[path] = file
        return files

    def describe_changes(self) -> list[str]:
        """What signers agree to, a line each. Lists everything that a valid document can change."""
        self._require_sound()
        lines, published = [], self.published_targets()
        if (root := self.next_root()) is not None:
            lines += signed_documents.describe_root(self._published_root(), root.signed)
        if (targets := self.next_targets()) is not None:
            before = published.signed if published is not None else None
            lines += signed_documents.describe_targets(before, targets.signed, self.new_files())
        return lines

    def describe_root_keys(self) -> list[str]:
        """The root keys that all documents here depend on."""
        root = self._published_root() or self.newest_root()
        return [
            signed_documents.describe_key(root.keys[key_id])
            for key_id in root.roles[roles.ROOT].keyids
            if key_id in root.keys
        ]

    def missing_signatures(self) -> list[str]:
        """The signatures that are still needed, a line each."""
        root, targets = self.next_root(), self.next_targets()
        if root is None and targets is None:
            return []
        return signed_documents.missing_signatures(self._published_root(), root, targets, self.newest_root())

    # -- staging -------------------------------------------------------------------------------------------------

    def initialize(self, keys: Mapping[str, Key], rollouts_key: Key, now: datetime) -> None:
        """Stages the first root and the first targets in a new folder."""
        if self.folder.exists() and any(self.folder.iterdir()):
            raise UserError(
                f"--staging {self.folder}: the folder is not empty; a repository begins in a new one"
            )
        self._write("root.json", Metadata(signed_documents.make_root(keys, 1, now)))
        self._write("targets.json", Metadata(signed_documents.first_targets(rollouts_key, now)))

    def update(self, published_roots: Sequence[bytes], targets: bytes) -> list[str]:
        """Copies a coordinator's metadata, if it follows from the metadata here.

        Staged documents stay if they are still next. Returns the names of those that are not, and were dropped.
        """
        try:
            chain, signed = [checks.read_root(data) for data in published_roots], checks.read_targets(targets)
        except Refusal as error:
            raise UserError(f"the coordinator's metadata: {error}; nothing was copied") from None
        _require_chain(chain, self.roots(), "the coordinator's roots")
        if not checks.is_signed(chain[-1].signed, roles.TARGETS, signed):
            raise UserError(
                "the coordinator's targets lack the signatures that its root requires; nothing was copied"
            )
        before = self.published_targets()
        if before is not None and signed.signed.version < before.signed.version:
            raise UserError("the coordinator has older targets than this folder; nothing was copied")
        self._write_published(chain, signed)
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
        following = self._editable_targets(now)
        name = signed_documents.add_release(following, folder)
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
        """Stages the removal of a release."""
        following = self._editable_targets(now)
        signed_documents.withdraw_release(following, name)
        self._write("targets.json", Metadata(following))

    def extend(self, now: datetime, *, root: bool) -> None:
        """Stages unchanged targets, and with `root` the root too, to be signed for another term."""
        self._write("targets.json", Metadata(self._editable_targets(now)))
        if root:
            self._write("root.json", Metadata(self._editable_root(now)))

    def change_keys(self, keys: Mapping[str, Key], now: datetime) -> None:
        """Stages a root with these keys in place of those with the same names; `rollouts` goes into targets."""
        targets = self.next_targets() or self.published_targets()
        current = set(map(checks.content_of, self.newest_root().keys.values()))
        if targets is not None:
            current |= signed_documents.rollouts_keys(targets.signed).keys()
        if set(map(checks.content_of, keys.values())) <= current:
            raise UserError(f"{self.folder}: nothing changes: these keys are in use there already")
        if root_keys := {name: key for name, key in keys.items() if name != roles.ROLLOUTS}:
            root = self._editable_root(now)
            for name, key in root_keys.items():
                _replace_key(root, name, key)
            self._write("root.json", Metadata(root))
        if {roles.TARGETS, roles.ROLLOUTS} & keys.keys():
            following = self._editable_targets(now)
            if roles.ROLLOUTS in keys:
                signed_documents.delegate_rollouts(following, keys[roles.ROLLOUTS])
            self._write("targets.json", Metadata(following))

    def sign(self, signers: Sequence[CryptoSigner], trusted: Path) -> int:
        """Adds every signature that these keys may make; returns how many.

        Args:
            trusted: file of the newest root that the owner of the keys has signed under; updated here.

        Raises:
            UserError: the staged documents do not follow from the trusted root, or do not match the files.
        """
        self._require_trusted(trusted)
        self._require_sound()
        self.new_files()
        published = self.roots()[-1:]
        delegators = [root.signed for root in published]
        signatures = 0
        if (root := self.next_root()) is not None:
            signatures += _sign(root, roles.ROOT, [*delegators, root.signed], signers)
            self._write("root.json", root)
        if (targets := self.next_targets()) is not None:
            signatures += _sign(targets, roles.TARGETS, [*delegators, self.newest_root()], signers)
            self._write("targets.json", targets)
        if signatures:
            pinned = published[0] if published else root
            assert pinned is not None
            _write_metadata(trusted, pinned)
        return signatures

    def mark_published(self) -> None:
        """Records that the staged documents are the published ones now."""
        staged = self.next_root()
        roots = [*self.roots(), *([staged] if staged is not None else [])]
        targets = self.next_targets() or self.published_targets()
        assert targets is not None
        self._write_published(roots, targets)
        (self.folder / "root.json").unlink(missing_ok=True)
        (self.folder / "targets.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "files", ignore_errors=True)

    # -- internals ------------------------------------------------------------------------------------------------

    def _published_root(self) -> Root | None:
        roots = self.roots()
        return roots[-1].signed if roots else None

    def _write_published(self, roots: Sequence[Metadata[Root]], targets: Metadata[Targets]) -> None:
        for root in roots:
            self._write(f"published/{root.signed.version}.root.json", root)
        self._write("published/targets.json", targets)

    def _editable_targets(self, now: datetime) -> Targets:
        """The staged targets if they are next, else the next version of the published ones; with a new term."""
        staged, published = self.next_targets(), self.published_targets()
        if staged is not None and (
            published is None or staged.signed.version == published.signed.version + 1
        ):
            staged.signed.expires = now + LIFETIMES[roles.TARGETS]
            return staged.signed
        if published is None:
            self.newest_root()
            raise UserError(f"{self.folder}: no targets are staged there; `fedloop release fetch` them")
        return signed_documents.next_targets(published.signed, now)

    def _editable_root(self, now: datetime) -> Root:
        """The staged root, else the next version of the published one; with a new term."""
        published, root = self.roots(), self.newest_root()
        if published and root.version == published[-1].signed.version:
            root.version += 1
        root.expires = now + LIFETIMES[roles.ROOT]
        return root

    def _require_sound(self) -> None:
        """Checks that a coordinator would accept the staged documents: a carrier may have written what no list shows."""
        root, targets, before = self.next_root(), self.next_targets(), self.published_targets()
        path = self.folder / "root.json"
        try:
            if root is not None:
                checks.require_strong(root.signed)
            path = self.folder / "targets.json"
            if targets is not None:
                checks.require_valid_targets(before.signed if before is not None else None, targets.signed)
        except Refusal as error:
            raise UserError(f"{path} must not be signed: {error}") from None

    def _require_trusted(self, trusted: Path) -> None:
        """Checks the chain of roots from the trusted one, and that published targets follow from it."""
        roots, staged = self.roots(), self.next_root()
        if (pinned := _read(trusted, checks.read_root)) is not None:
            same_version = (
                root
                for root in [*roots, *([staged] if staged is not None else [])]
                if root.signed.version == pinned.signed.version
            )
            root = next(same_version, None)
            if root is None or root.signed_bytes != pinned.signed_bytes:
                raise UserError(
                    f"{self.folder} does not follow from {trusted}, the root that these keys have signed under; to use the keys "
                    "for another repository from now on, remove that file"
                )
        _require_chain(roots, [], str(self.folder / "published"))
        published = self.published_targets()
        if published is not None and not (
            roots and checks.is_signed(roots[-1].signed, roles.TARGETS, published)
        ):
            raise UserError(
                f"{self._published / 'targets.json'} lacks the signatures that the root beside it requires"
            )

    def _write(self, name: str, metadata: Metadata[Root] | Metadata[Targets]) -> None:
        _write_metadata(self.folder / name, metadata)


def _require_chain(chain: Sequence[Metadata[Root]], known: Sequence[Metadata[Root]], what: str) -> None:
    """Checks roots 1, 2, 3…, each signed by its predecessor and itself; they begin with the known ones. Ignores expiry."""
    for index, root in enumerate(chain):
        differs = index < len(known) and known[index].signed_bytes != root.signed_bytes
        signers = chain[max(index - 1, 0) : index + 1]
        if (
            differs
            or root.signed.version != index + 1
            or not all(checks.is_signed(each.signed, roles.ROOT, root) for each in signers)
        ):
            raise UserError(
                f"{what}: root {root.signed.version} does not follow from its predecessor; nothing was changed"
            )
    if len(chain) < len(known):
        raise UserError(f"{what}: older than the roots here; nothing was changed")


def _replace_key(root: Root, name: str, key: Key) -> None:
    role = roles.ROOT if name.startswith("root-") else name
    for key_id in list(root.roles[role].keyids):
        if role != roles.ROOT or root.keys[key_id].unrecognized_fields.get(roles.NAME_FIELD) == name:
            root.revoke_key(key_id, role)
    root.add_key(key, role)


def _sign(
    metadata: Metadata[Root] | Metadata[Targets],
    role: str,
    delegators: Sequence[Root],
    signers: Sequence[CryptoSigner],
) -> int:
    key_ids = {key for delegator in delegators for key in delegator.roles[role].keyids}
    eligible = [signer for signer in signers if signer.public_key.keyid in key_ids]
    for signer in eligible:
        metadata.sign(signer, append=True)
    return len(eligible)


def _read(path: Path, parse: Callable[[bytes], Metadata[Document]]) -> Metadata[Document] | None:
    """The document in a file; None if there is none."""
    if not path.exists():
        return None
    try:
        return parse(read_file(path))
    except Refusal as error:
        again = "fetch it" if path.parent.name == "published" else "stage the change"
        raise UserError(f"{path}: {error}; remove it, and {again} again") from None


def _write_metadata(path: Path, metadata: Metadata[Root] | Metadata[Targets]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, metadata.to_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
