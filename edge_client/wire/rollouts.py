"""Who is to run which version of a model: the document `rollouts/<model>.json` of the releases' repository.

It is signed by a key of its own, apart from what exists: whoever holds that key chooses among releases, and adds none.

    {"model": "digits", "rollouts": [{"rollout": "…", "version": 4, "action": "install", "force": false,
                                      "devices": ["…"], "salt": "", "permille": 0}]}
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from edge_client.wire.inference import MANIFEST_NAME, MODEL_NAME
from edge_client.wire.strict import Unfit, loads, parse_message

PERMILLE = 1000
NO_MODEL = 0
"""The version that a `roll_back` names where a device had no model before: it is to have none again."""
LARGEST_DOCUMENT_BYTES = 4_000_000
"""Of a rollouts document; a list of 100,000 devices."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_LARGEST_VERSION = 10**9


@dataclass(frozen=True)
class Rollout:
    """One version for some devices.

    Attributes:
        devices: exactly these, or None: those whom `salt` and `permille` choose.
        permille: of all devices, chosen by hash; a growing share keeps those that it had.
        force: also devices that failed with it before.
    """

    rollout: str
    version: int
    action: Literal["install", "roll_back"] = "install"
    force: bool = False
    devices: tuple[str, ...] | None = None
    salt: str = ""
    permille: int = 0

    def is_for(self, device: str) -> bool:
        """Whether this device is among them."""
        if self.devices is not None:
            return device in self.devices
        return share_of(self.salt, device) < self.permille


@dataclass(frozen=True)
class Rollouts:
    model: str
    rollouts: tuple[Rollout, ...]


def share_of(salt: str, device: str) -> int:
    """Where a device lies between 0 and 999, as good as at random: SHA-256(salt + device id) mod 1000."""
    return int.from_bytes(hashlib.sha256((salt + device).encode()).digest()) % PERMILLE


def from_json(content: bytes, model: str) -> Rollouts:
    """The document of `model`.

    Raises:
        Unfit: it is none, or another model's.
    """
    place = rollouts_path(model)
    found = parse_message(Rollouts, loads(content, place), place)
    if found.model != model:
        raise Unfit(f"{place}: model is {found.model[:70]!r}")
    return found


def is_release(model: str, version: int) -> bool:
    """Whether a release may be called so; it becomes the name of a folder and of files."""
    return _NAME.fullmatch(model) is not None and 1 <= version < _LARGEST_VERSION


def is_told(model: str, version: int, action: str) -> bool:
    """Whether a device may be told so: to run a release, or to go back to none."""
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
