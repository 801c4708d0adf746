"""Figures measured earlier on this machine, one JSON file each, in `planner/` of the cache folder.

A file is named by the hash of what was measured, of the processor and of torch's version. It may be deleted at any time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from edge_client.files import default_cache_dir, write_durably
from models import options
from models.options import JobError

T = TypeVar("T")


@dataclass
class Cache:
    """Reads and writes figures in `folder`; None: keeps nothing.

    Attributes:
        machine: what the figures depend on besides their key.
        found, measured: how many figures were read, and how many had to be measured.
    """

    folder: Path | None
    machine: str
    found: int = 0
    measured: int = 0

    def get(self, key: object, kind: type[T], measure: Callable[[], T]) -> T:
        """The figures of `key`, a dataclass, measured if there are none. `key` is a JSON value."""
        path = None
        if self.folder is not None:
            named = json.dumps([kind.__name__, self.machine, key], sort_keys=True)
            path = self.folder / f"{hashlib.sha256(named.encode()).hexdigest()}.json"
            try:
                known = options.read(kind, json.loads(path.read_text("utf-8")), str(path))
            except (OSError, ValueError, JobError):  # none yet, damaged, or of another version
                pass
            else:
                self.found += 1
                return known
        figures = measure()
        self.measured += 1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            as_json: Any = dataclasses.asdict(figures)  # type: ignore[call-overload]
            write_durably(path, json.dumps(as_json).encode())
        return figures


def of_device(device: torch.device, keep: bool = True) -> Cache:
    """The figures of this machine's `device`; with `keep` false none are read or written."""
    return Cache(default_cache_dir() / "planner" if keep else None, machine_of(device))


def machine_of(device: torch.device) -> str:
    """Names what the speed of one process depends on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.node()}, {_processor()}, {os.cpu_count()} cores, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
