"""Requests that were answered before, told apart without building the model.

To know an artifact by its graphs (`models.export.cache`) takes torch and a trace of the model, seconds of work. Of a
model of our own the graphs follow from the request, our code and the libraries, so an answer is also kept under the
SHA-256 of those. Of anybody else's model, and of files, nothing is known before they are built: they are traced.

    <folder>/answered/<sha256>.json   the names of the artifact's two files in <folder>/artifacts
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from edge_client.files import write_durably
from edge_client.wire import manifest as manifests
from edge_client.wire.manifest import ManifestError

_CODE = ("models", "edge_client", "strategies")
_LIBRARIES = ("torch", "numpy", "litert-torch", "litert-converter", "ai-edge-litert")
_OURS = "models.zoo."
ARTIFACTS = "artifacts"
"""Folder of the cache in which artifacts and their manifests lie."""


def known(model: str) -> bool:
    """Whether the graphs of `model` follow from what `digest` covers: it is a builder of ours and of nobody else."""
    found = entry_points(group="fedloop.models", name=model)
    return len(found) == 1 and all(entry.value.startswith(_OURS) for entry in found)


def digest(request: Mapping[str, Any]) -> str:
    """Of a request, every line of our code, and the libraries below it. Reads 2 MB."""
    total = hashlib.sha256(json.dumps(request, sort_keys=True).encode())
    total.update(f"\n{platform.python_version()} {platform.machine()}\n".encode())
    total.update("\n".join(f"{name} {_version(name)}" for name in _LIBRARIES).encode())
    root = Path(__file__).resolve().parents[2]
    for package in _CODE:
        for path in sorted((root / package).rglob("*.py")):
            code = path.read_bytes()
            total.update(f"\n{path.relative_to(root)} {len(code)}\n".encode())
            total.update(code)
    return total.hexdigest()


def find(folder: Path, digest: str) -> tuple[Path, Path] | None:
    """The artifact and its manifest, if both are there and whole; None where the model has to be traced."""
    try:
        named = json.loads(_place(folder, digest).read_text("utf-8"))
        tflite, manifest = (folder / ARTIFACTS / named[kind] for kind in ("tflite", "manifest"))
        described = manifests.from_json(manifest.read_bytes(), str(manifest))
        manifests.require_file(described, tflite.read_bytes(), str(tflite))
    except (OSError, ValueError, KeyError, TypeError, ManifestError):
        return None
    return tflite, manifest


def keep(folder: Path, digest: str, tflite: Path, manifest: Path) -> None:
    """Remembers the answer; a folder that cannot be written costs the next one its trace, nothing else."""
    names = {"tflite": tflite.name, "manifest": manifest.name}
    with suppress(OSError):
        _place(folder, digest).parent.mkdir(exist_ok=True)
        write_durably(_place(folder, digest), json.dumps(names).encode())


def _place(folder: Path, digest: str) -> Path:
    return folder / "answered" / f"{digest}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
