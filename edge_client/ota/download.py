"""A release's file from the coordinator, by as few bytes as will do.

    part    what came before a cut line or a power cut is gone on from
    delta   blocks that the active slot's file has are copied from there, only the others are asked for, by ranges
    whole   on any doubt: no blocks signed, too many pieces, or a file whose SHA-256 is not the signed one

A block's short hash says what need not be fetched. Whether the file is right is said by the signed length and SHA-256 of
the whole, which are checked whatever way it came.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from edge_client.failpoints import reach
from edge_client.failures import ServerRefused
from edge_client.files import NO_ROOM, SPARE_BYTES, file_sha256
from edge_client.link import Link
from edge_client.ota.repository import PATH
from edge_client.ota.trouble import PutOff
from edge_client.wire import blocks

if TYPE_CHECKING:
    from tuf.api.metadata import TargetFile

MOST_RANGES = 64
"""More holes than this, and one long request is the quicker way."""


_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Fetched:
    """`came_bytes` crossed the line now, of `size_bytes`."""

    size_bytes: int
    came_bytes: int


@dataclass(frozen=True)
class _Run:
    """Bytes `start` to `end` of the file: at `source` of the base, or, where that is None, to be fetched."""

    start: int
    end: int
    source: int | None


def fetch(
    link: Link,
    target: TargetFile,
    path: Path,
    *,
    base: Path | None = None,
    going: Callable[[], None] = lambda: None,
) -> Fetched:
    """Puts the target at `path`, length and SHA-256 as signed. `base`: a file that may have much of it.

    Raises:
        PutOff: `tampered`: what came whole was not what was signed; `missing`; `disk`: there is no room.
        Unreachable, ServerRefused, CertificateExpired: try again, what came is kept.
    """
    if path.exists() and _is_signed(path, target, going):
        return Fetched(target.length, 0)
    part = part_of(path, target)
    _require_room(part, target)
    try:
        runs = _runs(target, base)
        came = _build(link, target, part, base, runs, going)
        if not _is_signed(part, target, going):
            part.unlink()
            came += _build(link, target, part, None, [_Run(0, target.length, None)], going)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        part.unlink(missing_ok=True)
        raise PutOff("disk", f"this device's disk: {error.strerror}") from None
    if not _is_signed(part, target, going):
        part.unlink()
        raise PutOff("tampered", f"what came for {target.path} is not what was signed")
    part.replace(path)
    return Fetched(target.length, came)


def part_of(path: Path, target: TargetFile) -> Path:
    """Where it is gathered; named by its hash, so that no part of another file is gone on from."""
    return path.with_name(f"{path.name}.{target.hashes['sha256'][:16]}.part")


def _build(
    link: Link,
    target: TargetFile,
    part: Path,
    base: Path | None,
    runs: list[_Run],
    going: Callable[[], None],
) -> int:
    """Completes the part file, from where it ends; bytes that came for it."""
    came = 0
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
            whole = run.end == target.length
            came += _request(link, target, file, start, None if whole else run.end - 1, going)
            reach("install.part")
            if file.tell() != run.end:
                break  # ranges are not known there, so that all of it came; or too little, and the hash will tell
    return came


def _request(
    link: Link, target: TargetFile, file: BinaryIO, first: int, last: int | None, going: Callable[[], None]
) -> int:
    came = 0
    try:
        with link.stream(f"{PATH}/targets/{_named(target)}", first, last) as stream:
            if stream.first != first:
                file.truncate(0)
                file.seek(0)
                last = None
            limit = target.length if last is None else last + 1
            for chunk in stream.chunks:
                going()
                came += len(chunk)
                if file.tell() + len(chunk) > limit:
                    raise PutOff("endless", f"more than {target.length} bytes came for {target.path}")
                file.write(chunk)
                file.flush()
                reach("install.part")
    except ServerRefused as refused:
        if refused.status != 404:
            raise
        raise PutOff("missing", f"the coordinator has no {target.path}: {refused.words}") from None
    return came


def _copy(base: Path, at: int, size: int, file: BinaryIO) -> None:
    with base.open("rb") as source:
        source.seek(at)
        while size > 0 and (piece := source.read(min(size, _PIECE_BYTES))):
            file.write(piece)
            size -= len(piece)
    file.flush()


def _runs(target: TargetFile, base: Path | None) -> list[_Run]:
    """The file as runs of blocks, in order: those that the base has, and those to fetch."""
    everything = [_Run(0, target.length, None)]
    wanted = blocks.read(target.custom, target.length)
    if wanted is None or base is None or not base.is_file():
        return everything
    size = wanted.block_bytes
    known = _hashes_of(base, size)
    places = {digest: k * size for k, digest in reversed(list(enumerate(known)))}
    runs: list[_Run] = []
    for k, digest in enumerate(wanted.hashes):
        start, end = k * size, min((k + 1) * size, target.length)
        # At the same place before any other: whole runs are then copied at once.
        source = k * size if k < len(known) and known[k] == digest else places.get(digest)
        runs.append(_Run(start, end, source))
    joined = list(_joined(runs))
    return joined if sum(run.source is None for run in joined) <= MOST_RANGES else everything


def _hashes_of(base: Path, block_bytes: int) -> list[bytes]:
    """A block at a time: the file may be larger than what memory the daemon is to take."""
    size = min(block_bytes, base.stat().st_size)
    with base.open("rb") as file:
        return [blocks.hash_of(block) for block in iter(lambda: file.read(size), b"")]


def _joined(runs: list[_Run]) -> Iterator[_Run]:
    """Neighbours that can be fetched, or copied, at once are one."""
    before: _Run | None = None
    for run in runs:
        if before is not None and _follows(before, run):
            before = _Run(before.start, run.end, before.source)
            continue
        if before is not None:
            yield before
        before = run
    if before is not None:
        yield before


def _follows(before: _Run, run: _Run) -> bool:
    if before.source is None or run.source is None:
        return before.source is run.source
    return before.source + before.end - before.start == run.source


def _is_signed(path: Path, target: TargetFile, going: Callable[[], None]) -> bool:
    if path.stat().st_size != target.length:
        return False
    return file_sha256(path, going) == target.hashes.get("sha256")


def _named(target: TargetFile) -> str:
    """Its path in a repository of consistent snapshots."""
    folder, slash, name = target.path.rpartition("/")
    return f"{folder}{slash}{target.hashes['sha256']}.{name}"


def _require_room(part: Path, target: TargetFile) -> None:
    have = part.stat().st_size if part.exists() else 0
    free = shutil.disk_usage(part.parent).free
    if target.length - have + SPARE_BYTES > free:
        raise PutOff(
            "disk",
            f"{target.path} takes {target.length - have} bytes more, this device's disk has {free} free",
        )
