"""Why a party leaves the protocol."""

from __future__ import annotations


class ProtocolError(ValueError):
    """The protocol cannot go on for this party; the message says why."""


class Refused(ProtocolError):
    """A message breaks the protocol: malformed, replayed, forged, or of another round."""


class BelowThreshold(ProtocolError):
    """Too few clients are left: the round ends without a sum."""
