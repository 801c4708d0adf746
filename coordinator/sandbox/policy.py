"""The sandbox policy of the workers of `fedloop serve`: the rules that `coordinator.sandbox.enter` passes to the kernel.

    reads     Python and its packages, the system's libraries, the data folders, and with `--allow-code` the working
              directory, which contains a user's modules
    changes   the run's own folder, which also contains its home and temporary files
    no access to anything else: the coordinator's home (keys, admin token, database, blobs), the network, other processes,
              the coordinator's environment and open files

Rules can only add rights, so a readable folder that contains a secret is expanded into rules for its other entries.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from sqlalchemy.engine import make_url

from coordinator.errors import UserError
from coordinator.sandbox import enter
from coordinator.settings import Settings
from edge_client.processes.process import PARENT_VARIABLE, Launch, worker_environment
from models import user_code

TEMPORARY = "tmp"
"""Subfolder of a run's folder: home and temporary files of its workers."""

_SYSTEM = (
    "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/sys/devices/system",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_PASSED = {"PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
_PASSED_PREFIXES = (
    "LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "TF_", "XLA_", "JAX_", "KERAS_", "TORCH_",
    "PYTORCH_", "CUDA_", "NVIDIA_",
)  # fmt: skip
_MAX_RULES_CHARACTERS = 100_000
"""Linux accepts an argument of 131,072."""
_BESIDE_A_DATABASE = ("", "-wal", "-shm", "-journal")


def require(settings: Settings) -> None:
    """Requires settings under which workers can be confined and still find what they need.

    Raises:
        UserError: `--allow-code` on a machine without a sandbox; modules in a home directory; or the coordinator's own
            files overlap with the data, or are among too many others.
    """
    if settings.allow_code and not settings.no_sandbox and (reason := enter.unavailable_reason()):
        raise UserError(
            f"--allow-code {settings.allow_code[0]}: would run without a sandbox, able to read this coordinator's keys: "
            f"{reason}; omit it, or add --no-sandbox"
        )
    _require_separate_data(settings)
    if settings.no_sandbox or enter.unavailable_reason():
        return
    for reference in settings.allow_code:
        _require_readable(reference)
    if len(json.dumps(_rules(settings, []))) > _MAX_RULES_CHARACTERS:
        raise UserError(
            f"--home {settings.home}: is among too many files that modules are read from; start the coordinator from "
            "another folder, or move its home"
        )


def _require_separate_data(settings: Settings) -> None:
    for folder in map(Path.resolve, settings.folders):
        for secret in _secrets(settings):
            if secret.is_relative_to(folder) or folder.is_relative_to(settings.home.resolve()):
                raise UserError(
                    f"{folder}: anyone who may start runs could read {secret} there; data folders (--data-dir, "
                    "--allow-path) must be outside the coordinator's own files"
                )


def _require_readable(reference: str) -> None:
    """Refuses modules in a home directory, which workers cannot read since it contains more than modules."""
    place = Path.cwd()
    module = place / reference.partition(":")[0].partition(".")[0]
    if _is_home(place) and (module.is_dir() or module.with_suffix(".py").is_file()):
        raise UserError(
            f"--allow-code {reference}: {module.name} is in {place}, a home directory, which workers may not read; start "
            "the coordinator from a folder that contains only the modules"
        )


def launch(
    settings: Settings, folder: Path, *more: Path, readable: Sequence[Path] = (), confined: bool = True
) -> Launch:
    """How to start workers of the run with this folder.

    `more`: further folders that they may change; `readable`: that they may read; `confined`: whether in the sandbox, which
    refuses sockets too. The environment is reduced in either case.
    """
    environment = partial(_environment, settings, folder)
    for path in (folder / TEMPORARY, *more):
        path.mkdir(parents=True, exist_ok=True)  # a missing folder cannot have a rule
    if not confined or settings.no_sandbox or enter.unavailable_reason():
        return Launch(environment=environment)
    rules = json.dumps(_rules(settings, [folder, *more], readable))
    return Launch((sys.executable, "-I", "-S", enter.__file__, rules), environment)


def _rules(
    settings: Settings, writable: Sequence[Path], readable: Sequence[Path] = ()
) -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {"list": [], "read": [], "write": [], "devices": list(_DEVICES)}
    secrets = _secrets(settings)
    for path in dict.fromkeys(_readable(settings)):
        for kind, allowed in _without(path, secrets):
            rules[kind].append(str(allowed))
    rules["read"] += map(str, (*settings.folders, *readable))
    rules["write"] += map(str, writable)
    return rules


def _readable(settings: Settings) -> Iterator[Path]:
    """Places of programs and modules. Never an entire home directory, which contains more than these."""
    places = [*_SYSTEM, sys.prefix, sys.base_prefix, *sys.path]
    places += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if settings.allow_code:
        places.append(str(Path.cwd()))
    for text in places:
        path = Path(text)
        if path.is_absolute() and not _is_home(path):
            # Unresolved, since /proc/self must refer to the worker, not to this process.
            yield path if text.startswith("/proc/") else path.resolve()


def _is_home(path: Path) -> bool:
    return Path.home().resolve().is_relative_to(path.resolve())


def _without(path: Path, secrets: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Rules that allow reading everything below `path` except the secrets."""
    inside = [secret for secret in secrets if secret.is_relative_to(path)]
    if not inside:
        yield "read", path
    elif path not in inside and path.is_dir():
        yield "list", path
        for child in path.iterdir():
            if not child.is_symlink():
                yield from _without(child, inside)


def _secrets(settings: Settings) -> list[Path]:
    """Files and folders that no worker may read, wherever they are."""
    secrets = [settings.home, *(path for path in (settings.ca_key,) if path)]
    url = make_url(settings.database_url)
    if url.get_backend_name() == "sqlite" and url.database:
        secrets += [Path(url.database + ending) for ending in _BESIDE_A_DATABASE]
    return [path.resolve() for path in secrets]


def _environment(settings: Settings, folder: Path) -> dict[str, str]:
    """The variables of our environment that libraries need; the others may contain passwords and tokens."""
    passed = {
        name: value
        for name, value in worker_environment().items()
        if name in _PASSED or name == PARENT_VARIABLE or name.startswith(_PASSED_PREFIXES)
    }
    home = str(folder / TEMPORARY)
    allowed = " ".join(settings.allow_code)
    return {**passed, "HOME": home, "TMPDIR": home, user_code.ALLOWED_VARIABLE: allowed}
