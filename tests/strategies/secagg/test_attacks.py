"""What the server, the network or another client tries against the protocol, and how it is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from strategies.secagg.client import SEALED_BYTES
from strategies.secagg.errors import ProtocolError, Refused
from strategies.secagg.keys import ShareBox, private_key, public_key
from strategies.secagg.masks import add_masks
from strategies.secagg.messages import HEADER_BYTES, Keys, Kind, header, member_bits
from strategies.secagg.ring import Ring
from strategies.secagg.server import Server
from tests.strategies.secagg.rounds import Round, terms_of, verify

FIRST, LAST = "device-0000", "device-0004"


def _played(until: str, clients: int = 5) -> Round:
    played = Round(terms_of(clients))
    played.play(until=until)
    return played


def test_a_swapped_key_is_refused_by_the_neighbours() -> None:
    played = Round(terms_of(5))
    own = public_key(private_key(b"s" * 32))

    def swap(stage: str, member: str, message: bytes) -> bytes:
        if stage != "shares" or member != FIRST:
            return message
        place = message.index(played.clients[LAST]._keys.masks)
        return message[:place] + own + message[place + 32 :]

    with pytest.raises(Refused, match=f"keys of {LAST} are not signed by it"):
        played.play(down=swap)


def test_the_server_refuses_keys_that_are_not_signed_by_their_client() -> None:
    played = Round(terms_of(5))

    def swap(stage: str, member: str, message: bytes) -> bytes:
        return message[:HEADER_BYTES] + bytes(32) + message[HEADER_BYTES + 32 :]

    with pytest.raises(Refused, match=f"keys of {FIRST} are not signed"):
        played.play(up=swap)


def test_a_client_that_was_given_another_model_is_refused() -> None:
    terms = terms_of(5)
    other = replace(terms, model_sha256="cd" * 32)
    with pytest.raises(Refused, match="another round, model or key list"):
        Round(terms, client_terms={LAST: other}).play()


def test_a_client_with_another_model_finds_no_keys_signed_for_it() -> None:
    terms = terms_of(5)
    other = replace(terms, model_sha256="cd" * 32)
    played = Round(terms, client_terms={LAST: other})

    def relabel(stage: str, member: str, message: bytes) -> bytes:
        """The server goes along with it, so that the client is not refused at the door."""
        if member == LAST and stage in ("keys", "shares") and message:
            kind = Kind.KEYS if stage == "keys" else Kind.KEY_LIST
            return header(kind, (terms if stage == "keys" else other).digest) + message[HEADER_BYTES:]
        return message

    played.server._verify = lambda *_: True
    with pytest.raises(Refused, match="not signed by it for this round, model and terms"):
        played.play(up=relabel, down=relabel)


def test_clients_that_were_shown_different_key_lists_share_no_keys() -> None:
    """The server shows client 3 a list without the last client. Both lists hold true keys, and the server forwards shares as it likes."""
    played = Round(terms_of(7))
    advertised = {member: played.clients[member].advertise_keys() for member in played.members}
    lists = []
    for members in (played.members, played.members[:-1]):
        server = Server(played.terms, played.members, verify)
        for member in members:
            server.receive(member, advertised[member])
        lists.append(server.close_stage())
    deceived = "device-0003"
    shares = {
        member: played.clients[member].share_keys(lists[member == deceived][member])
        for member in played.members
    }
    # The one sealed for client 0 comes first, after a commitment.
    start = HEADER_BYTES + 32
    from_deceived = shares[deceived][start : start + SEALED_BYTES]
    session = shares[FIRST][5:HEADER_BYTES]
    message = header(Kind.SHARES_FOR, session) + member_bits([3], range(1, 7)) + from_deceived
    with pytest.raises(
        Refused, match=r"shares of client 3 cannot be decrypted: .* another key list or model"
    ):
        played.clients[FIRST].mask_input(message, played.vectors[FIRST])


def _key_lists(played: Round) -> dict[str, bytes]:
    """The messages that ended the first stage, made again."""
    return played.server._list_keys()


def test_shares_sealed_under_another_key_list_cannot_be_opened() -> None:
    one, two = private_key(b"1" * 32), private_key(b"2" * 32)
    sealed = ShareBox(one, public_key(two), b"a" * 32).seal(b"shares", 0, 1)
    assert ShareBox(two, public_key(one), b"a" * 32).open(sealed, 0, 1) == b"shares"
    for session, sender, receiver in ((b"b" * 32, 0, 1), (b"a" * 32, 1, 0), (b"a" * 32, 0, 2)):
        with pytest.raises(Refused, match="cannot be decrypted"):
            ShareBox(two, public_key(one), session).open(sealed, sender, receiver)


def test_a_node_listed_alive_and_dead_is_refused() -> None:
    played = Round(terms_of(5))

    def both(stage: str, member: str, message: bytes) -> bytes:
        if stage != "confirmation":
            return message
        return message[:-1] + member_bits([2], range(5))

    with pytest.raises(Refused, match="client 2 is listed both as alive and as dropped out"):
        played.play(down=both)


@pytest.mark.parametrize(
    ("alive", "dropped", "message"),
    [
        ([0, 1, 2, 3], [], "client 4 has shared its keys and is neither alive nor dropped out"),
        ([1, 2, 3, 4], [0], "this client is listed as dropped out"),
        ([0, 1], [2, 3, 4], "the sum is of 2 of 5 clients, 4 needed"),
    ],
)
def test_a_false_list_of_survivors_is_refused(alive: list[int], dropped: list[int], message: str) -> None:
    played = Round(terms_of(5))

    def lie(stage: str, member: str, arrived: bytes) -> bytes:
        if stage != "confirmation":
            return arrived
        return arrived[:HEADER_BYTES] + member_bits(alive, range(5)) + member_bits(dropped, range(5))

    with pytest.raises(ProtocolError, match=message):
        played.play(down=lie)


def test_clients_that_were_told_of_different_survivors_reveal_nothing() -> None:
    played = Round(terms_of(7))

    def split(stage: str, member: str, message: bytes) -> bytes:
        if stage == "confirmation" and member >= "device-0004":
            return message[:HEADER_BYTES] + member_bits(range(1, 7), range(7)) + member_bits([0], range(7))
        return message

    played.server._verify = lambda *_: True
    with pytest.raises(Refused, match="has not signed the same list of survivors"):
        played.play(down=split)


def test_shares_are_revealed_once() -> None:
    played = Round(terms_of(5))
    asked: dict[str, bytes] = {}

    def keep(stage: str, member: str, message: bytes) -> bytes:
        if stage == "reveal":
            asked[member] = message
        return message

    played.play(down=keep)
    with pytest.raises(Refused, match=r"reveal shares: this step is not the next one .* each is taken once"):
        played.clients[FIRST].reveal_shares(asked[FIRST])


def test_a_client_that_refused_a_message_leaves_the_round() -> None:
    played = _played("keys")
    client = played.clients[FIRST]
    with pytest.raises(Refused):
        client.share_keys(b"nonsense")
    with pytest.raises(Refused, match="not the next one"):
        client.share_keys(_key_lists(played)[FIRST])


def test_a_message_sent_twice_counts_once() -> None:
    played = Round(terms_of(5))

    def twice(stage: str, member: str, message: bytes) -> bytes:
        if stage == "input" and member == FIRST:
            played.server.receive(member, message)
        return message

    with pytest.raises(Refused, match=f"{FIRST} has sent its masked input already"):
        played.play(up=twice)


def test_a_message_of_an_earlier_round_is_refused() -> None:
    earlier: dict[tuple[str, str], bytes] = {}

    def keep(stage: str, member: str, message: bytes) -> bytes:
        earlier[stage, member] = message
        return message

    Round(terms_of(5, round=2)).play(up=keep)
    for stage in ("keys", "shares", "input", "confirmation", "reveal"):

        def replay(at: str, member: str, message: bytes, stage: str = stage) -> bytes:
            return earlier[at, member] if at == stage else message

        with pytest.raises(Refused, match="of another round, model or key list"):
            Round(terms_of(5)).play(up=replay)


def test_a_forged_share_ends_the_round() -> None:
    def forge(stage: str, member: str, message: bytes) -> bytes:
        if stage != "reveal" or member != FIRST:
            return message
        return message[:HEADER_BYTES] + bytes([message[HEADER_BYTES] ^ 1]) + message[HEADER_BYTES + 1 :]

    played = Round(terms_of(5))
    with pytest.raises(ProtocolError, match="do not give the seed of its mask: a neighbour has forged one"):
        played.play(up=forge)
    with pytest.raises(ProtocolError, match="still masked"):
        played.server.sum()


def test_a_forged_share_of_a_mask_key_ends_the_round() -> None:
    def forge(stage: str, member: str, message: bytes) -> bytes:
        if stage != "reveal" or member != FIRST:
            return message
        place = len(message) - 33  # the last owner's, who dropped out
        return message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]

    with pytest.raises(ProtocolError, match=f"shares revealed of {LAST} do not give its mask key"):
        Round(terms_of(5)).play({"input": [LAST]}, up=forge)


def test_a_share_that_is_no_element_of_the_field_ends_the_round() -> None:
    def forge(stage: str, member: str, message: bytes) -> bytes:
        if stage != "reveal" or member != FIRST:
            return message
        return message[:HEADER_BYTES] + b"\xff" * (len(message) - HEADER_BYTES)

    with pytest.raises(ProtocolError, match="no element of the field"):
        Round(terms_of(5)).play(up=forge)


@pytest.mark.parametrize("stage", ["keys", "shares", "input", "confirmation", "reveal"])
@pytest.mark.parametrize("cut", ["shorter", "longer", "other format", "other kind"])
def test_malformed_messages_are_refused_by_the_server(stage: str, cut: str) -> None:
    def damage(at: str, member: str, message: bytes) -> bytes:
        if at != stage:
            return message
        return _damaged(message, cut)

    with pytest.raises(Refused):
        Round(terms_of(5)).play(up=damage)


@pytest.mark.parametrize("stage", ["shares", "input", "confirmation", "reveal"])
@pytest.mark.parametrize("cut", ["shorter", "longer", "other format", "other kind"])
def test_malformed_messages_are_refused_by_a_client(stage: str, cut: str) -> None:
    def damage(at: str, member: str, message: bytes) -> bytes:
        return _damaged(message, cut) if at == stage else message

    with pytest.raises(Refused):
        Round(terms_of(5)).play(down=damage)


def _damaged(message: bytes, cut: str) -> bytes:
    if cut == "shorter":
        return message[:-1]
    if cut == "longer":
        return message + b"\0"
    if cut == "other format":
        return b"XSA1" + message[4:]
    return message[:4] + bytes([(message[4] + 1) % 9]) + message[5:]


def test_a_stranger_is_refused() -> None:
    played = Round(terms_of(5))
    with pytest.raises(Refused, match="stranger is not invited"):
        played.server.receive("stranger", played.clients[FIRST].advertise_keys())


def test_a_client_that_dropped_out_cannot_come_back() -> None:
    played = Round(terms_of(6))
    played.play({"keys": [FIRST]}, until="keys")
    with pytest.raises(Refused, match="has dropped out"):
        played.server.receive(FIRST, b"")


def test_seeds_of_permuted_words_give_different_masks() -> None:
    """Flower 1.41 folds a seed to 32 bits by XOR, so such seeds give one mask there."""
    ring = Ring(32)
    seed = bytes(range(32))
    words = [seed[start : start + 4] for start in range(0, 32, 4)]
    masks = []
    for key in (seed, b"".join(words[::-1]), b"".join([*words[1:], words[0]])):
        masks.append(ring.zeros(1000))
        add_masks(masks[-1], ring, [key])
    assert len({mask.tobytes() for mask in masks}) == 3
    assert not np.array_equal(*masks[:2])


@pytest.mark.parametrize("bits", [3, 11, 17])
def test_every_residue_is_drawn_about_equally_often(bits: int) -> None:
    """Flower 1.41 never draws the largest one."""
    ring = Ring(bits)
    draws = 256 * 2 ** min(bits, 11)
    mask = ring.zeros(draws)
    add_masks(mask, ring, [b"k" * 32])
    drawn = ring.reduce(mask) >> ring.word.type(max(0, bits - 11))
    counts = np.bincount(drawn, minlength=2 ** min(bits, 11))
    assert len(counts) == 2 ** min(bits, 11)
    assert counts.min() > 256 - 6 * 16  # six standard deviations
    assert counts.max() < 256 + 6 * 16


def test_a_masked_input_looks_uniform() -> None:
    played = Round(terms_of(3, length=8000, ring_bits=8))
    sent: list[bytes] = []

    def keep(stage: str, member: str, message: bytes) -> bytes:
        if stage == "input":
            sent.append(message[HEADER_BYTES:])
        return message

    for vector in played.vectors.values():
        vector[:] = 7
    played.play(up=keep)
    for each in sent:
        counts = np.bincount(np.frombuffer(each, np.uint8), minlength=256)
        assert (
            (counts - 31.25) ** 2 / 31.25
        ).sum() < 400  # chi-squared of 255 degrees; 6 standard deviations


def test_keys_are_fresh_in_each_round() -> None:
    one, two = Round(terms_of(3), seed=1), Round(terms_of(3), seed=2)
    a, b = (played.clients[FIRST].advertise_keys() for played in (one, two))
    assert a[HEADER_BYTES:] != b[HEADER_BYTES:]
    assert Keys(b"", b"", b"s").digest("a") != Keys(b"", b"", b"s").digest("b")


@pytest.mark.slow
def test_a_device_needs_numpy_and_cryptography_only() -> None:
    program = (
        "import sys; before = set(sys.modules); import strategies.secagg.client; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert set(loaded.split()) <= {"strategies", "numpy", "cryptography", "_cffi_backend", "cffi", "_openssl"}
