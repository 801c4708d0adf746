"""The messages of the protocol as bytes: a header of fixed form, then fields whose lengths the receiver knows or bounds.

Every message begins with the format's name, its kind, and 16 bytes that only this round and this key list have, so a message of
another round, group or key list is refused before it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from strategies.secagg.errors import Refused
from strategies.secagg.terms import Terms

KEY_BYTES = 32
DIGEST_BYTES = 32
MOST_MEMBER_BYTES = 255
MOST_SIGNATURE_BYTES = 255

T = TypeVar("T")

_FORMAT = b"FSA1"
SESSION_BYTES = 16
HEADER_BYTES = len(_FORMAT) + 1 + SESSION_BYTES


class Kind(IntEnum):
    """What a message is, in the order of the protocol."""

    KEYS = 0
    KEY_LIST = 1
    SHARES = 2
    SHARES_FOR = 3
    MASKED_INPUT = 4
    SURVIVORS = 5
    CONFIRMATION = 6
    CONFIRMATIONS = 7
    REVEALED = 8

    @property
    def title(self) -> str:
        return self.name.lower().replace("_", " ")


class Body:
    """The fields of a message, read from front to back."""

    def __init__(self, kind: Kind, session: bytes, message: bytes) -> None:
        """Raises Refused if the message is of another kind or session."""
        self._kind, self._content, self._at = kind, message, 0
        expected = header(kind, session)
        found = self.take(HEADER_BYTES)
        if found == expected:
            return
        if found[: len(_FORMAT)] != _FORMAT:
            raise Refused(f"{kind.title}: the message does not begin with {_FORMAT.decode()}")
        if found[len(_FORMAT)] != kind:
            raise Refused(f"{kind.title} expected, the message is of kind {found[len(_FORMAT)]}")
        raise Refused(f"{kind.title}: the message is of another round, model or key list")

    def take(self, size: int) -> bytes:
        if size > len(self._content) - self._at:
            raise Refused(
                f"{self._kind.title}: the message ends after {len(self._content)} bytes, within a field"
            )
        self._at += size
        return self._content[self._at - size : self._at]

    def take_short(self) -> bytes:
        """A field of 1 to 255 bytes, after its length."""
        if not (size := self.take(1)[0]):
            raise Refused(f"{self._kind.title}: a field is empty")
        return self.take(size)

    def take_members(self, of: Sequence[int]) -> list[int]:
        """Those of the given members whose bit is set."""
        content = np.frombuffer(self.take(-(-len(of) // 8)), np.uint8)
        bits = np.unpackbits(content, bitorder="little")
        if bits[len(of) :].any():
            raise Refused(f"{self._kind.title}: bits are set after the last member")
        return [of[place] for place in np.flatnonzero(bits).tolist()]

    def rest(self) -> bytes:
        return self.take(len(self._content) - self._at)

    def end(self) -> None:
        if left := len(self._content) - self._at:
            raise Refused(f"{self._kind.title}: {left} bytes follow the message")


def header(kind: Kind, session: bytes) -> bytes:
    return _FORMAT + bytes([kind]) + session[:SESSION_BYTES]


def member_bits(members: Collection[int], of: Sequence[int]) -> bytes:
    """One bit for each of the given members: whether it is among `members`."""
    bits = np.isin(np.fromiter(of, np.int64, len(of)), np.fromiter(members, np.int64, len(members)))
    return np.packbits(bits, bitorder="little").tobytes()


def short(field: bytes) -> bytes:
    """A field after its length."""
    return bytes([len(field)]) + field


@dataclass(frozen=True)
class Keys:
    """A client's public keys of one round, signed with the key of its device.

    Attributes:
        masks: X25519 key from which masks are agreed on.
        shares: X25519 key for the encryption of shares.
    """

    masks: bytes
    shares: bytes
    signature: bytes

    def to_bytes(self) -> bytes:
        return self.masks + self.shares + short(self.signature)

    @classmethod
    def take(cls, body: Body) -> Keys:
        return cls(body.take(KEY_BYTES), body.take(KEY_BYTES), body.take_short())

    def signed(self, terms: Terms, member: str) -> bytes:
        """What the signature is of."""
        name = short(member.encode())
        return b"fedloop secagg keys 1\0" + terms.digest + name + self.masks + self.shares

    def digest(self, member: str) -> bytes:
        """What stands for the keys in the key list."""
        return hashlib.sha256(b"\0" + short(member.encode()) + self.to_bytes()).digest()


@dataclass(frozen=True)
class KeyList:
    """All clients of a group in the order of their names; a client sees the keys of its neighbours, and digests of the others.

    Attributes:
        digests: of everyone's keys, an array of bytes of (clients, 32).
        keys: names and keys of the clients that are shown.
    """

    digests: npt.NDArray[np.uint8]
    keys: Mapping[int, tuple[str, Keys]]

    @classmethod
    def of(cls, everyone: Sequence[tuple[str, Keys]]) -> KeyList:
        """The list that shows everything."""
        digests = b"".join(keys.digest(member) for member, keys in everyone)
        return cls(np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES), dict(enumerate(everyone)))

    def showing(self, clients: Iterable[int]) -> KeyList:
        return KeyList(self.digests, {client: self.keys[client] for client in clients})

    def session(self, terms: Terms) -> bytes:
        """SHA-256 of terms and list, which enters every derived key: clients with different lists share no keys."""
        content = b"fedloop secagg session 1\0" + terms.digest + self.digests.tobytes()
        return hashlib.sha256(content).digest()

    def to_bytes(self) -> bytes:
        clients = len(self.digests)
        fields = [clients.to_bytes(2, "little"), member_bits(self.keys, range(clients))]
        for _, (member, keys) in sorted(self.keys.items()):
            fields.append(short(member.encode()) + keys.to_bytes())
        fields.append(np.delete(self.digests, [*self.keys], axis=0).tobytes())
        return b"".join(fields)

    @classmethod
    def take(cls, body: Body, most: int) -> KeyList:
        """Raises Refused, also where the list has more than `most` clients."""
        clients = int.from_bytes(body.take(2), "little")
        if clients > most:
            raise Refused(f"the key list has {clients} clients, {most} were invited")
        keys = {
            client: (_member(body.take_short()), Keys.take(body))
            for client in body.take_members(range(clients))
        }
        digests = np.zeros((clients, DIGEST_BYTES), np.uint8)
        others = np.ones(clients, bool)
        for client, (member, found) in keys.items():
            digests[client] = np.frombuffer(found.digest(member), np.uint8)
            others[client] = False
        hidden = body.take(DIGEST_BYTES * (clients - len(keys)))
        digests[others] = np.frombuffer(hidden, np.uint8).reshape(-1, DIGEST_BYTES)
        return cls(digests, keys)


def members_shown(message: bytes, most: int) -> list[str]:
    """The clients whose keys a message with a key list shows, by whoever has made it. `most`: clients of the list."""
    body = Body(Kind.KEY_LIST, message[len(_FORMAT) + 1 : HEADER_BYTES], message)
    return [name for name, _ in KeyList.take(body, most).keys.values()]


def _member(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise Refused("the key list has a name that is not UTF-8") from None


def survivors_signed(session: bytes, alive: Collection[int], clients: int) -> bytes:
    """What a client signs of the clients whose input the server has."""
    return b"fedloop secagg survivors 1\0" + session + member_bits(alive, range(clients))
