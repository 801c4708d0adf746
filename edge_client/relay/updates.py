"""The updates that a relay keeps: received in pieces, checked, and durable before anyone hears of them.

    <state>/relay/updates/<task>/
        task.json       what its result must contain, as the coordinator says (`wire.relays.RelayedTask`)
        start.json      what the device has announced
        sent            the bytes received so far; its size is the offset at which the upload resumes
        update          the update as tensors, once it is complete and has passed its check
        figures.json    what the coordinator is told of it; written last

An update whose `figures.json` is there survives whatever happens to the process. Each method is called with the task's lock held.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from edge_client.files import file_sha256, make_folder, sync_file, sync_folder, write_durably
from edge_client.relay.expected import Expected
from edge_client.relay.inflation import inflate
from edge_client.relay.intake import Rejection, check_result, read_accepted
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage, UploadStart
from edge_client.wire.relays import Figures, RelayedTask
from edge_client.wire.strict import loads, parse_message
from strategies.params import l2_norm
from strategies.update import Update

FORGET_SECONDS = 14 * 86_400.0
"""An update of a run that has had nothing folded for so long is deleted: a run may resume."""

T = TypeVar("T")


class HashMismatch(ValueError):
    """The bytes are not those that were announced."""


@dataclass(frozen=True)
class KeptUpdate:
    """One task's files."""

    folder: Path

    @property
    def task(self) -> RelayedTask | None:
        return _read(RelayedTask, self.folder / "task.json")

    @property
    def start(self) -> UploadStart | None:
        return _read(UploadStart, self.folder / "start.json")

    @property
    def figures(self) -> Figures | None:
        """What the coordinator is told of the update; None before it is complete and checked."""
        return _read(Figures, self.folder / "figures.json")

    @property
    def offset(self) -> int:
        """Bytes received."""
        return self._sent.stat().st_size if self._sent.exists() else 0

    @property
    def path(self) -> Path:
        """The complete update."""
        return self.folder / "update"

    @property
    def _sent(self) -> Path:
        return self.folder / "sent"

    def begin(self, task: RelayedTask, start: UploadStart) -> None:
        """Begins an upload, or continues it if it was announced in the same way."""
        make_folder(self.folder)
        if self.start != start:
            self._sent.unlink(missing_ok=True)
            write_durably(self.folder / "task.json", json.dumps(asdict(task)).encode())
            write_durably(self.folder / "start.json", json.dumps(asdict(start)).encode())

    def append(self, blocks: Iterable[bytes]) -> None:
        """Adds bytes as they come; what has come before an error stays."""
        with self._sent.open("ab") as file:
            for block in blocks:
                file.write(block)

    def finish(self) -> Figures | Rejection:
        """The figures of the complete upload, which is durable then; or why it is rejected.

        Raises:
            HashMismatch, BadEncoding: the bytes are not those announced.
            OSError: the disk is full.
        """
        task, start = self.task, self.start
        assert task is not None and start is not None
        digest = file_sha256(self._sent)
        if digest != start.sha256:
            raise HashMismatch(f"the upload has SHA-256 {digest}, announced was {start.sha256}")
        decoded = self.folder / "decoded"
        if start.encoding == "identity":
            self._sent.replace(decoded)
        else:
            digest = inflate(self._sent, decoded, start.decoded_bytes)
        message, expected = TaskMessage.from_json(task.offer.message), expected_of(task)
        verdict = check_result(arrays.FilePayload(decoded), message, expected)
        if isinstance(verdict, Rejection):
            return verdict
        if expected.code is not None:
            digest = arrays.write_result(decoded, message, verdict)
        figures = _figures(verdict, digest, start)
        sync_file(decoded)
        decoded.replace(self.path)
        sync_folder(self.folder)
        write_durably(self.folder / "figures.json", json.dumps(asdict(figures)).encode())
        self._sent.unlink(missing_ok=True)
        return figures

    def read(self) -> Update:
        """The update, whose tensors stay on disk.

        Raises:
            OSError, arrays.Malformed: it is lost or damaged.
        """
        figures = self.figures
        if figures is None or file_sha256(self.path) != figures.sha256:
            raise arrays.Malformed("its bytes are not those that were accepted")
        return read_accepted(arrays.FilePayload(self.path))

    def drop(self) -> None:
        """Deletes everything."""
        shutil.rmtree(self.folder, ignore_errors=True)


class KeptUpdates:
    """All updates of a relay. Callable from any thread."""

    def __init__(self, folder: Path, wall: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._wall = wall
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        make_folder(folder)

    @contextmanager
    def locked(self, task: str) -> Iterator[KeptUpdate | None]:
        """The files of a task, for one thread at a time; None while another one has them. `task`: a valid id."""
        with self._lock:
            is_free = task not in self._busy
            if is_free:
                self._busy.add(task)
        try:
            yield KeptUpdate(self._folder / task) if is_free else None
        finally:
            if is_free:
                with self._lock:
                    self._busy.discard(task)

    def of(self, task: str) -> KeptUpdate:
        """The files of a task whose upload is complete."""
        return KeptUpdate(self._folder / task)

    def size_bytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self._folder.glob("*/*") if path.is_file())

    def forget(self, run: str = "", before: int = 0) -> None:
        """Deletes the updates of rounds of a run before this one, and whatever is too old to be folded."""
        oldest = self._wall() - FORGET_SECONDS
        for folder in self._folder.iterdir():
            with self.locked(folder.name) as kept:
                if kept is None:
                    continue
                task = kept.task
                is_over = task is not None and task.offer.run == run and task.offer.round < before
                if is_over or folder.stat().st_mtime < oldest:
                    kept.drop()


def expected_of(task: RelayedTask) -> Expected:
    """What the result of a task must contain."""
    shapes = {name: tuple(shape) for name, shape in task.expected["shapes"].items()}
    return Expected(**{**task.expected, "shapes": shapes})


def _figures(update: Update, digest: str, start: UploadStart) -> Figures:
    return Figures(
        sha256=digest,
        sent_sha256=start.sha256,
        sent_bytes=start.size_bytes,
        num_examples=update.num_examples,
        num_steps=update.num_steps,
        train_loss=update.train_loss,
        norm=update.norm,
        streams={name: l2_norm(tensors) for name, tensors in update.extras.items()},
    )


def _read(kind: type[T], path: Path) -> T | None:
    try:
        return parse_message(kind, loads(path.read_bytes(), path.name), path.name)
    except FileNotFoundError:
        return None
