"""Key files of the people who sign: `root-1.pem`, `root-2.pem`, `targets.pem`, each with its public half in `.pub`.

Private keys are Ed25519 in PKCS8, encrypted with a passphrase. They belong on machines without a network, each root
key with a different person; only the `.pub` files are shared. Beside the keys lies `trusted-root.json`, the newest root
that their owner has signed under: documents to sign must follow from it.
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

from coordinator.certificates import read_file
from coordinator.errors import UserError
from coordinator.releases.checks import content_of
from coordinator.releases.roles import NAME_FIELD, OFFLINE_KEYS
from edge_client.files import write_durably


def make(folder: Path, names: Sequence[str], passphrase: bytes | None) -> list[Path]:
    """Makes keys in `folder`; returns the private files. Without a passphrase they are not encrypted.

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
    encryption: serialization.KeySerializationEncryption = (
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase)
    )
    pem = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    public = SSlibKey.from_crypto(private.public_key())
    public.unrecognized_fields[NAME_FIELD] = name
    write_durably(folder / f"{name}.pem", pem, mode=0o600)
    document = {"keyid": public.keyid, **public.to_dict()}
    write_durably(folder / f"{name}.pub", (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())
    return folder / f"{name}.pem"


def public_keys(folders: Sequence[Path]) -> dict[str, Key]:
    """Name -> public key, of all `.pub` files in these folders.

    Raises:
        UserError: a file is not a key, or two folders have different keys of the same name.
    """
    keys: dict[str, Key] = {}
    for folder in folders:
        for name in OFFLINE_KEYS:
            path = folder / f"{name}.pub"
            if not path.exists():
                continue
            key = read_public(read_json(path), path)
            content = content_of(key)
            if name in keys and content_of(keys[name]) != content:
                raise UserError(f"{path}: a different {name} than in an earlier folder")
            if content in {content_of(other) for other_name, other in keys.items() if other_name != name}:
                raise UserError(
                    f"{path}: the same key under two names; two signatures must come from two keys"
                )
            keys[name] = key
    return keys


def key_files(folder: Path) -> list[Path]:
    """The private key files in a folder. Raises: UserError: there are none."""
    files = [path for name in OFFLINE_KEYS if (path := folder / f"{name}.pem").exists()]
    if not files:
        raise UserError(
            f"{folder}: none of {', '.join(OFFLINE_KEYS)} (.pem) is there; make keys with `fedloop release keygen`"
        )
    return files


def is_encrypted(path: Path) -> bool:
    """Whether a private key needs a passphrase."""
    return b"ENCRYPTED" in read_file(path)


def load(path: Path, passphrase: bytes | None) -> CryptoSigner:
    """A private key. Raises: UserError: the file is not one, or the passphrase is wrong."""
    try:
        private = serialization.load_pem_private_key(read_file(path), passphrase)
    except TypeError:
        raise UserError(
            f"{path}: a passphrase was given for an unencrypted key, or none for an encrypted one"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(f"{path}: wrong passphrase, or not a private key in PEM") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise UserError(f"{path}: expected an Ed25519 key")
    return CryptoSigner(private)


def read_public(document: Any, source: object) -> Key:
    """A public key in the format of `.pub` files and `fedloop release online-keys`. Raises: UserError: it is not one."""
    try:
        fields = dict(document)
        return Key.from_dict(fields.pop("keyid"), fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{source}: not a public key: {error!r}") from None


def read_json(path: Path) -> Any:
    """The JSON in a file. Raises: UserError: it is not JSON."""
    try:
        return json.loads(read_file(path))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not JSON") from None
