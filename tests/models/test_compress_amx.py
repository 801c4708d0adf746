"""Disabling AMX denies tiles to a process and changes nothing else."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, errno, threading
from models.compress import amx

def request_tiles():
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(158, 0x1023, 18), ctypes.get_errno()

assert amx.disable()
assert request_tiles() == (-1, errno.EPERM), request_tiles()
threading.Thread(target=print, args=("a thread",)).start()
amx.disable()  # twice does no harm
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are of x86-64 alone")
def test_a_process_is_refused_tiles_and_can_still_start_threads() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "a thread\n"), done.stderr
