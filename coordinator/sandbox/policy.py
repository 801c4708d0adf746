"""What a worker of `fedloop serve` may touch: the rules that `coordinator.sandbox.enter` puts before the kernel.

    reads     Python and its packages, the system's libraries, the data folders, and with `--allow-code` the working
              directory, where a user's modules are
    changes   the run's own folder, in which its home and temporary files are too
    has not   anything else: the coordinator's home (keys, admin token, database, blobs), the network, other processes,
              the coordinator's environment and open files

Rules add up, so a folder to read that holds something secret is taken apart on the way down to it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sqlalchemy.engine import make_url

from coordinator.errors import UserError
from coordinator.sandbox import enter
from coordinator.settings import Settings
from edge_client.process import PARENT_VARIABLE, Launch, worker_environment
from models import user_code

TEMPORARY = "tmp"
"""In a run's folder: home and temporary files of its workers."""

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
_LONGEST_RULES = 100_000
"""Characters of rules; Linux takes an argument of 131,072."""
_BESIDE_A_DATABASE = ("", "-wal", "-shm", "-journal")


def require(settings: Settings) -> None:
    """Lets settings pass under which workers can be confined, and find what they need.

    Raises:
        UserError: `--allow-code` on a machine without a sandbox; modules in a home directory; or the coordinator's own
            files are not apart from the data, or lie among too many others.
    """
    if settings.allow_code and not settings.no_sandbox and (reason := enter.missing()):
        raise UserError(
            f"--allow-code {settings.allow_code[0]}: would run without a sandbox, able to read this coordinator's keys: "
            f"{reason}; leave it away, or say --no-sandbox"
        )
    _require_apart(settings)
    if settings.no_sandbox or enter.missing():
        return
    for reference in settings.allow_code:
        _require_readable(reference)
    if len(json.dumps(_rules(settings, []))) > _LONGEST_RULES:
        raise UserError(
            f"--home {settings.home}: lies among too many files that modules are read from; start the coordinator from "
            "another folder, or move its home"
        )


def _require_apart(settings: Settings) -> None:
    for folder in map(Path.resolve, settings.folders):
        for secret in _secrets(settings):
            if secret.is_relative_to(folder) or folder.is_relative_to(settings.home.resolve()):
                raise UserError(
                    f"{folder}: whoever may start runs could read {secret} there; data folders (--data-dir, "
                    "--allow-path) lie outside of the coordinator's own files"
                )


def _require_readable(reference: str) -> None:
    """Refuses modules in a home directory, which workers do not read: it holds more than modules."""
    place = Path.cwd()
    module = place / reference.partition(":")[0].partition(".")[0]
    if _is_home(place) and (module.is_dir() or module.with_suffix(".py").is_file()):
        raise UserError(
            f"--allow-code {reference}: {module.name} is in {place}, a home directory, which workers may not read; start "
            "the coordinator from a folder that holds the modules alone"
        )


def launch(settings: Settings, folder: Path, *more: Path) -> Launch:
    """How to start workers of the run whose folder this is. `more`: further folders that they may change."""

    def environment() -> dict[str, str]:
        return _environment(settings, folder)

    for path in (folder / TEMPORARY, *more):
        path.mkdir(parents=True, exist_ok=True)  # there is no rule for what is not there
    if settings.no_sandbox or enter.missing():
        return Launch(environment=environment)
    rules = json.dumps(_rules(settings, [folder, *more]))
    return Launch((sys.executable, "-I", "-S", enter.__file__, rules), environment)


def _rules(settings: Settings, writable: Sequence[Path]) -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {"list": [], "read": [], "write": [], "devices": list(_DEVICES)}
    secrets = _secrets(settings)
    for path in dict.fromkeys(_readable(settings)):
        for kind, found in _without(path, secrets):
            rules[kind].append(str(found))
    rules["read"] += map(str, settings.folders)
    rules["write"] += map(str, writable)
    return rules


def _readable(settings: Settings) -> Iterator[Path]:
    """Where programs and modules lie. Never a whole home directory, which holds more than these."""
    given = [*_SYSTEM, sys.prefix, sys.base_prefix, *sys.path]
    given += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if settings.allow_code:
        given.append(str(Path.cwd()))
    for text in given:
        path = Path(text)
        if path.is_absolute() and not _is_home(path):
            # What is a link to this process here would be one to the worker there.
            yield path if text.startswith("/proc/") else path.resolve()


def _is_home(path: Path) -> bool:
    """Whether a folder is this user's home directory, or holds it."""
    return Path.home().resolve().is_relative_to(path.resolve())


def _without(path: Path, secrets: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Rules by which all below `path` can be read but the secrets."""
    inside = [secret for secret in secrets if secret.is_relative_to(path)]
    if not inside:
        yield "read", path
    elif path not in inside and path.is_dir():
        yield "list", path
        for child in path.iterdir():
            if not child.is_symlink():
                yield from _without(child, inside)


def _secrets(settings: Settings) -> list[Path]:
    """Files and folders that no worker may read, whatever folder they are in."""
    secrets = [settings.home, *(path for path in (settings.ca_key,) if path)]
    url = make_url(settings.database_url)
    if url.get_backend_name() == "sqlite" and url.database:
        secrets += [Path(url.database + ending) for ending in _BESIDE_A_DATABASE]
    return [path.resolve() for path in secrets]


def _environment(settings: Settings, folder: Path) -> dict[str, str]:
    """Of our environment only what libraries go by: the rest may hold passwords and tokens."""
    passed = {
        name: value
        for name, value in worker_environment().items()
        if name in _PASSED or name == PARENT_VARIABLE or name.startswith(_PASSED_PREFIXES)
    }
    home = str(folder / TEMPORARY)
    allowed = " ".join(settings.allow_code)
    return {**passed, "HOME": home, "TMPDIR": home, user_code.ALLOWED_VARIABLE: allowed}
