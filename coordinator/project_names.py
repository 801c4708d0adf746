"""Names of projects, the tenants of a coordinator."""

from __future__ import annotations

import re

DEFAULT_PROJECT = "default"
"""Exists on every coordinator. It owns what was made before there were projects, and publishes the signed releases."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def is_project_name(text: str) -> bool:
    """Whether a project may have this name: 1 to 63 lower-case letters, digits and inner hyphens."""
    return _NAME.fullmatch(text) is not None
