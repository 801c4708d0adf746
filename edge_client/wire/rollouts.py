"""Which devices run which version of a model: the document `rollouts/<model>.json` of the releases' repository.

It is signed by a separate key: its holder can choose among existing releases, but cannot add any.

    {"model": "digits", "rollouts": [{"rollout": "…", "version": 4, "action": "install", "force": false,
                                      "devices": ["…"], "salt": "", "permille": 0}]}
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from edge_client.wire.strict import InvalidDocument, loads, parse_message

MANIFEST_NAME, MODEL_NAME = "manifest.json", "model.tflite"
"""The two files of a release."""
REPOSITORY_PATH = "/releases"
"""Of the signed repository, at the coordinator."""

PERMILLE = 1000
NO_MODEL = 0
"""The version of a `roll_back` for a device that had no model before: it is to have none again."""
LARGEST_DOCUMENT_BYTES = 4_000_000
"""Largest rollouts document; enough for a list of 100,000 devices."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_LARGEST_VERSION = 10**9


@dataclass(frozen=True)
class Rollout:
    """One version for some devices.

    Attributes:
        devices: exactly these, or None: those that `salt` and `permille` select.
        permille: share of all devices, selected by hash; a growing share keeps its devices.
        force: includes devices on which this version failed before.
    """

    rollout: str
    version: int
    action: Literal["install", "roll_back"] = "install"
    force: bool = False
    devices: tuple[str, ...] | None = None
    salt: str = ""
    permille: int = 0

    def is_for(self, device: str) -> bool:
        """Whether the rollout includes this device."""
        if self.devices is not None:
            return device in self.devices
        return share_of(self.salt, device) < self.permille


@dataclass(frozen=True)
class Rollouts:
    model: str
    rollouts: tuple[Rollout, ...]


def share_of(salt: str, device: str) -> int:
    """A device's pseudo-random place between 0 and 999: SHA-256(salt + device id) mod 1000."""
    return int.from_bytes(hashlib.sha256((salt + device).encode()).digest()) % PERMILLE


def from_json(content: bytes, model: str) -> Rollouts:
    """The document of `model`.

    Raises:
        InvalidDocument: it is invalid, or another model's.
    """
    place = rollouts_path(model)
    document = parse_message(Rollouts, loads(content, place), place)
    if document.model != model:
        raise InvalidDocument(f"{place}: model is {document.model[:70]!r}")
    return document


def is_release(model: str, version: int) -> bool:
    """Whether a release may have this name and version, which become names of folders and files."""
    return _NAME.fullmatch(model) is not None and 1 <= version < _LARGEST_VERSION


def is_valid_order(model: str, version: int, action: str) -> bool:
    """Whether a device may be given this order: to run a release, or to roll back to none."""
    none = (version, action) == (NO_MODEL, "roll_back")
    return is_release(model, 1 if none else version)


def rollouts_path(model: str) -> str:
    """Target path of the document."""
    return f"rollouts/{model}.json"


def manifest_path(model: str, version: int) -> str:
    """Target path of a release's manifest."""
    return f"{model}/{version}/{MANIFEST_NAME}"


def model_path(model: str, version: int) -> str:
    """Target path of a release's model file."""
    return f"{model}/{version}/{MODEL_NAME}"
