"""A process that does without tiles gets none, and everything else goes on."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

TRIED = """
import ctypes, errno, threading
from models.compress import tiles

def asked():
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(158, 0x1023, 18), ctypes.get_errno()

assert tiles.refuse()
assert asked() == (-1, errno.EPERM), asked()
threading.Thread(target=print, args=("a thread",)).start()
tiles.refuse()  # twice does no harm
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are of x86-64 alone")
def test_a_process_is_refused_tiles_and_can_still_start_threads() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", TRIED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "a thread\n"), done.stderr
