"""A round of secure aggregation in memory: clients, server, and who drops out when."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from strategies.secagg.client import Client
from strategies.secagg.ring import Residues
from strategies.secagg.server import Server
from strategies.secagg.terms import Terms

STAGES = ("keys", "shares", "input", "confirmation", "reveal")
Alter = Callable[[str, str, bytes], bytes]
"""Stage, member, and the message on its way; gives what arrives."""


def terms_of(clients: int, **changes: object) -> Terms:
    values: dict[str, object] = {
        "run": "a run",
        "round": 3,
        "model_sha256": "ab" * 32,
        "group": 0,
        "clients": clients,
        "length": 20,
        "ring_bits": 22,
        "degree": clients - 1,
    }
    return Terms(**{**values, **changes})  # type: ignore[arg-type]


@cache
def _device_key(member: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(member.encode().ljust(32, b"."))


@cache
def _public_key(member: str) -> Ed25519PublicKey:
    return _device_key(member).public_key()


def sign(member: str, content: bytes) -> bytes:
    """The signature of a device, made with the key of its certificate."""
    return _device_key(member).sign(content)


@cache
def verify(member: str, content: bytes, signature: bytes) -> bool:
    try:
        _public_key(member).verify(signature, content)
    except InvalidSignature:
        return False
    return True


class Round:
    """A server and its clients; `play` takes them through the stages."""

    def __init__(
        self, terms: Terms, *, seed: int = 0, client_terms: Mapping[str, Terms] | None = None
    ) -> None:
        self.terms = terms
        rng = np.random.default_rng(seed)
        self.members = [f"device-{number:04}" for number in range(terms.clients)]
        self.server = Server(terms, self.members, verify)
        self.clients = {
            member: Client(
                (client_terms or {}).get(member, terms),
                member,
                partial(sign, member),
                verify,
                rng.bytes,
            )
            for member in self.members
        }
        self.vectors = {
            member: rng.integers(0, 2**terms.ring_bits, terms.length, np.uint64).astype(terms.ring.word)
            for member in self.members
        }
        self.sent: dict[str, int] = {"up": 0, "down": 0}

    def play(
        self,
        dropouts: Mapping[str, Collection[str]] | None = None,
        *,
        up: Alter | None = None,
        down: Alter | None = None,
        until: str = "reveal",
    ) -> None:
        """Plays the stages up to and with `until`. `dropouts`: by stage, who sends nothing in it or later."""
        gone: set[str] = set()
        inbox: dict[str, bytes] = dict.fromkeys(self.members, b"")
        for stage in STAGES:
            gone |= set((dropouts or {}).get(stage, ()))
            for member, message in inbox.items():
                if member in gone:
                    continue
                self.sent["down"] += len(message)
                arrived = message if down is None else down(stage, member, message)
                answer = self.answer(stage, member, arrived)
                self.sent["up"] += len(answer)
                self.server.receive(member, answer if up is None else up(stage, member, answer))
            inbox = self.server.close_stage()
            if stage == until:
                return

    def answer(self, stage: str, member: str, message: bytes) -> bytes:
        client = self.clients[member]
        if stage == "keys":
            return client.advertise_keys()
        if stage == "shares":
            return client.share_keys(message)
        if stage == "input":
            return client.mask_input(message, self.vectors[member])
        if stage == "confirmation":
            return client.confirm_survivors(message)
        return client.reveal_shares(message)

    def sum_of(self, members: Sequence[str]) -> Residues:
        """What the sum has to be, added up in the open."""
        total = self.terms.ring.zeros(self.terms.length)
        for member in members:
            total += self.vectors[member]
        return self.terms.ring.reduce(total)
