"""The coordinator's certificate authority. (Its owner fills this in.)"""

from __future__ import annotations


class Authority:
    """Placeholder for the type only."""
