"""What the console takes from the API: its OpenAPI document, and the least role of each route. Run, it writes both into `web/`."""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.api.permissions import LEAST_ROLES
from coordinator.server.app import operator_document

WEB = Path(__file__).parents[2] / "web"
FILES = {
    WEB / "openapi.json": operator_document,
    WEB / "src" / "lib" / "permissions.json": lambda: {
        f"{method} {path}": role for (method, path), role in sorted(LEAST_ROLES.items())
    },
}

if __name__ == "__main__":
    for path, contents in FILES.items():
        path.write_text(json.dumps(contents(), indent=1) + "\n", "utf-8")
