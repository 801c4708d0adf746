"""The network interface that has an address, as the kernel lists them."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import socket
import struct

_SIOCGIFCONF = 0x8912  # linux/sockios.h
_ENTRY_BYTES = 40  # struct ifreq on 64-bit machines
_MOST = 1024


def of(address: str) -> str | None:
    """The interface with this IPv4 address, or None. Loopback for any 127.x.y.z."""
    ip = ipaddress.IPv4Address(address)
    if ip.is_loopback:
        return "lo"
    return next((name for name, own in _ipv4() if own == ip), None)


def _ipv4() -> list[tuple[str, ipaddress.IPv4Address]]:
    """Names and addresses; an interface with several appears with each."""
    buffer = ctypes.create_string_buffer(_MOST * _ENTRY_BYTES)
    request = struct.pack("iL", len(buffer), ctypes.addressof(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        (used, _) = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))
    entries = [buffer.raw[start : start + _ENTRY_BYTES] for start in range(0, used, _ENTRY_BYTES)]
    return [
        (entry[:16].rstrip(b"\0").decode().partition(":")[0], ipaddress.IPv4Address(entry[20:24]))
        for entry in entries
    ]
