"""Verification of the files and rollouts that come with signed metadata."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tuf.api.exceptions import LengthOrHashMismatchError
from tuf.api.metadata import TargetFile

from coordinator.errors import Refusal
from coordinator.releases import checks
from coordinator.releases.roles import ReleaseName
from edge_client.wire import inference
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import from_json as read_rollouts
from edge_client.wire.strict import InvalidDocument


def check_files(targets: Mapping[str, TargetFile], files: Mapping[str, Path]) -> None:
    """Checks that files have the signed bytes, and manifests describe their releases.

    `files`: target path -> file.

    Raises:
        Refusal: 422 `wrong_bytes`, `wrong_manifest`, `missing_file`.
    """
    for path, source in files.items():
        try:
            with source.open("rb") as file:
                targets[path].verify_length_and_hashes(file)
        except LengthOrHashMismatchError as error:
            raise wrong_bytes(path, error) from None
        except FileNotFoundError:  # another call published the same upload meanwhile
            raise Refusal(422, "missing_file", f"{path}: its upload is gone; publish again") from None
    for name, (_, model) in checks.releases_in(targets).items():
        if name.manifest in files:
            _check_manifest(name, files[name.manifest], model)


def check_rollouts(model: str, document: Mapping[str, Any], released: Collection[ReleaseName]) -> None:
    """Checks a rollouts document of a model.

    Raises:
        Refusal: 422 `malformed`, also for another model; 409 `unknown_release`.
    """
    try:
        parsed = read_rollouts(json.dumps(document).encode(), model)
    except (InvalidDocument, TypeError, ValueError) as error:
        raise Refusal(422, "malformed", str(error)) from None
    for each in parsed.rollouts:
        name = ReleaseName(model, each.version)
        if each.action == "install" and name not in released:
            raise Refusal(409, "unknown_release", f"{name} is not a release; sign and publish it first")


def wrong_bytes(path: str, error: LengthOrHashMismatchError) -> Refusal:
    """The refusal of a file that is not the signed one."""
    return Refusal(422, "wrong_bytes", f"{path} is not the signed file: {error}")


def _check_manifest(name: ReleaseName, path: Path, model: TargetFile) -> None:
    try:
        manifest = inference.from_json(path.read_bytes(), name.manifest)
    except ManifestError as error:
        raise Refusal(422, "wrong_manifest", str(error)) from None
    described = ReleaseName(manifest.model, manifest.version)
    if described != name:
        raise Refusal(422, "wrong_manifest", f"{name.manifest} describes {described}")
    if manifest.file.sha256 != model.hashes["sha256"]:
        raise Refusal(422, "wrong_manifest", f"{name.manifest} describes another file than {name.file}")
