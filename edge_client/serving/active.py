"""The device's active release, kept open for a service across updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from edge_client.errors import UserError
from edge_client.infer import golden_check
from edge_client.infer.runtime import LoadedRelease, load
from edge_client.ota.crash_counter import StartCounter
from edge_client.serving.predict import NoRelease
from edge_client.train.golden import SelfTestFailed
from edge_client.train.interpreter import without_notices
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import MANIFEST_NAME

RETRY_SECONDS = 10.0
"""After this a release that could not be opened is tried again: memory may have been short."""

_Stamp = tuple[str, int, int]


class ActiveModel:
    """Opens and tests the active release; `update` follows the device. If a new release cannot be opened, the old one stays.

    Args:
        find: the folder of the release to run now.
        log: logs one line.
        starts: counts starts with a release.
        now: monotonic seconds.

    Raises:
        UserError, ManifestError, SelfTestFailed: there is no release that can be used here.
    """

    def __init__(
        self,
        find: Callable[[], Path],
        log: Callable[[str], None],
        starts: StartCounter | None,
        now: Callable[[], float],
    ) -> None:
        self._find, self._log, self._starts, self._now = find, log, starts, now
        self._tried: tuple[_Stamp, float] | None = None
        self._warned = ""
        folder = find()
        self._stamp, self.loaded = _stamp(folder), self._open(folder)

    @property
    def name(self) -> str:
        """Such as `digits:3`."""
        return f"{self.loaded.manifest.model}:{self.loaded.manifest.version}"

    def update(self) -> None:
        """Opens the active release, if it has changed.

        Raises:
            NoRelease: no release is active: a withdrawn one must not answer.
        """
        try:
            folder = self._find()
            stamp = _stamp(folder)
            if stamp == self._stamp:
                return
            if self._tried is not None and self._tried[0] == stamp and self._now() < self._tried[1]:
                return
            self._tried = stamp, self._now() + RETRY_SECONDS
            self.loaded = self._open(folder)
        except NoRelease:
            raise
        except (UserError, ManifestError, SelfTestFailed, OSError) as error:
            message = f"goes on with {self.name}: {error}"
            if message != self._warned:  # this runs before every batch
                self._log(message)
            self._warned = message
            return
        self._stamp, self._tried, self._warned = stamp, None, ""
        self._log(f"runs {self.name} now")

    def clear_starts(self) -> None:
        """The release has run long enough, or is closed in order."""
        if self._starts is not None:
            self._starts.clear()

    async def clear_starts_once_lasted(self) -> None:
        """Runs as long as the service."""
        while self._starts is not None:
            left = self._starts.lasts_at - self._now()
            if left <= 0:
                self.clear_starts()
            await asyncio.sleep(max(1.0, min(left, 60.0)))

    def _open(self, folder: Path) -> LoadedRelease:
        """Raises as `load` and `golden_check.require`, unless the file crashes this process."""
        if self._starts is not None:
            self._starts.count(folder)
        try:
            with without_notices():
                loaded = load(folder)
                golden_check.require(loaded)
        except BaseException:
            self.clear_starts()
            raise
        return loaded


def _stamp(folder: Path) -> _Stamp:
    """Changes with every installed release. Raises ManifestError if there is none."""
    try:
        status = (folder / MANIFEST_NAME).stat()
    except OSError as error:
        raise ManifestError(f"{error.filename}: {error.strerror}") from None
    return str(folder), status.st_ino, status.st_mtime_ns
