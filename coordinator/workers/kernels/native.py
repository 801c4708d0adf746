"""Compiles a kernel's C++ for this machine, once, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from edge_client.files import make_durably

COMPILERS = ("g++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-march=native", "-fno-math-errno", "-fPIC", "-shared")


class CannotCompile(Exception):
    """There is no C++ compiler, or what it made is not right; the message says what."""


def load(source: Path, cache: Path) -> ctypes.CDLL:
    """The library of `source`, which may include what lies beside it. `cache`: folder for what is compiled, which only this user may write.

    Raises:
        CannotCompile: there is no compiler, it refuses the source, or the cache cannot be written.
    """
    library = cache / f"{source.stem}-{_identity(source)}.so"
    if not library.exists():
        compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            raise CannotCompile("no C++ compiler was found here; install g++ or clang++")
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_durably(library, lambda path: _compile(compiler, source, path), mode=0o700)
        except OSError as error:
            raise CannotCompile(f"{cache} cannot be written ({error.strerror or error})") from None
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CannotCompile(f"{library} cannot be loaded ({error}); delete it") from None


def _identity(source: Path) -> str:
    """Differs if the source, the flags or the kind of processor do: a home may be shared by machines."""
    # What numpy reads from the processor itself; /proc is hidden from sandboxed workers.
    features = sorted(name for name, here in np._core._multiarray_umath.__cpu_features__.items() if here)  # type: ignore[attr-defined]
    sources = [path.read_bytes() for path in sorted(source.parent.iterdir()) if path.suffix in (".cpp", ".h")]
    parts = [*sources, " ".join((os.uname().machine, *_FLAGS, *features)).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, source: Path, library: Path) -> None:
    command = [compiler, *_FLAGS, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = next(
            (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200]
        )
        raise CannotCompile(f"{compiler} failed: {first}")
