"""Failpoints: named moments at which a test kills this process, as a power cut would.

`FEDLOOP_FAILPOINT=commit.before:2` kills the process with SIGKILL the second time it reaches `commit.before`.
Unset, as always outside tests, a failpoint costs one comparison.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Literal, get_args

RoundFailpoint = Literal[
    "intake.opened",  # an upload was announced, its row is written
    "intake.part_written",  # a piece of it is in the part file
    "intake.checked",  # it is complete and valid
    "intake.blob_stored",  # its blob is durable, no row refers to it
    "intake.committed",  # its row is durable, the device is not answered
    "round.opened",  # cohort and tasks are durable
    "round.closed",  # no more updates are accepted
    "round.folded",  # the new params are in memory only
    "commit.blobs_stored",  # they are durable, no row refers to them
    "commit.done",  # the round is committed, nothing is notified
]
ReleaseFailpoint = Literal[
    "release.files_stored",  # the files of new releases are durable, no metadata lists them
    "release.targets_stored",  # the targets metadata lists them, no snapshot lists that
    "release.snapshot_stored",  # a snapshot lists it, the timestamp names the previous snapshot
    "release.timestamp_stored",  # everything is stored except a root that came with it
    "release.root_stored",  # the root is stored too; keys it no longer trusts are still there
]
RegistryFailpoint = Literal[
    "registry.blobs_stored",  # the files of a new version are durable, no row refers to them
    "registry.committed",  # its row is durable, nothing is notified
]
AuditFailpoint = Literal[
    "audit.begun",  # a change is announced in the audit log, and not made yet
    "audit.changed",  # it is made, its outcome is not recorded
    "audit.ended",  # its outcome is recorded, the request is not answered
]
PrivacyFailpoint = Literal[
    "privacy.charged",  # the ledger has the round, no noise is drawn
    "privacy.noised",  # the noise is on the sum, nothing of the round is committed
    "secure.closed",  # the messages of a stage of secure aggregation are fixed, no reply is made
    "secure.answered",  # its replies are stored, no device is notified
]
Name = PrivacyFailpoint | RoundFailpoint | ReleaseFailpoint | RegistryFailpoint | AuditFailpoint
NAMES: tuple[str, ...] = get_args(RoundFailpoint)
RELEASE_NAMES: tuple[str, ...] = get_args(ReleaseFailpoint)
REGISTRY_NAMES: tuple[str, ...] = get_args(RegistryFailpoint)
AUDIT_NAMES: tuple[str, ...] = get_args(AuditFailpoint)

_name, _, _count = os.environ.get("FEDLOOP_FAILPOINT", "").partition(":")
_left = int(_count or 1)
_lock = threading.Lock()


def reach(name: Name) -> None:
    """Kills this process if the environment names this failpoint."""
    global _left
    if name != _name:
        return
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
