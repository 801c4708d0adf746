"""Where the app writes its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: str, document: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(document))
