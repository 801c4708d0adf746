"""Signed heads of the audit log: the coordinator states that, at this time, the log ended with this entry.

The key is Ed25519 (RFC 8032), in `<home>/audit/key.pem`, used for nothing else. The newest head that was signed lies beside
it in `head.json`. A head is signed only if the log still contains that earlier one, so whoever can write to the database but
not to the home can neither shorten nor rewrite the log unnoticed. Whoever can write to both can: against them, export heads
to another machine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from coordinator.audit.entries import canonical, hash_at, last, timestamp
from coordinator.certificates import read_file
from coordinator.db.store import Database
from coordinator.errors import Refusal, UserError
from edge_client.files import make_folder, write_durably

_PURPOSE = "fedloop audit head 1"
"""Part of the signed content, so that a signature made for another purpose is not valid for a head."""


@dataclass(frozen=True)
class Head:
    """The last entry at a time, signed.

    Attributes:
        key: the public key, 32 bytes in hex.
        signature: 64 bytes in hex.
    """

    number: int
    hash: str
    time: str
    key: str
    signature: str

    @staticmethod
    def parse(document: Any, source: str) -> Head:
        """A head from JSON. Raises: UserError: it is not one, or its signature is not valid."""
        if not isinstance(document, Mapping) or set(document) != {*Head.__dataclass_fields__}:
            raise UserError(f"{source}: not a head of an audit log")
        head = Head(**document)
        if type(head.number) is not int or head.number < 0:
            raise UserError(f"{source}: not a head of an audit log: number is {head.number!r:.80}")
        if not head.is_signed:
            raise UserError(f"{source}: the signature of the head is not valid: it was altered or forged")
        return head

    @property
    def is_signed(self) -> bool:
        """Whether the holder of `key` signed this head."""
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.key))
            key.verify(bytes.fromhex(self.signature), _signed_bytes(self.number, self.hash, self.time))
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True


class Heads:
    """Signs heads with the key in a folder, which is created on first use. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def sign(self, database: Database, now: datetime) -> Head:
        """The head of the log as it is now; stored as the newest.

        Raises:
            Refusal: 409 `audit_altered`: the log does not contain the head signed before. `head` has that one.
            UserError: the files in the folder are not a key or a head.
        """
        with self._lock:
            before = self.newest()
            if before is not None and database.read(lambda at: hash_at(at, before.number)) != before.hash:
                raise Refusal(
                    409,
                    "audit_altered",
                    f"the audit log does not contain entry {before.number} as it was signed at {before.time}: it was altered, "
                    "shortened or replaced; find the entry with `fedloop audit verify`. If an older backup was restored on "
                    "purpose, keep a copy of head.json in the folder `audit` of the home and remove it there",
                    head=asdict(before),
                )
            number, digest = database.read(last)
            head = self._signed(number, digest, timestamp(now))
            write_durably(self._folder / "head.json", (json.dumps(asdict(head)) + "\n").encode(), mode=0o600)
            return head

    def newest(self) -> Head | None:
        """The newest head signed so far; None before the first. Raises: UserError: the file is not one."""
        path = self._folder / "head.json"
        if not path.exists():
            return None
        try:
            document = json.loads(read_file(path))
        except ValueError:
            raise UserError(f"{path}: not JSON") from None
        return Head.parse(document, str(path))

    def _signed(self, number: int, digest: str, time: str) -> Head:
        key = self._key()
        return Head(
            number,
            digest,
            time,
            key.public_key().public_bytes_raw().hex(),
            key.sign(_signed_bytes(number, digest, time)).hex(),
        )

    def _key(self) -> Ed25519PrivateKey:
        path = self._folder / "key.pem"
        if not path.exists():
            make_folder(self._folder)
            created = Ed25519PrivateKey.generate()
            pem = created.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_durably(path, pem, mode=0o600)
        with suppress(ValueError, TypeError, UnsupportedAlgorithm):
            key = serialization.load_pem_private_key(read_file(path), None)
            if isinstance(key, Ed25519PrivateKey):
                return key
        raise UserError(f"{path}: expected an unencrypted Ed25519 key in PEM; restore it from a backup")


def _signed_bytes(number: int, digest: str, time: str) -> bytes:
    return canonical({"purpose": _PURPOSE, "number": number, "hash": digest, "time": time}).encode()
