"""Parsers for the values of command-line options.

Each takes what the command line or the environment holds, returns the value, and raises `ValueError` saying what was
expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

N = TypeVar("N", int, float)

_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*")


class Address(NamedTuple):
    """A host and a port; as text `127.0.0.1:8080` or `[::1]:8080`. Port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return ip_address(self.host).is_loopback if is_ip_address(self.host) else self.host == "localhost"


def address(text: str) -> Address:
    """The address in `HOST:PORT`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:8080")
    return Address(host, int(port))


def number(least: float, most: float) -> Callable[[str], float]:
    """A parser of numbers in a range."""
    return _in_range(float, least, most, f"a number from {least:g} to {most:g}")


def integer(least: int, most: int) -> Callable[[str], int]:
    """A parser of integers in a range."""
    return _in_range(int, least, most, f"an integer from {least} to {most}")


def _in_range(kind: Callable[[str], N], least: N, most: N, expected: str) -> Callable[[str], N]:
    def parse(text: str) -> N:
        with suppress(ValueError):
            value = kind(text)
            if least <= value <= most:
                return value
        raise ValueError(f"expected {expected}")

    return parse


BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Units of `quantity` for memory and files."""


def quantity(units: Mapping[str, int], example: str) -> Callable[[str], float]:
    """A parser of a number above 0 with one of these units, in upper or lower case, in the smallest unit."""
    known = {unit.upper(): factor for unit, factor in units.items()}
    names = ", ".join(unit for unit in units if unit)

    def parse(text: str) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
        factor = None if match is None else known.get(match[2].upper())
        if match is None or factor is None or not 1 <= float(match[1]) * factor <= 2**50:
            raise ValueError(f"expected a number above 0 and a unit ({names}), such as {example}")
        return float(match[1]) * factor

    return parse


def choice(*choices: str) -> Callable[[str], str]:
    """A parser that accepts these words only."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return parse


def host_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Host names or IP addresses, without duplicates."""
    for text in texts:
        if not _HOST_NAME.fullmatch(text) and not is_ip_address(text):
            raise ValueError(f"{text!r} is neither a host name nor an address")
    return tuple(dict.fromkeys(texts))


def https_origin(text: str) -> str:
    """A URL such as `https://HOST:PORT`, without a slash at the end."""
    parts = urlsplit(text)
    if parts.scheme != "https" or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError("expected https://HOST:PORT, as devices reach the device API")
    return text.rstrip("/")


def issuer(text: str) -> str:
    """The URL by which an OpenID provider names itself, exactly as it is written."""
    parts = urlsplit(text)
    is_local = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not (parts.scheme == "https" or is_local) or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("expected https://HOST[:PORT][/PATH], as the provider's discovery document has it")
    return text


def scopes(text: str) -> str:
    """Scopes of OAuth, between spaces; `openid` is one of them."""
    if "openid" not in text.split():
        raise ValueError("expected scopes between spaces, openid among them")
    return " ".join(text.split())


def networks(texts: Sequence[str]) -> tuple[str, ...]:
    """IP addresses or networks."""
    for text in texts:
        ip_network(text)
    return tuple(texts)


def existing_path(path: Path) -> Path:
    """The absolute path of a file or folder that exists."""
    path = path.expanduser().absolute()
    if not path.exists():
        raise ValueError("there is no such file or folder")
    return path


def existing_folders(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The absolute paths of folders that exist."""
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: there is no such folder")
    return tuple(path.absolute() for path in paths)


def code_references(texts: Sequence[str]) -> tuple[str, ...]:
    """References `package.module:function` to a user's code, without duplicates."""
    # Imported here: if another package shadows `models`, commands must still start and report it.
    from models import user_code

    for text in texts:
        if not user_code.REFERENCE.fullmatch(text):
            raise ValueError(f"{text!r}: expected package.module:function")
    return tuple(dict.fromkeys(texts))


def is_ip_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
