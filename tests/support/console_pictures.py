"""Makes the pictures of the console in `docs/images` anew: `python -m tests.support.console_pictures [views]`.

The large ones are of `fedloop demo-fleet --serve`. With `views`, those in `docs/images/console`, of every view in both themes and at 360 pixels: the
browser test leaves them, of a coordinator with real devices that has something of each kind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from coordinator.accounts.admin_token import read_admin_token
from tests.support.browser import running

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLOURS, EXACT_COLOURS, SCALE, MAX_HEIGHT = 64, 12, 0.6, 1600


def main(folder: Path) -> None:
    command = [str(Path(sys.executable).parent / "fedloop"), "demo-fleet", "--serve", "--out", str(folder)]
    with subprocess.Popen(command) as demo:
        try:
            home = _home(folder, demo)
            url = json.loads((home / "serve.json").read_bytes())["operator"]
            requested = {"url": url, "token": read_admin_token(home), "folder": str(IMAGES)}
            with running("pictures.mjs", requested) as process:
                process.communicate()
        finally:
            demo.send_signal(signal.SIGINT)
    if process.returncode:
        sys.exit("the pictures were not made")


def every_view(folder: Path) -> None:
    """Pictures of every view, made by the browser test, with few colours, so that a hundred are small."""
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "tests/e2e/test_console.py"]
    subprocess.run(command, check=True, env={**os.environ, "FEDLOOP_TEST_PICTURES": str(folder)})
    for path in folder.glob("*chinese*"):  # many machines have no font for it
        path.unlink()
    shrink(folder, IMAGES / "console")


def shrink(source: Path, target: Path) -> None:
    """The PNG files of a folder with at most `COLOURS` colours, smaller, and no more than `MAX_HEIGHT` high."""
    target.mkdir(exist_ok=True)
    for path in sorted(source.glob("*.png")):
        picture = Image.open(path).convert("RGB")
        picture = picture.crop((0, 0, picture.width, min(picture.height, MAX_HEIGHT)))
        if not path.stem.endswith("narrow"):
            size = round(picture.width * SCALE), round(picture.height * SCALE)
            picture = picture.resize(size, Image.Resampling.HAMMING)  # no rings around letters
        with_few_colours(picture).save(target / path.name, optimize=True)


def with_few_colours(picture: Image.Image) -> Image.Image:
    """The picture with at most `COLOURS` colours. The most frequent ones, such as the background, stay as they are."""
    colours, where, counts = np.unique(
        np.asarray(picture).reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    exact = colours[np.argsort(-counts)[:EXACT_COLOURS]]
    others = picture.quantize(COLOURS - len(exact), Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    chosen = np.array(others.getpalette(), np.uint8).reshape(-1, 3)[: COLOURS - len(exact)]
    palette = np.unique(np.concatenate([exact, chosen]), axis=0)
    parts = np.array_split(colours.astype(int), 1 + len(colours) // 4096)
    nearest = [((part[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1) for part in parts]
    indices = (
        np.concatenate(nearest).astype(np.uint8)[where.reshape(-1)].reshape(picture.height, picture.width)
    )
    reduced = Image.fromarray(indices, "P")
    reduced.putpalette(palette.tobytes())
    return reduced


def _home(folder: Path, demo: subprocess.Popen[bytes]) -> Path:
    """The home of the demo's coordinator, once that serves."""
    while demo.poll() is None:
        for found in folder.rglob("serve.json"):
            return found.parent
        time.sleep(0.2)
    sys.exit("the demo ended")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:] == ["views"]:
            every_view(Path(folder) / "views")
        else:
            main(Path(folder) / "demo")
