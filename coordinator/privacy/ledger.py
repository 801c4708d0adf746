"""The ledger of a run: how many of its rounds have spent their share of epsilon, durable before anything of a round is released.

A round that is played again, because the process died before its commit, has the same noise, so it releases nothing new and is not
charged again. A ledger belongs to one mechanism: another noise or another seed in the same folder would release something new.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import UserError
from edge_client.files import write_durably

if TYPE_CHECKING:
    from coordinator.rounds.private_round import Release

FORMAT = 1


class FileLedger:
    """The ledger in a file. `mechanism`: JSON values of all that the noise follows from.

    Attributes:
        rounds: that are charged; epsilon: that they have spent.

    Raises:
        UserError: the file is damaged, or of another mechanism.
    """

    def __init__(self, path: Path, mechanism: Mapping[str, Any]) -> None:
        self._path = path
        self._mechanism = dict(mechanism)
        self.rounds, self.epsilon = 0, 0.0
        try:
            document = json.loads(path.read_bytes())
            known, self.rounds, self.epsilon = (document[key] for key in ("mechanism", "rounds", "epsilon"))
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: the privacy ledger is damaged: {error}; start the run anew") from None
        if known != self._mechanism:
            raise UserError(
                f"{path}: {self.rounds} rounds were charged for another mechanism, {json.dumps(known)}; this run has "
                f"{json.dumps(self._mechanism)}; start it in a new folder"
            )

    def enter(self, round_number: int, clients: Sequence[str]) -> None:
        """Does nothing: every client of a simulation spends what the run does."""

    def find_release(self, round_number: int) -> None:
        """None: a round that is played again has the same noise."""

    def keep(self, round_number: int, release: Release) -> Release:
        """The release itself."""
        return release

    def charge(self, round_number: int, epsilon: float, clients: Sequence[str] = ()) -> None:
        """Makes durable that the rounds up to this one have spent `epsilon`; nothing if they were charged before."""
        if round_number <= self.rounds:
            return
        document = {
            "format": FORMAT,
            "mechanism": self._mechanism,
            "rounds": round_number,
            "epsilon": epsilon,
        }
        write_durably(self._path, json.dumps(document).encode())
        self.rounds, self.epsilon = round_number, epsilon
