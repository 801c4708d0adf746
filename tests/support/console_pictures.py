"""Makes the pictures of the console in `docs/images` anew, from `fedloop demo-fleet --serve`: `python -m tests.support.console_pictures`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from coordinator.accounts.admin_token import read_admin_token
from tests.support.browser import running

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main(folder: Path) -> None:
    command = [str(Path(sys.executable).parent / "fedloop"), "demo-fleet", "--serve", "--out", str(folder)]
    with subprocess.Popen(command) as demo:
        try:
            home = _home(folder, demo)
            url = json.loads((home / "serve.json").read_bytes())["operator"]
            asked = {"url": url, "token": read_admin_token(home), "folder": str(IMAGES)}
            with running("pictures.mjs", asked) as process:
                process.communicate()
        finally:
            demo.send_signal(signal.SIGINT)
    if process.returncode:
        sys.exit("the pictures were not made")


def _home(folder: Path, demo: subprocess.Popen[bytes]) -> Path:
    """The home of the demo's coordinator, once that serves."""
    while demo.poll() is None:
        for found in folder.rglob("serve.json"):
            return found.parent
        time.sleep(0.2)
    sys.exit("the demo ended")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "demo")
