"""Key files of the people who sign: `root-1.pem`, `root-2.pem`, `targets.pem`, each with its public half in `.pub`.

Private keys are Ed25519 in PKCS8, encrypted with a passphrase. They belong on machines without a network, each root
key with another person; only the `.pub` files go round. Beside the keys lies `trusted-root.json`, the newest root that
their owner has signed under: what is to be signed must follow from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner, Key, SSlibKey

from coordinator.errors import UserError
from coordinator.releases.checks import content_of
from coordinator.releases.roles import OFFLINE_KEYS
from edge_client.files import write_durably

NAME_FIELD = "x-fedloop-name"
"""In a key's metadata, for people: `root-1`. It is no part of the key."""


def make(folder: Path, names: Sequence[str], passphrase: bytes | None) -> list[Path]:
    """New keys in `folder`; the private files. None: they are not encrypted.

    Raises:
        UserError: one of them exists, or the folder cannot be written.
    """
    for path in (folder / f"{name}.{half}" for name in names for half in ("pem", "pub")):
        if path.exists():
            raise UserError(
                f"{path} exists; a key is never overwritten, give another folder, or --key for those to make"
            )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [_make(folder, name, passphrase) for name in names]
    except OSError as error:
        raise UserError(f"{folder}: keys cannot be written there: {error.strerror}") from None


def _make(folder: Path, name: str, passphrase: bytes | None) -> Path:
    private = Ed25519PrivateKey.generate()
    hidden: serialization.KeySerializationEncryption = (
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase)
    )
    pem = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)
    public = SSlibKey.from_crypto(private.public_key())
    public.unrecognized_fields[NAME_FIELD] = name
    write_durably(folder / f"{name}.pem", pem, mode=0o600)
    write_durably(folder / f"{name}.pub", _text(public))
    return folder / f"{name}.pem"


def public_keys(folders: Sequence[Path]) -> dict[str, Key]:
    """Name -> public key, of all `.pub` files in these folders.

    Raises:
        UserError: a file is no key, or two folders have different keys of one name.
    """
    found: dict[str, Key] = {}
    for folder in folders:
        for name in OFFLINE_KEYS:
            path = folder / f"{name}.pub"
            if not path.exists():
                continue
            key = read_public(read_json(path), path)
            content = content_of(key)
            if name in found and content_of(found[name]) != content:
                raise UserError(f"{path}: another {name} than in a folder given before")
            if content in {content_of(other) for at, other in found.items() if at != name}:
                raise UserError(
                    f"{path}: the same key under two names; two signatures must come from two keys"
                )
            found[name] = key
    return found


def key_files(folder: Path) -> list[Path]:
    """The private keys in a folder. Raises: UserError: there is none."""
    found = [path for name in OFFLINE_KEYS if (path := folder / f"{name}.pem").exists()]
    if not found:
        raise UserError(
            f"{folder}: none of {', '.join(OFFLINE_KEYS)} (.pem) is there; `fedloop release keygen`"
        )
    return found


def is_encrypted(path: Path) -> bool:
    """Whether a private key needs a passphrase."""
    return b"ENCRYPTED" in _bytes(path)


def load(path: Path, passphrase: bytes | None) -> CryptoSigner:
    """A private key. Raises: UserError: it is none, or the passphrase is wrong."""
    try:
        private = serialization.load_pem_private_key(_bytes(path), passphrase)
    except TypeError:
        raise UserError(
            f"{path}: a passphrase was given for a key that has none, or the other way round"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(f"{path}: wrong passphrase, or no private key in PEM") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise UserError(f"{path}: expected an Ed25519 key")
    return CryptoSigner(private)


def read_public(document: Any, place: object) -> Key:
    """A public key as `.pub` files and `fedloop release online-keys` have it. Raises: UserError: it is none."""
    try:
        fields = dict(document)
        return Key.from_dict(fields.pop("keyid"), fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{place}: no public key: {error!r}") from None


def read_json(path: Path) -> Any:
    """The JSON in a file. Raises: UserError: it is none."""
    try:
        return json.loads(_bytes(path))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not JSON") from None


def _text(key: Key) -> bytes:
    return (json.dumps({"keyid": key.keyid, **key.to_dict()}, indent=1, sort_keys=True) + "\n").encode()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
