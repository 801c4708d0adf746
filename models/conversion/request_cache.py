"""A cache of answered requests, keyed without building the model.

Finding an artifact by its graphs (`models.conversion.cache`) takes torch and a trace of the model, seconds of work. The graphs
of a built-in model follow from the request, our code and the libraries, so its answer is also stored under the
SHA-256 of those. Other models and files must be traced.

    <folder>/answered/<sha256>.json   the names of the artifact's two files in <folder>/artifacts
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from edge_client.files import write_durably
from edge_client.wire import manifest as manifests
from edge_client.wire.manifest import ManifestError
from models import widths

_CODE = ("models", "edge_client", "strategies")
_LIBRARIES = ("torch", "numpy", "litert-torch", "litert-converter", "ai-edge-litert")
_OURS = "models.zoo."
ARTIFACTS = "artifacts"
"""Folder of the cache with the artifacts and their manifests."""


def is_ours(model: str) -> bool:
    """Whether `model` is built-in, so that `digest` covers everything that determines its graphs."""
    if model == widths.MODEL:  # of a built-in model
        return True
    entries = entry_points(group="fedloop.models", name=model)
    return len(entries) == 1 and all(entry.value.startswith(_OURS) for entry in entries)


def digest(request: Mapping[str, Any]) -> str:
    """SHA-256 of a request, our source code and the libraries' versions. Reads 2 MB."""
    total = hashlib.sha256(json.dumps(request, sort_keys=True).encode())
    total.update(f"\n{platform.python_version()} {platform.machine()}\n".encode())
    total.update("\n".join(f"{name} {version_of(name)}" for name in _LIBRARIES).encode())
    root = Path(__file__).resolve().parents[2]
    for package in _CODE:
        for path in sorted((root / package).rglob("*.py")):
            code = path.read_bytes()
            total.update(f"\n{path.relative_to(root)} {len(code)}\n".encode())
            total.update(code)
    return total.hexdigest()


@dataclass(frozen=True)
class Exported:
    """An artifact on disk, in the cache.

    Attributes:
        cached: it existed already.
        seconds: duration of the steps: `trace`, and unless cached `convert` and `check`; empty for a repeated
            request.
    """

    tflite: Path
    manifest: Path
    cached: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)


def read(manifest: Path) -> Exported | None:
    """The artifact of a manifest, if it is complete; None for a missing or a damaged one, which is made again."""
    try:
        described = manifests.from_json(manifest.read_bytes(), str(manifest))
        tflite = manifest.with_name(f"{described.file.sha256}.tflite")
        manifests.require_file(described.file, tflite.read_bytes(), str(tflite))
    except (FileNotFoundError, ManifestError):
        return None
    return Exported(tflite, manifest, cached=True)


def find(folder: Path, digest: str) -> Exported | None:
    """The artifact that answers a request; None without a complete one, and the model must be traced."""
    try:
        names = json.loads(_path(folder, digest).read_text("utf-8"))
        return read(folder / ARTIFACTS / names["manifest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(folder: Path, digest: str, exported: Exported) -> None:
    """Stores the answer. If the folder is not writable, the next request only has to trace the model again."""
    names = {"tflite": exported.tflite.name, "manifest": exported.manifest.name}
    with suppress(OSError):
        _path(folder, digest).parent.mkdir(exist_ok=True)
        write_durably(_path(folder, digest), json.dumps(names).encode())


def _path(folder: Path, digest: str) -> Path:
    return folder / "answered" / f"{digest}.json"


def version_of(package: str) -> str:
    """The installed version of a distribution, or `absent`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
