"""Keeps a distance of rounds between two participations of a client.

The clients are divided by chance into as many groups as rounds must lie between, and the rounds take the groups in turn. So a client
is never chosen sooner, whatever became of earlier rounds, and nothing has to be remembered of them. Choquette-Choo 2023b, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.privacy.noise.correlated import Participation


@dataclass(frozen=True)
class Turns:
    """In which rounds each client may take part: those of its group's turn, `separation` rounds apart.

    Attributes:
        groups: the number of a client's group, from 0 to `separation` - 1.
    """

    separation: int
    groups: Mapping[str, int]

    def select(self, round_number: int, clients: Sequence[str]) -> Sequence[str]:
        """Those whose turn this round is, in their order."""
        turn = round_number % self.separation
        return [client for client in clients if self.groups[client] == turn]


def make_turns(clients: Sequence[str], separation: int, rng: np.random.Generator) -> Turns:
    """Turns of groups whose sizes differ by one at most."""
    order = rng.permutation(len(clients)).tolist()
    return Turns(separation, {clients[index]: place % separation for place, index in enumerate(order)})


def in_words(participation: Participation) -> str:
    """The assumption about how often a client takes part, for people."""
    if participation.separation == 1:
        return "nothing is claimed of how rounds get their clients, so one may take part in each of them"
    return (
        f"a client that took part in a round takes part again {participation.separation} rounds later at the earliest, so at most "
        f"{participation.most} times; nothing else is claimed of how rounds get their clients"
    )
