"""Detects distributions and folders that shadow our top-level packages.

`coordinator`, `edge_client`, `strategies` and `models` are generic names. Another distribution may install a package of the
same name, or a folder on `PYTHONPATH` may take precedence; then imports reach the wrong code. Commands check this before
they start and say what to do.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

NAMES = ("coordinator", "edge_client", "strategies", "models")
DISTRIBUTION = "fedloop"


def problems() -> list[str]:
    """One sentence for each name that is shadowed or contested; empty if there is none."""
    locations = {name: _location(name) for name in NAMES}
    home = Path(__file__).resolve().parent.parent
    return shadowed(locations, home) + contested(_owners(tuple(sys.path)))


def shadowed(locations: Mapping[str, Path | None], home: Path) -> list[str]:
    """Problems of names that Python finds outside `home`, the folder of this installation."""
    return [
        f"the name {name!r} leads to {where}, not to {home / name}; rename or move that, or take its folder off "
        "PYTHONPATH"
        if where is not None
        else f"the package {name!r} is missing from {home}; install fedloop again: pip install --force-reinstall fedloop"
        for name, where in locations.items()
        if where != home / name
    ]


def contested(owners: Mapping[str, Sequence[str]]) -> list[str]:
    """Problems of names that another distribution installs too."""
    return [
        f"the distribution {other!r} also installs a top-level package {name!r}; remove it (pip uninstall {other}) "
        "or keep fedloop in a virtual environment of its own"
        for name in NAMES
        for other in sorted(set(owners.get(name, ())) - {DISTRIBUTION})
    ]


@cache
def _owners(path: tuple[str, ...]) -> dict[str, list[str]]:
    """Distributions in folders of `path` by name that they install.

    `importlib.metadata.packages_distributions` does this for all names, and takes as long as the rest of a command's start.
    """
    owners: dict[str, list[str]] = {name: [] for name in NAMES}
    for distribution in distributions(path=list(path)):
        declared = distribution.read_text("top_level.txt")
        packages = f"\n{declared or distribution.read_text('RECORD') or ''}\n"
        for name in NAMES:
            if any(f"\n{name}{end}" in packages for end in ("\n", "/", ".py,")):
                owners[name].append(distribution.metadata["Name"])
    return owners


def _location(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent
