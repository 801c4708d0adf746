"""Failpoints: named moments at which a test kills this process, as a power cut would.

`FEDLOOP_DEVICE_FAILPOINT=install.fetched:2` kills the process with SIGKILL the second time it reaches `install.fetched`.
If unset, as always outside tests, a failpoint costs one comparison.
"""

from __future__ import annotations

import os
import signal
from typing import Literal, get_args

InstallFailpoint = Literal[
    "install.trusted",  # the signed documents were read and stored
    "install.begun",  # the spare slot is marked empty
    "install.manifest",  # the manifest is in it
    "install.part",  # a piece of the model file is in the part file
    "install.fetched",  # the model file is complete
    "install.tested",  # it passed its self-test
    "install.flipping",  # the pointer is about to be replaced
    "install.flipped",  # the new version is the active one, on trial
    "install.proving",  # a start was counted, the version is on trial
    "install.proved",  # the trial is over
    "install.turning",  # the rollback was decided
    "install.turned",  # the rollback is durable
]
SecureFailpoint = Literal[
    "secure.shared",  # this device's secrets are shared with its group, its masked update is not sent
    "secure.counted",  # its masked update counts, the rest of the protocol is to come
]
Name = InstallFailpoint | SecureFailpoint
NAMES: tuple[str, ...] = get_args(InstallFailpoint)

VARIABLE = "FEDLOOP_DEVICE_FAILPOINT"
_name, _, _count = os.environ.get(VARIABLE, "").partition(":")
_left = int(_count or 1)


def reach(name: Name) -> None:
    """Kills this process if the environment asks for it here."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
