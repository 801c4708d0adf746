"""What the console takes from the API: its OpenAPI document, the least role of each route, and the default gates of a rollout.

Run, it writes them into `web/`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coordinator.api.permissions import REQUIRED_ROLES
from coordinator.rollouts.gates import Gates
from coordinator.server.app import operator_document

WEB = Path(__file__).parents[2] / "web"
FILES: dict[Path, Callable[[], Any]] = {
    WEB / "openapi.json": operator_document,
    WEB / "src" / "lib" / "permissions.json": lambda: {
        f"{method} {path}": role for (method, path), role in sorted(REQUIRED_ROLES.items())
    },
    WEB / "src" / "lib" / "gates.json": lambda: asdict(Gates()),
}

if __name__ == "__main__":
    for path, contents in FILES.items():
        path.write_text(json.dumps(contents(), indent=1) + "\n", "utf-8")
