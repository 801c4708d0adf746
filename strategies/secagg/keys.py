"""Keys of one round: agreement (X25519), derivation (HKDF-SHA256), and encryption of shares (AES-256-GCM)."""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from strategies.secagg.errors import Refused

TAG_BYTES = 16

_NONCE = bytes(12)
"""A key encrypts one message in its life: it is derived for one sender, one receiver and one key list."""


PrivateKey = X25519PrivateKey


def private_key(random: bytes) -> PrivateKey:
    """The key of 32 random bytes, which `private_bytes_raw` gives back."""
    return X25519PrivateKey.from_private_bytes(random)


def public_key(private: PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def mask_key(private: PrivateKey, other: bytes, session: bytes) -> bytes:
    """The key of the mask that two clients share; the same from both sides."""
    return _derive(_agree(private, other), session, b"mask")


def self_mask_key(seed: bytes, session: bytes) -> bytes:
    return _derive(seed, session, b"self mask")


def seed_commitment(seed: bytes, session: bytes, client: int) -> bytes:
    """Binds a client to the seed of its own mask, so that forged shares of it are noticed. The seed is random, so this hides it."""
    return hashlib.sha256(b"fedloop secagg seed 1\0" + session + _two_bytes(client) + seed).digest()


class ShareBox:
    """Encrypts the shares between two clients, in either direction."""

    def __init__(self, private: PrivateKey, other: bytes, session: bytes) -> None:
        self._agreed, self._session = _agree(private, other), session

    def seal(self, shares: bytes, sender: int, receiver: int) -> bytes:
        return self._cipher(sender, receiver).encrypt(_NONCE, shares, None)

    def open(self, sealed: bytes, sender: int, receiver: int) -> bytes:
        """Raises Refused."""
        try:
            return self._cipher(sender, receiver).decrypt(_NONCE, sealed, None)
        except InvalidTag:
            raise Refused(
                f"the shares of client {sender} cannot be decrypted: they were altered, or it has another key list or model"
            ) from None

    def _cipher(self, sender: int, receiver: int) -> AESGCM:
        purpose = b"shares" + _two_bytes(sender) + _two_bytes(receiver)
        return AESGCM(_derive(self._agreed, self._session, purpose))


def _agree(private: PrivateKey, other: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise Refused("a public key is of small order") from None


def _derive(secret: bytes, session: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=session, info=b"fedloop secagg 1 " + purpose).derive(secret)


def _two_bytes(number: int) -> bytes:
    return number.to_bytes(2, "little")
