"""Downloads a release's file from the coordinator with as few bytes as possible.

    resume  continues a part file left by a lost connection or a power cut
    delta   copies blocks from the active slot's file and requests only the others, by ranges
    full    in any doubt: no signed blocks, too many ranges, or a file whose SHA-256 is not the signed one

A block's short hash tells what need not be fetched. The signed length and SHA-256 of the complete file are checked in
every case.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from edge_client.failpoints import reach
from edge_client.files import NO_ROOM, SPARE_BYTES, file_sha256
from edge_client.ota.errors import Postponed
from edge_client.transport.failures import ServerRefused
from edge_client.transport.link import Link
from edge_client.wire import blocks
from edge_client.wire.rollouts import REPOSITORY_PATH

if TYPE_CHECKING:
    from tuf.api.metadata import TargetFile

MAX_RANGES = 64
"""With more gaps than this, one long request is faster."""

_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class _Run:
    """Bytes `start` to `end` of the file: at `source` in the base file, or to be fetched if that is None."""

    start: int
    end: int
    source: int | None


def fetch(
    link: Link,
    target: TargetFile,
    path: Path,
    *,
    base: Path | None = None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> int:
    """Downloads the target to `path` and checks its signed length and SHA-256. Returns the bytes that came over the network.

    `base`: a file that may share many blocks.

    Raises:
        Postponed: `tampered`: the complete file is not the signed one; `missing`; `disk`: there is no room.
        Unreachable, ServerRefused, CertificateExpired: try again; the bytes received so far are kept.
    """
    if path.exists() and _matches_target(path, target, check_cancelled):
        return 0
    part = part_of(path, target)
    _require_room(part, target)
    try:
        runs = _runs(target, base)
        transferred = _build(link, target, part, base, runs, check_cancelled)
        if not _matches_target(part, target, check_cancelled):
            part.unlink()
            transferred += _build(link, target, part, None, [_Run(0, target.length, None)], check_cancelled)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        part.unlink(missing_ok=True)
        raise Postponed("disk", f"this device's disk: {error.strerror}") from None
    if not _matches_target(part, target, check_cancelled):
        part.unlink()
        raise Postponed("tampered", f"the file received for {target.path} is not the signed one")
    part.replace(path)
    return transferred


def part_of(path: Path, target: TargetFile) -> Path:
    """The part file; named by hash, so that the part file of another target is never resumed."""
    return path.with_name(f"{path.name}.{target.hashes['sha256'][:16]}.part")


def _build(
    link: Link,
    target: TargetFile,
    part: Path,
    base: Path | None,
    runs: list[_Run],
    check_cancelled: Callable[[], None],
) -> int:
    """Completes the part file from where it ends; the bytes transferred for it."""
    transferred = 0
    have = part.stat().st_size if part.exists() else 0
    if have > target.length:
        part.unlink()
        have = 0
    with part.open("ab") as file:
        for run in runs:
            start = max(run.start, have)
            if start >= run.end:
                continue
            if run.source is not None and base is not None:
                _copy(base, run.source + start - run.start, run.end - start, file)
                continue
            last = None if run.end == target.length else run.end - 1
            transferred += _request(link, target, file, start, last, check_cancelled)
            reach("install.part")
            if file.tell() != run.end:
                break  # a server without ranges sent all of it, or too little came: the hash tells
    return transferred


def _request(
    link: Link,
    target: TargetFile,
    file: BinaryIO,
    first: int,
    last: int | None,
    check_cancelled: Callable[[], None],
) -> int:
    transferred = 0
    try:
        with link.stream(f"{REPOSITORY_PATH}/targets/{_hashed_path(target)}", first, last) as stream:
            if stream.first != first:
                file.truncate(0)
                file.seek(0)
                last = None
            limit = target.length if last is None else last + 1
            for chunk in stream.chunks:
                check_cancelled()
                transferred += len(chunk)
                if file.tell() + len(chunk) > limit:
                    raise Postponed("endless", f"received more than {target.length} bytes for {target.path}")
                file.write(chunk)
                file.flush()
                reach("install.part")
    except ServerRefused as refused:
        if refused.status != 404:
            raise
        raise Postponed("missing", f"the coordinator has no {target.path}: {refused.message}") from None
    return transferred


def _copy(base: Path, at: int, size: int, file: BinaryIO) -> None:
    with base.open("rb") as source:
        source.seek(at)
        while size > 0 and (piece := source.read(min(size, _PIECE_BYTES))):
            file.write(piece)
            size -= len(piece)
    file.flush()


def _runs(target: TargetFile, base: Path | None) -> list[_Run]:
    """The file as runs of blocks, in order: runs that the base has, and runs to fetch."""
    everything = [_Run(0, target.length, None)]
    signed = blocks.read(target.custom, target.length)
    if signed is None or base is None or not base.is_file():
        return everything
    size = signed.block_bytes
    with base.open("rb") as file:
        known = blocks.hashes_of(file, min(size, base.stat().st_size))
    places = {digest: k * size for k, digest in reversed(list(enumerate(known)))}
    runs: list[_Run] = []
    for k, digest in enumerate(signed.hashes):
        start, end = k * size, min((k + 1) * size, target.length)
        # Prefer the same place: long runs are then copied at once.
        source = k * size if k < len(known) and known[k] == digest else places.get(digest)
        runs.append(_Run(start, end, source))
    merged: list[_Run] = []  # adjacent runs that can be fetched or copied at once
    for run in runs:
        if merged and _follows(merged[-1], run):
            merged[-1] = replace(merged[-1], end=run.end)
        else:
            merged.append(run)
    return merged if sum(run.source is None for run in merged) <= MAX_RANGES else everything


def _follows(previous: _Run, run: _Run) -> bool:
    if previous.source is None or run.source is None:
        return previous.source is run.source
    return previous.source + previous.end - previous.start == run.source


def _matches_target(path: Path, target: TargetFile, check_cancelled: Callable[[], None]) -> bool:
    if path.stat().st_size != target.length:
        return False
    return file_sha256(path, check_cancelled) == target.hashes.get("sha256")


def _hashed_path(target: TargetFile) -> str:
    """The target's path in a repository with consistent snapshots."""
    folder, slash, name = target.path.rpartition("/")
    return f"{folder}{slash}{target.hashes['sha256']}.{name}"


def _require_room(part: Path, target: TargetFile) -> None:
    have = part.stat().st_size if part.exists() else 0
    free = shutil.disk_usage(part.parent).free
    if target.length - have + SPARE_BYTES > free:
        raise Postponed(
            "disk",
            f"{target.path} takes {target.length - have} bytes more, this device's disk has {free} free",
        )
