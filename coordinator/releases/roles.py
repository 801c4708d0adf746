"""The roles of the repository of releases, their lifetimes, and the names of its targets.

    role        key      says                                       expires after
    root        offline  which keys are valid; two of two sign it   a year
    targets     offline  which releases exist, byte for byte        half a year
    rollouts    online   which device must run which of them        30 days, renewed
    snapshot    online   which versions of these belong together    7 days, renewed
    timestamp   online   that this is the newest                    a day, renewed

`rollouts` is a terminating delegation of `targets` for the paths `rollouts/*`: the holder of its key chooses among existing
releases and cannot add any. TUF specification 1.0.33, sections 2.1, 4.3 to 4.6 and 6.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from coordinator.errors import UserError
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME, is_release, manifest_path, model_path

ROOT, TARGETS, ROLLOUTS, SNAPSHOT, TIMESTAMP = "root", "targets", "rollouts", "snapshot", "timestamp"

OFFLINE_KEYS = ("root-1", "root-2", "targets")
"""Names of the key files that `fedloop release keygen` creates."""
NAME_FIELD = "x-fedloop-name"
"""Name of a key in its metadata, for people: `root-1`. Not part of the key."""
ONLINE_ROLES = (SNAPSHOT, TIMESTAMP, ROLLOUTS)

LIFETIMES = {
    ROOT: timedelta(days=365),
    TARGETS: timedelta(days=180),
    ROLLOUTS: timedelta(days=30),
    SNAPSHOT: timedelta(days=7),
    TIMESTAMP: timedelta(days=1),
}
ROLLOUTS_PATHS = "rollouts/*"

METADATA_LIMITS_BYTES = {ROOT: 512_000, TARGETS: 5_000_000}
"""A device's limits (`tuf.ngclient.UpdaterConfig`)."""
TARGET_LIMIT_BYTES = 2**31
MANIFEST_LIMIT_BYTES = 32_000_000
"""No device reads a larger one (`edge_client.ota.install.MANIFEST_BYTES`)."""

_RELEASE_PATH = re.compile(r"([a-z0-9-]{1,63})/([1-9][0-9]{0,8})/(.+)", re.DOTALL)


@dataclass(frozen=True, order=True)
class ReleaseName:
    """A version of a model of the registry, written `model:version`."""

    model: str
    version: int

    def __str__(self) -> str:
        return f"{self.model}:{self.version}"

    @property
    def manifest(self) -> str:
        """Target path of its manifest."""
        return manifest_path(self.model, self.version)

    @property
    def file(self) -> str:
        """Target path of its model file."""
        return model_path(self.model, self.version)

    @property
    def is_valid(self) -> bool:
        """Whether a release may have this name; that of the delegation is reserved."""
        return is_release(self.model, self.version) and self.model != ROLLOUTS


def release_of(path: str) -> ReleaseName | None:
    """The release that a target path belongs to; None for any other path."""
    match = _RELEASE_PATH.fullmatch(path)
    if match is None or match[3] not in (MANIFEST_NAME, MODEL_NAME):
        return None
    name = ReleaseName(match[1], int(match[2]))
    return name if name.is_valid else None


def parse_release(text: str) -> ReleaseName:
    """The release written `model:version`. Raises: UserError: it has another form."""
    model, _, version = text.partition(":")
    name = ReleaseName(model, int(version) if version.isdecimal() and len(version) < 10 else 0)
    if not name.is_valid:
        raise UserError(f"{text[:100]!r} is not a release; expected a model and a version, such as cnn:3")
    return name
