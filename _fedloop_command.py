"""Starts the `fedloop` command, also where somebody shadows the very package it lives in.

It lies outside that package for this one reason; everything else about our names is in `coordinator.import_guard`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Hands over to `coordinator.commands.cli`, if that is ours; exits with 2 and says what to do if not."""
    ours = Path(__file__).resolve().parent / "coordinator"
    spec = find_spec("coordinator")
    found = Path(spec.origin).resolve().parent if spec is not None and spec.origin is not None else None
    if found != ours:
        sys.stderr.write(
            f"error: the name 'coordinator' leads to {found}, not to {ours}; rename or move that, or take its folder "
            "off PYTHONPATH\n"
        )
        raise SystemExit(2)
    from coordinator.commands import cli

    cli.main()
