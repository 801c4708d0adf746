"""A cache of converted artifacts, keyed by their inputs.

The key is a SHA-256 over both traced graphs with their constants, the manifest's description of the
model, the versions of all libraries involved, and our own format. So a change in a model's code
that changes its graph gives another key, and any other change is a hit, without declarations.

    <folder>/<key>.json      the manifest, written last: its presence marks the artifact as complete
    <folder>/<sha256>.tflite the file it names

Every file is written to a temporary name, synced and renamed. So two concurrent exports of one key are
safe; a lock saves the second one the work.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

import torch

from edge_client.files import write_durably
from edge_client.wire import manifest as manifests
from edge_client.wire.manifest import Manifest
from models.conversion.request_cache import Exported, version_of
from models.conversion.trace import Traced

EXPORT_FORMAT = 1
"""Increment it when this package makes another file from the same graphs."""

MAKERS = ("torch", "litert-torch", "litert-converter", "ai-edge-litert")


def key(content: Iterable[bytes], description: str, makers: Iterable[str]) -> str:
    """The key of a file.

    Args:
        content: everything that determines the graphs.
        description: everything else that the manifest depends on.
        makers: distributions that make the file.
    """
    digest = hashlib.sha256(f"{EXPORT_FORMAT} {manifests.FORMAT}\n{description}\n".encode())
    digest.update("\n".join(f"{name} {version_of(name)}" for name in makers).encode())
    for part in content:
        digest.update(part)
    return digest.hexdigest()


def content(traced: Traced) -> Iterator[bytes]:
    """Both graphs with their constants."""
    for graph in (traced.train, traced.infer):
        yield graph.code.encode()
        for name in sorted({str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}):
            constant: torch.Tensor = attrgetter(name)(graph)
            yield f"{name} {constant.dtype} {tuple(constant.shape)}\n".encode()
            yield constant.detach().contiguous().cpu().numpy().tobytes()


def store(path: Path, tflite: bytes, manifest: Manifest) -> Exported:
    """Stores both files, the manifest last, at `path`."""
    exported = Exported(path.with_name(f"{manifest.file.sha256}.tflite"), path)
    write_durably(exported.tflite, tflite)
    write_durably(exported.manifest, manifest.to_json().encode())
    return exported


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Allows one process at a time to make the artifact of `key`. The lock is released when its holder exits."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{key}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
