"""What all parties of a round agree on before it begins."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from strategies.secagg.ring import Ring
from strategies.secagg.threshold import FEWEST_CLIENTS, LEAST_THRESHOLD, MOST_CLIENTS, needed

MOST_LENGTH = 2**32


@dataclass(frozen=True)
class Terms:
    """The parameters of one group's sum in one round. Their digest is signed with each client's keys and enters every derived key.

    Attributes:
        run, round: what the sum is for.
        model_sha256: the model that the clients train, in hex.
        group: number of the group in the round.
        clients: clients that are invited.
        length: residues of a vector.
        ring_bits: see `Ring`.
        degree: neighbours of each client; at least clients - 1 means all (`graph.log_degree`).
        threshold: share of the invited clients, and of a client's neighbourhood, that has to stay.
    """

    run: str
    round: int
    model_sha256: str
    group: int
    clients: int
    length: int
    ring_bits: int
    degree: int
    threshold: float = LEAST_THRESHOLD

    def __post_init__(self) -> None:
        Ring(self.ring_bits)
        if not LEAST_THRESHOLD <= self.threshold <= 1:
            raise ValueError(f"the threshold is {self.threshold}, expected 2/3 to 1")
        if not FEWEST_CLIENTS <= self.clients <= MOST_CLIENTS:
            raise ValueError(
                f"{self.clients} clients, expected {FEWEST_CLIENTS} to {MOST_CLIENTS} in a group"
            )
        if not 1 <= self.length <= MOST_LENGTH:
            raise ValueError(f"a vector of {self.length} residues, expected 1 to {MOST_LENGTH}")
        if self.degree < 2:
            raise ValueError(f"a degree of {self.degree}, expected 2 or more")

    @property
    def ring(self) -> Ring:
        return Ring(self.ring_bits)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the terms."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(b"fedloop secagg terms 1\0" + text.encode()).digest()

    def needed(self, parties: int) -> int:
        """How many of so many parties have to stay."""
        return needed(self.threshold, parties)
