"""A whole repository of releases in a folder, with all of its keys, and release folders to put into it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, Root, Targets

from coordinator.context.services import utc_now
from coordinator.operator import signed_documents
from coordinator.releases import roles
from coordinator.releases.repository import Repository
from coordinator.releases.roles import ReleaseName
from edge_client.wire.inference import GoldenRows, InferenceManifest
from edge_client.wire.manifest import FileSpec, Fill, InputSpec, Tolerance
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME


class SignedReleases:
    """A repository in `folder` (a coordinator's is `<home>/releases`) and the people who sign for it.

        releases = SignedReleases(home / "releases")
        releases.publish(release_folder)
        releases.repository.set_rollouts("cnn", {"model": "cnn", "rollouts": []})
        Updater(…, bootstrap=releases.repository.root(1))

    `clock`: dates of the metadata; `tuf.ngclient` looks at the machine's own.
    """

    def __init__(self, folder: Path, clock: Callable[[], datetime] = utc_now) -> None:
        self.repository = Repository(folder, clock)
        self.clock = clock
        self.signers = {name: CryptoSigner.generate_ed25519() for name in roles.OFFLINE_KEYS}
        online = self.repository.online_keys()
        self.root = self.signed_root(1)
        self.targets = signed_documents.first_targets(online[roles.ROLLOUTS], clock())
        self.repository.publish(self.signed_targets(), {}, [self.root.to_bytes()])

    def publish(self, *folders: Path) -> int:
        """Signs and publishes the releases in these folders; the version of targets."""
        self.targets = signed_documents.next_targets(self.targets, self.clock())
        files = {}
        for folder in folders:
            name = signed_documents.add_release(self.targets, folder)
            files |= {name.manifest: folder / MANIFEST_NAME, name.file: folder / MODEL_NAME}
        return self.repository.publish(self.signed_targets(), files)

    def withdraw(self, model: str, version: int) -> int:
        """Takes a release out."""
        self.targets = signed_documents.next_targets(self.targets, self.clock())
        signed_documents.withdraw_release(self.targets, ReleaseName(model, version))
        return self.repository.publish(self.signed_targets(), {})

    def rotate(self, *, lost_targets_key: bool = False) -> None:
        """Every key for a new one: old and new root keys sign the root, old and new targets keys the targets."""
        old = dict(self.signers)
        self.signers = {name: CryptoSigner.generate_ed25519() for name in roles.OFFLINE_KEYS}
        online = self.repository.online_keys(rotate=True)
        root = self.signed_root(self.root.signed.version + 1, old["root-1"], old["root-2"])
        targets = signed_documents.next_targets(self.targets, self.clock())
        signed_documents.delegate_rollouts(targets, online[roles.ROLLOUTS])
        signed = Metadata.from_bytes(self.signed_targets(targets))
        if not lost_targets_key:
            signed.sign(old["targets"], append=True)
        self.repository.publish(signed.to_bytes(), {}, [root.to_bytes()])
        self.root, self.targets = root, targets

    def signed_targets(self, targets: Targets | None = None) -> bytes:
        """These targets, by default the newest, signed with the targets key."""
        metadata = Metadata(targets or self.targets)
        metadata.sign(self.signers["targets"])
        return metadata.to_bytes()

    def signed_root(self, version: int, *also: CryptoSigner) -> Metadata[Root]:
        """A root of this version that names the current keys, signed by both root keys, and by `also`."""
        online = self.repository.online_keys()
        named = {name: signer.public_key for name, signer in self.signers.items()}
        named |= {role: online[role] for role in (roles.SNAPSHOT, roles.TIMESTAMP)}
        metadata = Metadata(signed_documents.make_root(named, version, self.clock()))
        for signer in (self.signers["root-1"], self.signers["root-2"], *also):
            metadata.sign(signer, append=True)
        return metadata


def release_folder(folder: Path, model: str = "cnn", version: int = 1, content: bytes = b"weights") -> Path:
    """A release whose file is `content`: no runtime can load it, the repository does not care."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_NAME).write_bytes(content)
    manifest = InferenceManifest(
        model=model,
        version=version,
        architecture="cnn",
        options={},
        task="classification",
        classes=10,
        input=InputSpec((8, 8, 1), "float32"),
        precision="float32",
        operators=(),
        minimum_runtime="2.0",
        runtimes=("litert",),
        memory_bytes=2**20,
        file=FileSpec(hashlib.sha256(content).hexdigest(), len(content)),
        golden=GoldenRows(Fill(0.0, 1.0), ((0.0,) * 10,), Tolerance(1e-5, 1e-5)),
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json())
    return folder
