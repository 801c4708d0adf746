"""Failpoints: named moments at which a test has this process killed, as a power cut would.

`FEDLOOP_FAILPOINT=commit.before:2` kills the process with SIGKILL the second time it reaches `commit.before`.
Unset, as always outside tests, a failpoint costs one comparison.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Literal, get_args

OfRounds = Literal[
    "intake.opened",  # an upload was announced, its row is written
    "intake.part_written",  # a piece of it is in the part file
    "intake.checked",  # it is whole and was found good
    "intake.blob_stored",  # its blob is durable, no row names it
    "intake.committed",  # its row is durable, the device has not heard
    "round.opened",  # cohort and tasks are durable
    "round.closed",  # no more updates are taken
    "round.folded",  # the new params are in memory only
    "commit.blobs_stored",  # they are durable, no row names them
    "commit.done",  # the round is committed, nobody has heard
]
OfReleases = Literal[
    "release.files_stored",  # the files of new releases are durable, no metadata names them
    "release.targets_stored",  # targets does, no snapshot names it
    "release.snapshot_stored",  # a snapshot does, the timestamp names the one before
    "release.timestamp_stored",  # all is there, but a root that came with it
    "release.root_stored",  # the root too; keys it trusts no more are still kept
]
OfRegistry = Literal[
    "registry.blobs_stored",  # the files of a new version are durable, no row names them
    "registry.committed",  # its row is durable, nobody has heard
]
Name = OfRounds | OfReleases | OfRegistry
NAMES: tuple[str, ...] = get_args(OfRounds)
NAMES_OF_RELEASES: tuple[str, ...] = get_args(OfReleases)
NAMES_OF_REGISTRY: tuple[str, ...] = get_args(OfRegistry)

_name, _, _count = os.environ.get("FEDLOOP_FAILPOINT", "").partition(":")
_left = int(_count or 1)
_lock = threading.Lock()


def reach(name: Name) -> None:
    """Kills this process if the environment asks for it here."""
    global _left
    if name != _name:
        return
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
