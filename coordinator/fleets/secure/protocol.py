"""The server of one group of devices: what the rows of the database say, taken through the stages of the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.fleets.secure.groups import Group
from edge_client.transport.signatures import BadCertificate, DeviceKeys
from edge_client.wire.secure import STAGES
from strategies.secagg.errors import Refused
from strategies.secagg.ring import Residues
from strategies.secagg.server import Server
from strategies.secagg.terms import Terms
from strategies.secagg.threshold import FEWEST_CLIENTS

OVER = len(STAGES)
"""The stage after the last."""


@dataclass(frozen=True)
class Closed:
    """What closing a stage gives, by device. `replies`: for those that go on; `refused`: why a message was refused."""

    replies: Mapping[str, bytes]
    refused: Mapping[str, str]


@dataclass
class GroupProtocol:
    """A group in progress. Fed the same messages, it gives the same replies and the same sum.

    Attributes:
        terms: None: too few clients for any sum.
        members: devices whose next messages are waited for.
        stage: that is next to be closed.
        ended: why the group has no sum.
    """

    group: Group
    terms: Terms | None
    members: set[str]
    keys: DeviceKeys
    stage: int = 0
    ended: str | None = None
    _server: Server | None = None

    def __post_init__(self) -> None:
        if self.terms is None:
            self.ended = f"{len(self.members)} clients, expected {FEWEST_CLIENTS} or more"
        else:
            self._server = Server(self.terms, sorted(self.members), self.keys.verify)

    @property
    def is_over(self) -> bool:
        return self.ended is not None or self.stage == OVER

    @property
    def included(self) -> set[str]:
        """The devices of the sum."""
        return set(self._server.included) if self.has_sum and self._server is not None else set()

    @property
    def has_sum(self) -> bool:
        return self.ended is None and self.stage == OVER

    def sum(self) -> Residues:
        """The sum of the included devices' vectors."""
        assert self._server is not None and self.has_sum
        return self._server.sum()

    def close(self, messages: Iterable[tuple[str, bytes, str | None]]) -> Closed:
        """Takes the messages of the stage, each with its device and, for keys, its certificate, and closes the stage.

        Raises:
            ProtocolError: the group ends without a sum.
        """
        assert self._server is not None and not self.is_over
        refused: dict[str, str] = {}
        taken: set[str] = set()
        for device, body, certificate in messages:
            try:
                if certificate is not None:
                    self.keys.add(device, certificate)
                self._server.receive(device, body)
                taken.add(device)
            except (Refused, BadCertificate) as error:
                refused[device] = str(error)
        replies = self._server.close_stage()
        self.members, self.stage = taken, self.stage + 1
        return Closed(replies, refused)
