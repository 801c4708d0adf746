"""Fields of X.509 certificates as the database keeps them, and reads of the files of keys and certificates."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from coordinator.errors import UserError


def key_sha256(key: PublicKeyTypes) -> str:
    """SHA-256 of a public key (SubjectPublicKeyInfo, DER) in hex; it identifies the key."""
    return hashlib.sha256(
        key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


def serial_of(certificate: x509.Certificate) -> str:
    """Serial number in hex."""
    return f"{certificate.serial_number:x}"


def pem_of(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def read_file(path: Path) -> bytes:
    """The content of a file. Raises: UserError: it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
