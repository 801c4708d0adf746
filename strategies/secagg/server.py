"""The server in one round of secure aggregation of one group.

    KEYS            receive public keys;     close: the key list, to each client with the keys of its neighbours
    SHARES          receive sealed shares;   close: to each client those that its neighbours sealed for it
    MASKED_INPUT    add up masked vectors;   close: the list of survivors
    CONFIRMATION    receive signatures;      close: to each client those of its neighbours
    REVEALED        receive shares;          close: rebuild the masks that are left in the sum and subtract them

Clients that have not answered when a stage is closed have dropped out. Memory holds one vector, however many clients there are.
Neither transport nor disk nor clock is used: the caller delivers messages and decides when a stage ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from strategies.codes.packing import BadCode, unpack
from strategies.codes.packing import Body as PackedBody
from strategies.secagg import keys, shamir
from strategies.secagg.client import SEALED_BYTES, Verify
from strategies.secagg.errors import BelowThreshold, ProtocolError, Refused
from strategies.secagg.graph import Graph
from strategies.secagg.masks import add_masks
from strategies.secagg.messages import (
    DIGEST_BYTES,
    Body,
    KeyList,
    Keys,
    Kind,
    header,
    member_bits,
    short,
    survivors_signed,
)
from strategies.secagg.ring import Residues
from strategies.secagg.terms import Terms

_MASKS_AT_ONCE = 64

_TITLES = {
    Kind.KEYS: "sent keys",
    Kind.SHARES: "shared their keys",
    Kind.MASKED_INPUT: "sent their input",
    Kind.CONFIRMATION: "signed the list of survivors",
    Kind.REVEALED: "revealed shares",
}
_STAGES = [*_TITLES]


class Server:
    """The server's side. `members`: names of the invited clients."""

    def __init__(self, terms: Terms, members: Collection[str], verify: Verify) -> None:
        if len(set(members)) != terms.clients:
            raise ValueError(f"{len(set(members))} members, the terms are for {terms.clients}")
        self._terms, self._members, self._verify = terms, set(members), verify
        self._stage = 0
        self._answered: set[str] = set()
        self._advertised: dict[str, Keys] = {}
        self._commitments: dict[int, bytes] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}
        self._alive: list[int] = []
        self._sum: Residues = terms.ring.zeros(terms.length)
        self._signatures: dict[int, bytes] = {}
        self._revealed: dict[int, dict[int, bytes]] = {}

    @property
    def included(self) -> list[str]:
        """The clients of the sum; final once their input has been received."""
        return [self._names[client] for client in self._alive]

    def receive(self, member: str, message: bytes) -> None:
        """Takes a client's message of the present stage; `member` is who sent it, by the transport.

        Raises:
            Refused: the message, or who sent it. Unless another message follows, the client counts as dropped out.
        """
        if self._stage >= len(_STAGES):
            raise Refused(f"{member}: the round is over")
        kind = _STAGES[self._stage]
        if member not in self._members:
            raise Refused(f"{member} is not invited or has dropped out of the group")
        if member in self._answered:
            raise Refused(f"{member} has sent its {kind.title} already")
        if kind is Kind.KEYS:
            body = Body(kind, self._terms.digest, message)
            self._take_keys(member, body)
        else:
            body = Body(kind, self._session, message)
            take = {
                Kind.SHARES: self._take_shares,
                Kind.MASKED_INPUT: self._take_masked_input,
                Kind.CONFIRMATION: self._take_confirmation,
                Kind.REVEALED: self._take_revealed,
            }[kind]
            take(self._index[member], body)
        self._answered.add(member)

    def close_stage(self) -> dict[str, bytes]:
        """Ends the stage: the messages for the clients that are still there, or none after the last stage.

        Raises:
            BelowThreshold: too few clients are left.
            ProtocolError: shares that were revealed do not fit what their owner committed to.
        """
        kind = _STAGES[self._stage]
        needed = max(3 if kind is Kind.KEYS else 1, self._terms.needed(self._terms.clients))
        if len(self._answered) < needed:
            raise BelowThreshold(
                f"{len(self._answered)} of {self._terms.clients} clients have {_TITLES[kind]}, {needed} needed"
            )
        closing = {
            Kind.KEYS: self._list_keys,
            Kind.SHARES: self._pass_on_shares,
            Kind.MASKED_INPUT: self._list_survivors,
            Kind.CONFIRMATION: self._pass_on_confirmations,
            Kind.REVEALED: self._unmask,
        }[kind]
        messages = closing()
        self._stage += 1
        self._members, self._answered = self._answered, set()
        return messages

    def sum(self) -> Residues:
        """The sum of the included clients' vectors. Raises ProtocolError before the last stage is closed."""
        if self._stage < len(_STAGES):
            raise ProtocolError("the sum is still masked")
        return self._sum

    def _take_keys(self, member: str, body: Body) -> None:
        found = Keys.take(body)
        body.end()
        if not self._verify(member, found.signed(self._terms, member), found.signature):
            raise Refused(f"the keys of {member} are not signed by it for this round, model and terms")
        self._advertised[member] = found

    def _list_keys(self) -> dict[str, bytes]:
        self._names = sorted(self._advertised)
        self._index = {member: client for client, member in enumerate(self._names)}
        everyone = [(member, self._advertised[member]) for member in self._names]
        self._keys = [found for _, found in everyone]
        listed = KeyList.of(everyone)
        self._session = listed.session(self._terms)
        graph = Graph(len(self._names), self._terms.degree, self._session)
        self._neighbours = [graph.neighbours(client) for client in range(len(self._names))]
        self._needed_of_hood = self._terms.needed(graph.degree + 1)
        return {
            member: header(Kind.KEY_LIST, self._terms.digest)
            + listed.showing([client, *self._neighbours[client]]).to_bytes()
            for client, member in enumerate(self._names)
        }

    def _take_shares(self, client: int, body: Body) -> None:
        commitment = body.take(DIGEST_BYTES)
        sealed = {other: body.take(SEALED_BYTES) for other in self._neighbours[client]}
        body.end()
        self._commitments[client], self._sealed[client] = commitment, sealed

    def _pass_on_shares(self) -> dict[str, bytes]:
        self._require_hoods(self._sealed, Kind.SHARES)
        messages = {}
        for client in self._sealed:
            sharing = [other for other in self._neighbours[client] if other in self._sealed]
            messages[self._names[client]] = b"".join(
                [
                    header(Kind.SHARES_FOR, self._session),
                    member_bits(sharing, self._neighbours[client]),
                    *(self._sealed[other][client] for other in sharing),
                ]
            )
        self._sharing = sorted(self._sealed)
        self._sealed.clear()
        return messages

    def _take_masked_input(self, client: int, body: Body) -> None:
        ring, packed = self._terms.ring, PackedBody(body.rest())
        try:
            residues = unpack(packed, self._terms.length, ring.bits, "residues")
            packed.end()
        except BadCode as error:
            raise Refused(f"masked input of {self._names[client]}: {error}") from None
        # As words of the ring: NumPy adds int64 and uint64 as float64.
        self._sum += residues.astype(ring.word)
        self._alive.append(client)

    def _list_survivors(self) -> dict[str, bytes]:
        self._alive.sort()
        self._require_hoods(self._alive, Kind.MASKED_INPUT)
        everyone = range(len(self._names))
        dropped = set(self._sharing) - set(self._alive)
        message = (
            header(Kind.SURVIVORS, self._session)
            + member_bits(self._alive, everyone)
            + member_bits(dropped, everyone)
        )
        self._confirmed = survivors_signed(self._session, self._alive, len(self._names))
        return dict.fromkeys(self.included, message)

    def _take_confirmation(self, client: int, body: Body) -> None:
        signature = body.take_short()
        body.end()
        if not self._verify(self._names[client], self._confirmed, signature):
            raise Refused(f"{self._names[client]} has not signed the list of survivors")
        self._signatures[client] = signature

    def _pass_on_confirmations(self) -> dict[str, bytes]:
        self._require_hoods(self._signatures, Kind.CONFIRMATION)
        messages = {}
        for client in self._signatures:
            signing = [other for other in self._neighbours[client] if other in self._signatures]
            messages[self._names[client]] = b"".join(
                [
                    header(Kind.CONFIRMATIONS, self._session),
                    member_bits(signing, self._neighbours[client]),
                    *(short(self._signatures[other]) for other in signing),
                ]
            )
        return messages

    def _take_revealed(self, client: int, body: Body) -> None:
        sharing = set(self._sharing)
        owners = sorted(sharing & {client, *self._neighbours[client]})
        shares = {owner: body.take(shamir.SHARE_BYTES) for owner in owners}
        body.end()
        for owner, share in shares.items():
            self._revealed.setdefault(owner, {})[client] = share

    def _unmask(self) -> dict[str, bytes]:
        for owner in self._sharing:
            found = len(self._revealed.get(owner, {}))
            if found < self._needed_of_hood:
                raise BelowThreshold(
                    f"{found} shares of a secret of {self._names[owner]} were revealed, {self._needed_of_hood} needed"
                )
        alive = set(self._alive)
        plus: list[bytes] = []
        minus: list[bytes] = []
        for owner in self._sharing:
            if owner in alive:
                minus.append(keys.self_mask_key(self._rebuild_seed(owner), self._session))
                continue
            private = self._rebuild_mask_key(owner)
            for other in self._neighbours[owner]:
                if other in alive:
                    # The survivor with the lower number has added the mask, so it is subtracted.
                    key = keys.mask_key(private, self._keys[other].masks, self._session)
                    (minus if other < owner else plus).append(key)
        for some in _batches(plus):
            add_masks(self._sum, self._terms.ring, some)
        for some in _batches(minus):
            add_masks(self._sum, self._terms.ring, [], some)
        self._terms.ring.reduce(self._sum)
        self._revealed.clear()
        return {}

    def _rebuild_seed(self, owner: int) -> bytes:
        seed = self._combine(owner)
        if keys.seed_commitment(seed, self._session, owner) != self._commitments[owner]:
            raise self._forged(owner, "the seed of its mask")
        return seed

    def _rebuild_mask_key(self, owner: int) -> keys.PrivateKey:
        private = keys.private_key(self._combine(owner))
        if keys.public_key(private) != self._keys[owner].masks:
            raise self._forged(owner, "its mask key")
        return private

    def _combine(self, owner: int) -> bytes:
        shares = sorted(self._revealed[owner].items())[: self._needed_of_hood]
        try:
            return shamir.combine([share for _, share in shares], [holder + 1 for holder, _ in shares])
        except shamir.BadShare as error:
            raise ProtocolError(f"shares of {self._names[owner]}: {error}") from None

    def _forged(self, owner: int, what: str) -> ProtocolError:
        return ProtocolError(
            f"the shares revealed of {self._names[owner]} do not give {what}: a neighbour has forged one, or it has dealt wrong ones"
        )

    def _require_hoods(self, left: Collection[int] | Mapping[int, object], kind: Kind) -> None:
        """Every client that goes on needs enough of its neighbourhood."""
        there = set(left)
        for client in there:
            hood = 1 + len(there.intersection(self._neighbours[client]))
            if hood < self._needed_of_hood:
                raise BelowThreshold(
                    f"{hood} of the {1 + len(self._neighbours[client])} clients in the neighbourhood of {self._names[client]} "
                    f"have {_TITLES[kind]}, {self._needed_of_hood} needed"
                )


def _batches(mask_keys: list[bytes]) -> Iterable[list[bytes]]:
    """So that the streams of many masks need little memory at once."""
    return (mask_keys[start : start + _MASKS_AT_ONCE] for start in range(0, len(mask_keys), _MASKS_AT_ONCE))
