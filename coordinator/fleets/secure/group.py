"""One group of simulated clients and its server, taken through all stages of the protocol in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from strategies.secagg.client import Client
from strategies.secagg.ring import Residues
from strategies.secagg.server import Server
from strategies.secagg.terms import Terms

Stage = Literal["keys", "shares", "input"]
"""The message that a client is the first not to send."""


@dataclass(frozen=True)
class Member:
    """A simulated client in a group.

    Attributes:
        device_key: stands for that of its certificate.
        random_bytes: seeded, so that a run can be repeated.
        vector: None: it has none, and drops out.
        leaves: the message that it does not send; None: it stays.
    """

    name: str
    device_key: Ed25519PrivateKey
    random_bytes: Callable[[int], bytes]
    vector: Residues | None
    leaves: Stage | None = None


@dataclass
class GroupSum:
    """The sum of a group. `included`: names of its clients. `bytes_up`, `bytes_down`: that each client has sent, and got."""

    included: Sequence[str]
    residues: Residues
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)


def device_key(seed: int, client: str) -> Ed25519PrivateKey:
    """The signature key of a simulated client, the same in every round."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{seed} {client}".encode()).digest())


def sum_group(terms: Terms, members: Sequence[Member]) -> GroupSum:
    """The sum of the vectors of those members that stay.

    Raises:
        BelowThreshold: too few stay.
    """
    public = {member.name: member.device_key.public_key() for member in members}

    @cache  # all neighbours of a client verify the same signatures
    def verify(name: str, content: bytes, signature: bytes) -> bool:
        try:
            public[name].verify(signature, content)
        except InvalidSignature:
            return False
        return True

    server = Server(terms, [member.name for member in members], verify)
    vectors = {member.name: member.vector for member in members}
    leaves = {member.name: member.leaves for member in members}
    clients = {
        member.name: Client(terms, member.name, member.device_key.sign, verify, member.random_bytes)
        for member in members
    }
    bytes_up, bytes_down = dict.fromkeys(clients, 0), dict.fromkeys(clients, 0)

    def mask_input(name: str, message: bytes) -> bytes:
        vector = vectors[name]
        assert vector is not None  # else it has left
        return clients[name].mask_input(message, vector)

    stages: dict[str, Callable[[str, bytes], bytes]] = {
        "keys": lambda name, _: clients[name].advertise_keys(),
        "shares": lambda name, message: clients[name].share_keys(message),
        "input": mask_input,
        "confirmation": lambda name, message: clients[name].confirm_survivors(message),
        "reveal": lambda name, message: clients[name].reveal_shares(message),
    }
    inbox = dict.fromkeys(clients, b"")
    for stage, answer in stages.items():
        for name, message in inbox.items():
            bytes_down[name] += len(message)
            if leaves[name] == stage:
                continue
            sent = answer(name, message)
            bytes_up[name] += len(sent)
            server.receive(name, sent)
        inbox = server.close_stage()
    return GroupSum(server.included, server.sum(), bytes_up, bytes_down)
