"""The keys that a coordinator holds online: snapshot, timestamp, rollouts. One file per key, `<role>-<key id>.pem`.

The root, and for rollouts targets, decides which of them are valid. New keys wait here until people have signed metadata
that names them, and old ones are removed once no metadata names them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner, SSlibKey

from coordinator.releases.roles import ONLINE_ROLES
from edge_client.files import write_durably


class OnlineKeys:
    """The key files in one folder, accessible to this user only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def signers(self, role: str) -> list[CryptoSigner]:
        """All keys of a role, by id."""
        return [_read(path) for path in sorted(self._folder.glob(f"{role}-*.pem"))]

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


def _read(path: Path) -> CryptoSigner:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path}: not an Ed25519 key")
    return CryptoSigner(key)
