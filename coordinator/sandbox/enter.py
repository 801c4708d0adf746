"""Enters the sandbox and executes a program: `python -I -S enter.py POLICY PROGRAM [ARGUMENT…]`.

POLICY is a JSON object of absolute paths, each of which includes everything below it:

    list     folders whose entries may be listed     read     files and folders to read, and programs to run
    write    folders to read and change              devices  character devices to read and write

The steps, in order; every process that the program starts inherits them:

    1. no core dumps, no new privileges
    2. Landlock: no other file is opened, created, renamed or removed; no TCP; no signal to a process outside
    3. no capability but CAP_DAC_OVERRIDE, which root needs to read other people's data files
    4. a seccomp filter: no sockets, no io_uring, no kernel keys, and no change by path that Landlock does not see

It uses the standard library only and none of our modules, so that it imports no code that a user can change. Linux 5.13
has the first version of Landlock; the rights that later versions add are restricted if the kernel supports them.
https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

# linux/landlock.h, LANDLOCK_ACCESS_FS_*
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_NET_TCP, _NET_TCP_SINCE = 0b11, 4  # bind, connect
_SCOPES, _SCOPES_SINCE = 0b11, 6  # abstract sockets, signals

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_CHANGE = _WRITE_FILE | _TRUNCATE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER
"""Regular files and folders only: without links, pipes and devices, a result cannot redirect its reader."""

_RIGHTS = {"list": _READ_DIR, "read": _READ, "write": _READ | _CHANGE, "devices": _READ_FILE | _WRITE_FILE}

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_CAP_DAC_OVERRIDE = 1 << 1
_CAPABILITY_VERSION_3 = 0x20080522


class _Machine(NamedTuple):
    """AUDIT_ARCH_* of linux/audit.h, and the column of the numbers below."""

    architecture: int
    column: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}
_REFUSED = {  # 0: the machine does not have this call
    "socket": (41, 198),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "connect": (42, 203),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "truncate": (76, 45),
    "chmod": (90, 0),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 0),
    "lchown": (94, 0),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
}
_SOCKETPAIR, _PRLIMIT64 = (53, 199), (302, 261)
_X32_BIT = 0x40000000  # x86-64 has a second table of calls from here on; no machine has so many calls
_SOCK_STREAM = 1

_Line = tuple[int, int, int, int]
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # linux/bpf_common.h
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # places in struct seccomp_data

_LIBC = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 if it has none, or it is not enabled."""
    version: int = _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    return max(version, 0)


def unavailable_reason() -> str | None:
    """Why this machine has no sandbox; None if it has one."""
    if platform.machine() not in _MACHINES:
        return f"the system calls of {platform.machine()} are not known"
    if not landlock_version():
        return "the kernel has no Landlock: Linux 5.13 or newer, `landlock` among its security modules"
    return None


def enter(policy: Mapping[str, Sequence[str]]) -> None:
    """Confines this process permanently. It must have a single thread.

    Raises:
        OSError: the kernel refuses a step.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _done(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "prctl(PR_SET_NO_NEW_PRIVS)")
    _restrict_files(policy, landlock_version())
    _drop_capabilities()
    _refuse_calls(_MACHINES[platform.machine()])


def _restrict_files(policy: Mapping[str, Sequence[str]], version: int) -> None:
    handled = (1 << 13) - 1  # everything of version 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= right if version >= since else 0
    attributes = struct.pack("=Q", handled)
    if version >= _NET_TCP_SINCE:
        attributes += struct.pack("=Q", _NET_TCP)
    if version >= _SCOPES_SINCE:
        attributes += struct.pack("=Q", _SCOPES)
    ruleset = _done(
        _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0),
        "landlock_create_ruleset",
    )
    try:
        for kind, paths in policy.items():
            for path in paths:
                _allow(ruleset, path, _RIGHTS[kind] & handled)
        _done(_LIBC.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return  # a missing path needs no rule
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, place)
        _done(_LIBC.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    sets = ctypes.create_string_buffer(24)  # twice effective, permitted, inheritable, 32 bits each
    _done(_LIBC.capget(header, sets), "capget")
    kept = struct.unpack("=6I", sets.raw)[1] & _CAP_DAC_OVERRIDE
    _done(_LIBC.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)), "capset")


def _refuse_calls(machine: _Machine) -> None:
    """Installs the filter. https://docs.kernel.org/userspace-api/seccomp_filter.html"""
    program = b"".join(struct.pack("=HBBI", *line) for line in _filter(machine))
    held = ctypes.create_string_buffer(program, len(program))
    fprog = ctypes.create_string_buffer(struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(held)))
    _done(
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(fprog)),
        "prctl(PR_SET_SECCOMP, filter)",
    )


def _filter(machine: _Machine) -> list[_Line]:
    """The filter in classic BPF: code, lines to skip if true, lines to skip if false, value."""
    allow, refuse, kill = (
        (_RETURN, 0, 0, value) for value in (0x7FFF0000, 0x00050000 | errno.EACCES, 0x80000000)
    )
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, machine.architecture), kill]
    lines += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32_BIT), refuse]
    for numbers in _REFUSED.values():
        if number := numbers[machine.column]:
            lines += [(_EQUAL, 0, 1, number), refuse]
    # A pair of datagram sockets could still send to another socket's path.
    lines += [(_EQUAL, 0, 5, _SOCKETPAIR[machine.column]), (_LOAD, 0, 0, _SECOND), (_AND, 0, 0, 0xF)]
    lines += [(_EQUAL, 1, 0, _SOCK_STREAM), refuse, allow]
    # prlimit of another process of this user, such as the coordinator; 0 is the caller.
    lines += [(_EQUAL, 0, 4, _PRLIMIT64[machine.column]), (_LOAD, 0, 0, _FIRST), (_EQUAL, 1, 0, 0)]
    lines += [refuse, allow]
    return [*lines, allow]


def _prctl(option: int, second: int, third: int = 0) -> int:
    """prctl with all arguments as unsigned longs, the width that it reads."""
    result: int = _LIBC.prctl(option, *map(ctypes.c_ulong, (second, third, 0, 0)))
    return result


def _done(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
