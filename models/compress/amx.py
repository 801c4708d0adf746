"""Disables AMX, the matrix tiles of recent server processors, for XNNPACK: no device has them.

With int8 and one row at a time these tiles cost more than they save: on a Xeon with them static int8 takes 2.4 times as long as float32
for a `cnn` of 61 thousand params, and without them half as long as float32. Latencies that represent devices are measured without AMX.

A process must request tiles from the kernel once (arch/x86/xstate in the kernel's documentation); if that fails, XNNPACK works
without them. XNNPACK has no option for that, so a seccomp filter denies the request.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_SECCOMP, _ARCH_PRCTL = 317, 158  # asm/unistd_64.h
_SET_FILTER, _SPECULATE = 1, 4  # linux/seccomp.h; without the latter some kernels slow the whole process down
_REQUEST = 0x1023  # asm/prctl.h: ARCH_REQ_XCOMP_PERM
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ALLOW, _DENY = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ERRNO with EPERM


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("if_so", ctypes.c_ubyte),
        ("if_not", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("first", ctypes.POINTER(_Instruction))]


def disable() -> bool:
    """Denies tiles to this process and its children. False if that failed, or on other systems than x86-64 Linux.

    It cannot be undone, so it is for workers and benchmarks. Call it before LiteRT opens a file.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    filters = (_Instruction * 6)(
        _Instruction(_LOAD, 0, 0, 0),  # number of the system call
        _Instruction(_EQUALS, 0, 3, _ARCH_PRCTL),
        _Instruction(_LOAD, 0, 0, 16),  # its first argument
        _Instruction(_EQUALS, 0, 1, _REQUEST),
        _Instruction(_RETURN, 0, 0, _DENY),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    libc = ctypes.CDLL(None)
    program = _Program(len(filters), filters)
    return bool(
        libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and libc.syscall(_SECCOMP, _SET_FILTER, _SPECULATE, ctypes.byref(program)) == 0
    )
