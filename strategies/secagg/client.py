"""One client in one round of secure aggregation (Bonawitz 2017, figure 4, over the graph of Bell 2020).

    advertise_keys       two fresh public keys, signed by the device
    share_keys           checks the key list; Shamir shares of the seed of the own mask and of the private mask key, encrypted
    mask_input           the vector, plus the own mask, plus or minus the mask shared with each neighbour
    confirm_survivors    signs the list of clients whose input the server says it has
    reveal_shares        once enough neighbours have signed the same list: for each neighbour one share, of the seed of a survivor's
                         mask or of the key of a client that dropped out, never of both

Each step is taken once, in this order. A client that refuses a message leaves the round. Neither transport nor disk nor clock is
used; randomness and the device's key are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from strategies.codes.packing import pack
from strategies.secagg import keys, shamir
from strategies.secagg.errors import BelowThreshold, Refused
from strategies.secagg.graph import Graph
from strategies.secagg.masks import add_masks
from strategies.secagg.messages import (
    Body,
    KeyList,
    Keys,
    Kind,
    header,
    short,
    survivors_signed,
)
from strategies.secagg.ring import Residues
from strategies.secagg.terms import Terms

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]
"""Whether the signature, the last argument, is the named member's of the bytes before it."""

SEALED_BYTES = 2 * shamir.SHARE_BYTES + keys.TAG_BYTES


class Step(IntEnum):
    """What the client does next."""

    ADVERTISE_KEYS = 0
    SHARE_KEYS = 1
    MASK_INPUT = 2
    CONFIRM_SURVIVORS = 3
    REVEAL_SHARES = 4
    NOTHING = 5


class Client:
    """The client's side. Every step raises `ProtocolError` where the client leaves the round.

    `member`: the client's name, 1 to 255 bytes of UTF-8, by which `verify` finds the key of its device.
    `random_bytes`: cryptographically secure on a device (`os.urandom`).
    """

    def __init__(
        self, terms: Terms, member: str, sign: Sign, verify: Verify, random_bytes: Callable[[int], bytes]
    ) -> None:
        if not 1 <= len(member.encode()) <= 255:
            raise ValueError("a member's name has 1 to 255 bytes")
        self._terms, self._member, self._sign, self._verify = terms, member, sign, verify
        self._random_bytes = random_bytes
        self._next = Step.ADVERTISE_KEYS
        self._boxes: dict[int, keys.ShareBox] = {}
        self._shares: dict[int, bytes] = {}

    def advertise_keys(self) -> bytes:
        with self._step(Step.ADVERTISE_KEYS):
            self._mask_key, self._share_key = (keys.private_key(self._random_bytes(32)) for _ in range(2))
            self._seed = self._random_bytes(32)
            unsigned = Keys(keys.public_key(self._mask_key), keys.public_key(self._share_key), b"")
            signature = self._sign(unsigned.signed(self._terms, self._member))
            self._keys = Keys(unsigned.masks, unsigned.shares, signature)
            return header(Kind.KEYS, self._terms.digest) + self._keys.to_bytes()

    def share_keys(self, key_list: bytes) -> bytes:
        with self._step(Step.SHARE_KEYS):
            body = Body(Kind.KEY_LIST, self._terms.digest, key_list)
            listed = KeyList.take(body, self._terms.clients)
            body.end()
            self._session = listed.session(self._terms)
            self._read_key_list(listed)
            points = [client + 1 for client in self._hood]
            seeds, mask_keys = (
                shamir.split(secret, self._needed, points, self._random_bytes)
                for secret in (self._seed, self._mask_key.private_bytes_raw())
            )
            both = dict(zip(self._hood, (s + k for s, k in zip(seeds, mask_keys, strict=True)), strict=True))
            self._shares[self._index] = both[self._index]
            sealed = [self._boxes[other].seal(both[other], self._index, other) for other in self._neighbours]
            commitment = keys.seed_commitment(self._seed, self._session, self._index)
            return header(Kind.SHARES, self._session) + commitment + b"".join(sealed)

    def mask_input(self, shares: bytes, vector: Residues) -> bytes:
        """The masked vector. `vector`: as many residues as the terms say, below 2**ring_bits; left as it is."""
        with self._step(Step.MASK_INPUT):
            ring = self._terms.ring
            if vector.shape != (self._terms.length,) or vector.dtype != ring.word:
                raise ValueError(
                    f"a vector of {vector.shape} {vector.dtype}, expected ({self._terms.length},) {ring.word}"
                )
            body = Body(Kind.SHARES_FOR, self._session, shares)
            sharing = body.take_members(self._neighbours)
            for other in sharing:
                sealed = body.take(SEALED_BYTES)
                self._shares[other] = self._boxes[other].open(sealed, other, self._index)
            body.end()
            self._require(len(self._shares), "have shared their keys")
            agreed = {
                other: keys.mask_key(self._mask_key, self._others[other].masks, self._session)
                for other in sharing
            }
            masked = vector.copy()
            plus = [keys.self_mask_key(self._seed, self._session)]
            plus += [key for other, key in agreed.items() if self._index < other]
            add_masks(masked, ring, plus, [key for other, key in agreed.items() if self._index > other])
            del self._mask_key, self._share_key, self._seed, self._boxes
            return header(Kind.MASKED_INPUT, self._session) + pack(ring.reduce(masked), ring.bits)

    def confirm_survivors(self, survivors: bytes) -> bytes:
        with self._step(Step.CONFIRM_SURVIVORS):
            body = Body(Kind.SURVIVORS, self._session, survivors)
            everyone = range(self._clients)
            alive, dropped = set(body.take_members(everyone)), set(body.take_members(everyone))
            body.end()
            if both := alive & dropped:
                raise Refused(f"client {min(both)} is listed both as alive and as dropped out")
            if unknown := self._shares.keys() - alive - dropped:
                raise Refused(
                    f"client {min(unknown)} has shared its keys and is neither alive nor dropped out"
                )
            if strangers := (alive | dropped) & set(self._hood) - self._shares.keys():
                raise Refused(f"client {min(strangers)} is listed, and its shares were not delivered")
            if self._index not in alive:
                raise Refused("this client is listed as dropped out, and it has sent its input")
            if len(alive) < (needed := self._terms.needed(self._terms.clients)):
                raise BelowThreshold(
                    f"the sum is of {len(alive)} of {self._terms.clients} clients, {needed} needed"
                )
            self._require(len(alive & self._shares.keys()), "have sent their input")
            self._alive = alive
            self._confirmed = survivors_signed(self._session, alive, self._clients)
            return header(Kind.CONFIRMATION, self._session) + short(self._sign(self._confirmed))

    def reveal_shares(self, confirmations: bytes) -> bytes:
        with self._step(Step.REVEAL_SHARES):
            body = Body(Kind.CONFIRMATIONS, self._session, confirmations)
            signing = body.take_members(self._neighbours)
            for other in signing:
                signature = body.take_short()
                if other not in self._alive or not self._verify(
                    self._names[other], self._confirmed, signature
                ):
                    raise Refused(f"client {other} has not signed the same list of survivors")
            body.end()
            self._require(1 + len(signing), "have signed the list of survivors")
            revealed = [
                shares[: shamir.SHARE_BYTES] if owner in self._alive else shares[shamir.SHARE_BYTES :]
                for owner, shares in sorted(self._shares.items())
            ]
            self._shares.clear()
            return header(Kind.REVEALED, self._session) + b"".join(revealed)

    def _read_key_list(self, listed: KeyList) -> None:
        """Checks the list, and takes from it the neighbours and their keys."""
        self._clients = len(listed.digests)
        if self._clients < max(3, needed := self._terms.needed(self._terms.clients)):
            raise BelowThreshold(
                f"{self._clients} of {self._terms.clients} clients have sent keys, {max(3, needed)} needed"
            )
        own = [client for client, (name, _) in listed.keys.items() if name == self._member]
        if len(own) != 1 or listed.keys[own[0]][1] != self._keys:
            raise Refused("the key list does not have this client's own keys once")
        self._index = own[0]
        graph = Graph(self._clients, self._terms.degree, self._session)
        self._neighbours = graph.neighbours(self._index)
        self._hood = sorted([*self._neighbours, self._index])
        self._needed = self._terms.needed(len(self._hood))
        if sorted(listed.keys) != self._hood:
            raise Refused("the key list shows the keys of other clients than this one's neighbours")
        self._names = {client: name for client, (name, _) in listed.keys.items()}
        if len(set(self._names.values())) != len(self._names):
            raise Refused("the key list has a client twice")
        self._others = {client: found for client, (_, found) in listed.keys.items()}
        for other in self._neighbours:
            name, found = listed.keys[other]
            if not self._verify(name, found.signed(self._terms, name), found.signature):
                raise Refused(f"the keys of {name} are not signed by it for this round, model and terms")
            self._boxes[other] = keys.ShareBox(self._share_key, found.shares, self._session)

    def _require(self, parties: int, what: str) -> None:
        if parties < self._needed:
            raise BelowThreshold(
                f"{parties} of the {len(self._hood)} clients in the neighbourhood of {self._member} {what}, {self._needed} needed"
            )

    @contextmanager
    def _step(self, step: Step) -> Iterator[None]:
        """Only the next step may be taken; where it fails there is no next one."""
        if self._next is not step:
            raise Refused(
                f"{step.name.lower().replace('_', ' ')}: this step is not the next one of {self._member}; each is taken once"
            )
        self._next = Step.NOTHING
        yield
        self._next = Step(step + 1)
