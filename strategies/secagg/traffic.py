"""Bytes that secure aggregation sends: of this implementation, and of Bonawitz 2017 by the paper's own cost model."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.codes.packing import packed_bytes
from strategies.secagg.client import SEALED_BYTES
from strategies.secagg.graph import Graph
from strategies.secagg.messages import DIGEST_BYTES, HEADER_BYTES, KEY_BYTES
from strategies.secagg.shamir import SHARE_BYTES
from strategies.secagg.terms import Terms


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client in one round.

    Attributes:
        masked: the masked input alone.
        up: all that the client sends, the masked input included.
        down: all that it receives, the model not included.
    """

    masked: int
    up: int
    down: int


def client_traffic(terms: Terms, *, name_bytes: int, signature_bytes: int) -> Traffic:
    """What each client sends and receives if none drops out."""
    clients, degree = terms.clients, Graph(terms.clients, terms.degree, bytes(32)).degree
    bits_of_all, bits_of_hood = packed_bytes(clients, 1), packed_bytes(degree, 1)
    signature = 1 + signature_bytes
    keys = 2 * KEY_BYTES + signature
    masked = packed_bytes(terms.length, terms.ring_bits)
    up = 5 * HEADER_BYTES + keys + DIGEST_BYTES + degree * SEALED_BYTES + masked + signature
    up += (degree + 1) * SHARE_BYTES
    key_list = (
        2 + bits_of_all + (degree + 1) * (1 + name_bytes + keys) + (clients - 1 - degree) * DIGEST_BYTES
    )
    down = 4 * HEADER_BYTES + key_list + bits_of_hood + degree * SEALED_BYTES + 2 * bits_of_all
    down += bits_of_hood + degree * signature
    return Traffic(HEADER_BYTES + masked, up, down)


def expansion_of_bonawitz(clients: int, values: int, value_bits: int = 16, key_bits: int = 256) -> float:
    """A client's traffic over that of sending its values in the clear, in the protocol of Bonawitz 2017 (section 7.1).

    All clients are neighbours: 2 keys of each, 5 n - 4 shares, and values in a ring that holds the sum of n of them.
    """
    largest_sum = clients * (2**value_bits - 1)
    masked: int = values * largest_sum.bit_length()
    return ((7 * clients - 4) * key_bits + masked) / (values * value_bits)
