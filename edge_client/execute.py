"""Doing what was decided: each step of `edge_client.steps` as one method, thin over files, wire and training.

Where a step fails it raises what the transport or the training raised; what is then to be done is decided by
the agent. Files of a task lie in `work/<task>`, blobs in `blobs` as long as their run gives work, the client
rule's state of a run in `rules/<run>`.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from edge_client.config import EdgeConfig
from edge_client.failures import ServerRefused, Unreachable
from edge_client.files import NO_ROOM, SPARE_BYTES, file_sha256
from edge_client.ledger import Ledger
from edge_client.link import Link, understood
from edge_client.outbox import Outbox, OutboxFull, Waiting
from edge_client.state import State
from edge_client.train.process import Done, Job, TrainingFailed
from edge_client.transfer import download, upload
from edge_client.wire.device import (
    BlobRef,
    CheckIn,
    CheckInAnswer,
    Decline,
    EvaluationResult,
    TaskOffer,
    UploadStart,
)
from edge_client.wire.strict import printable

FORGET_BLOBS_SECONDS = 600.0
"""A run that gave no work for so long, while the coordinator holds this device for none, is over: its files go."""

FORGET_RUN_SECONDS = 14 * 86_400.0
"""The client rule's state of a run is kept for longer: a run may be taken up again."""

_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ABOUT_US = {
    "no_certificate",
    "expired",
    "not_yet_valid",
    "foreign_certificate",
    "revoked",
    "unknown_device",
    "pending",
    "wire_version",
}
"""Codes that say nothing about the task: it may be taken once they are mended."""

_LONGEST_BEAT_SECONDS = 600.0
_LARGEST = 2**53
_LATE_SECONDS = 3600.0
"""A result that the coordinator cannot take so long after its round is over is given up."""


class Training(Protocol):
    """`edge_client.train.process.TrainingProcess`, or what a test puts in its place."""

    def run(self, job: Job, keep_going: Callable[[], str | None]) -> Done:
        """Raises Interrupted or TrainingFailed."""

    def close(self) -> None: ...


@dataclass
class Executor:
    """What steps are done with. `config` is of the process, `training` its one training process."""

    config: EdgeConfig
    state: State
    outbox: Outbox
    ledger: Ledger
    training: Training
    deflate: bool = False

    def check_in(self, link: Link, message: CheckIn) -> tuple[CheckInAnswer, float | None]:
        """The coordinator's answer and its clock. A task in it is sound in form."""
        answer = link.post("/checkin", message, wait_seconds=message.wait_seconds)
        parsed = understood(CheckInAnswer, answer)
        if parsed.task is not None:
            parsed = replace(parsed, task=_sound(parsed.task))
        # Deflated uploads came with 1.2.
        self.deflate = self.config.deflate_uploads and parsed.wire not in ("1.0", "1.1")
        return parsed, answer.date

    def take(self, offer: TaskOffer, now: float) -> None:
        """Holds a new task; what is left of another goes."""
        self.state.hold(offer, now)
        self._clean_work(keep=offer.task)

    def fetch(self, link: Link, offer: TaskOffer, going: Callable[[], None]) -> None:
        """Everything the task needs, from the coordinator or from before.

        Raises:
            TrainingFailed: it is more than this device's disk holds, or may hold.
        """
        folder = self._folder("blobs")
        needed = _needed(offer)
        self._drop_blobs(keep=self.state.blobs_in_use())
        self._require_room(offer, needed, folder)
        for ref in needed:
            try:
                download(link, ref, folder / ref.sha256, going=going)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                (folder / f"{ref.sha256}.part").unlink(missing_ok=True)
                raise TrainingFailed("limits", f"this device's disk: {error.strerror}") from None

    def work(
        self, offer: TaskOffer, keep_going: Callable[[], str | None], now: Callable[[], float]
    ) -> list[Waiting]:
        """Trains or evaluates in the training process and puts the result into the outbox, durably.

        Returns what had to leave the outbox for it.

        Raises:
            Interrupted: `keep_going` named a reason.
            TrainingFailed: with the code to decline with.
        """
        folder = self._folder("work") / offer.task
        folder.mkdir(exist_ok=True, mode=0o700)
        job = self._job(offer, folder)
        done = self.training.run(job, keep_going)
        if offer.kind == "evaluate":
            self._complete_evaluation(offer, job.result)
        state_out = job.state_out if offer.kind == "train" else None
        deflate = self.deflate and offer.kind == "train"
        try:
            _, gone = self.outbox.store(
                offer, job.result, state_out, treated=done.treated, deflate=deflate, now=now()
            )
        except OutboxFull as error:
            raise TrainingFailed("limits", str(error)) from None
        shutil.rmtree(folder, ignore_errors=True)
        return gone

    def deliver(
        self, link: Link, waiting: Waiting, going: Callable[[], None], now: Callable[[], float]
    ) -> str:
        """Sends one result. Its outcome in words: `delivered`, or why it never can be.

        Raises:
            Unreachable, ServerRefused: it stays in the outbox for another try.
        """
        self.ledger.leaving(waiting, self.outbox.path(waiting.task), now())
        try:
            self._send(link, waiting, going)
        except ServerRefused as refused:
            late = now() > waiting.closes_at + _LATE_SECONDS
            if refused.code in _ABOUT_US or (refused.passing and not late):
                raise
            self.ledger.outcome(waiting, f"refused: {refused.words} ({refused.code})", now())
            self.outbox.drop(waiting)
            return f"dropped: {refused.words} ({refused.code})"
        self.ledger.outcome(waiting, "delivered", now())
        self.outbox.accepted(waiting, self._rule_state(waiting.run))
        return "delivered"

    def give_back(self, link: Link | None, offer: TaskOffer, decline: Decline | None) -> None:
        """Forgets the task in hand, telling the coordinator where there is something to tell.

        Raises:
            Unreachable: nobody heard; the task is held still.
        """
        if link is not None and decline is not None:
            try:
                link.post(f"/tasks/{offer.task}/decline", decline)
            except ServerRefused as refused:
                if refused.passing or refused.code in _ABOUT_US:
                    raise
        with self.state.change() as write:
            self.state.let_go(write, offer.task)
        self._clean_work(keep=None)

    def forget(self, now: float, *, held: bool) -> None:
        """Files of runs that are over go. `held`: the coordinator counts on this device for a run."""
        for run, used_at in self.state.runs().items():
            if not held and now - used_at > FORGET_BLOBS_SECONDS:
                self.state.forget_blobs(run)
            if now - used_at > FORGET_RUN_SECONDS:
                self.state.forget_run(run)
                self._rule_state(run).unlink(missing_ok=True)
        self._drop_blobs(keep=self.state.blobs_in_use())

    def sweep(self) -> list[Waiting]:
        """After a start: whatever a crash left half done goes; results that were lost on disk.

        Downloads are not made durable, which would cost each round: after a power cut one may be there in name only.
        """
        lost = self.outbox.sweep()
        for path in self._folder("blobs").iterdir():
            if path.suffix != ".part" and file_sha256(path) != path.name:
                path.unlink()
        offer = self.state.task()
        self._clean_work(keep=offer.task if offer is not None else None)
        return lost

    def wipe(self) -> None:
        """All files of runs, models, results that wait and the task in hand go; identity and ledger stay."""
        for waiting in self.outbox.waiting():
            self.outbox.drop(waiting)
        for run in self.state.runs():
            self.state.forget_run(run)
        with self.state.change() as write:
            write.execute("DELETE FROM task")
        for name in ("work", "blobs", "rules", "releases"):
            shutil.rmtree(self.config.state_dir / name, ignore_errors=True)

    def _job(self, offer: TaskOffer, folder: Path) -> Job:
        rule_state = self._rule_state(offer.run)
        return Job(
            kind=offer.kind,
            runtime=offer.runtime,
            params=self._blob(offer.params),
            streams=self._blob(offer.streams) if offer.streams else None,
            tflite=self._blob(offer.artifact) if offer.artifact else None,
            manifest=self._blob(offer.manifest) if offer.manifest else None,
            model=offer.model,
            message=offer.message,
            data=self.config.data[offer.dataset],
            state_in=rule_state if rule_state.exists() else None,
            state_out=folder / "state_out",
            result=folder / "result",
        )

    def _complete_evaluation(self, offer: TaskOffer, result: Path) -> None:
        """Sums from the training process, as the message that leaves the device."""
        sums = json.loads(result.read_text("utf-8"))
        message = EvaluationResult(
            base=offer.params.sha256,
            rows=int(sums["rows"]),
            labels=int(sums["labels"]),
            correct=int(sums["correct"]),
            loss_sum=float(sums["loss_sum"]),
            site=self.config.labels.get("site", ""),
        )
        result.write_text(json.dumps(vars(message)), "utf-8")

    def _send(self, link: Link, waiting: Waiting, going: Callable[[], None]) -> None:
        path = self.outbox.path(waiting.task)
        if waiting.kind == "evaluate":
            link.post(f"/tasks/{waiting.task}/evaluation", json.loads(path.read_bytes()))
            return
        start = UploadStart(waiting.size_bytes, waiting.sha256, waiting.decoded_bytes, waiting.encoding)
        upload(link, waiting.task, path, start, going=going)

    def _rule_state(self, run: str) -> Path:
        return self.config.state_dir / "rules" / run

    def _blob(self, ref: BlobRef) -> Path:
        return self.config.state_dir / "blobs" / ref.sha256

    def _folder(self, name: str) -> Path:
        folder = self.config.state_dir / name
        folder.mkdir(exist_ok=True, mode=0o700)
        return folder

    def _require_room(self, offer: TaskOffer, needed: list[BlobRef], folder: Path) -> None:
        """Sizes are the coordinator's word; they are weighed before the first byte is asked for."""
        wanted, most = sum(ref.size_bytes for ref in needed), self.config.download_bytes
        if wanted > most:
            raise TrainingFailed(
                "limits", f"its files take {wanted} bytes, this device's download_bytes is {most}"
            )
        if wanted + sum(path.stat().st_size for path in folder.iterdir()) > most:
            self._drop_blobs(keep={ref.sha256 for ref in needed})
        have = sum(_size(folder / name) for ref in needed for name in (ref.sha256, f"{ref.sha256}.part"))
        result = offer.params.size_bytes if offer.kind == "train" else 0
        free, short = shutil.disk_usage(folder).free, wanted - have + result + SPARE_BYTES
        if short > free:
            raise TrainingFailed(
                "limits",
                f"its files and its result take {short} bytes more, this device's disk has {free} free",
            )

    def _drop_blobs(self, keep: set[str]) -> None:
        for path in self._folder("blobs").iterdir():
            if path.name.removesuffix(".part") not in keep:
                path.unlink()

    def _clean_work(self, keep: str | None) -> None:
        for path in self._folder("work").iterdir():
            if path.name != keep:
                shutil.rmtree(path, ignore_errors=True)


class Heartbeat:
    """Checks in for the task in hand every third of its lease, from a thread of its own, until closed."""

    def __init__(self, link: Link, message: CheckIn, seconds: float) -> None:
        self._link = link
        self._message = replace(message, wait_seconds=0.0)
        self._seconds = seconds
        self._closed = threading.Event()
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def unwanted(self) -> bool:
        """The coordinator does not want the result any more."""
        return self._unwanted.is_set()

    def close(self) -> None:
        # Not joined: a beat may wait for a dead line for a minute, and what it hears does not matter any more.
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(self._seconds):
            try:
                answer = understood(CheckInAnswer, self._link.post("/checkin", self._message))
            except (Unreachable, ServerRefused):
                continue  # the work may still be wanted; the next beat or the delivery will tell
            except Exception:
                return  # the link was closed below us
            if answer.stop:
                self._unwanted.set()
                return


@contextmanager
def heartbeat(link: Link, message: CheckIn, lease_seconds: float) -> Iterator[Heartbeat]:
    beats = Heartbeat(link, message, min(max(0.05, lease_seconds / 3), _LONGEST_BEAT_SECONDS))
    try:
        yield beats
    finally:
        beats.close()


def _needed(offer: TaskOffer) -> list[BlobRef]:
    return [ref for ref in (offer.params, offer.streams, offer.artifact, offer.manifest) if ref is not None]


def _sound(offer: TaskOffer) -> TaskOffer:
    """The offer, whose ids become names of files here, whose numbers are stored, whose words are shown."""
    for word in (offer.task, offer.run):
        if not _NAME.fullmatch(word):
            raise Unreachable(f"the coordinator offers a task with the id {word[:40]!r}, which is none")
    for ref in _needed(offer):
        if not (_SHA256.fullmatch(ref.sha256) and 0 <= ref.size_bytes <= _LARGEST):
            raise Unreachable(
                f"the coordinator offers a blob {ref.sha256[:40]!r} of {ref.size_bytes:.3g} bytes, which is none"
            )
    if not (0 <= offer.round <= _LARGEST and offer.lease_seconds > 0):
        raise Unreachable(
            f"the coordinator offers a task of round {offer.round:.3g} with a lease of {offer.lease_seconds:g} s"
        )
    if not (_is_shallow(offer.message) and _is_shallow(offer.model.options)):
        raise Unreachable("the coordinator offers a task that is nested too deep")
    return replace(offer, run_name=printable(offer.run_name, 200))


def _is_shallow(value: object, levels: int = 20) -> bool:
    """Whether JSON is nested no deeper than that: what takes it apart here, and later, does so by recursion."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(part, levels - 1) for part in parts)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
