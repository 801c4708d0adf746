"""Executes the steps of `edge_client.steps`, each in one method, over files, wire and training.

A failing step raises the exception of the transport or the training; the agent decides how to go on. A task offer is
checked first: its ids become file names, its numbers are stored, its texts are shown. Files of a task are in `work/<task>`,
blobs in `blobs` as long as their run gives work, the client rule's state of a run in `rules/<run>`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_client.config import EdgeConfig
from edge_client.files import NO_ROOM, SPARE_BYTES, file_sha256
from edge_client.outbox import Ledger, Outbox, OutboxFull, PendingResult
from edge_client.state import State
from edge_client.train.process import Done, TrainingFailed, TrainingJob, TrainingProcess
from edge_client.transport.failures import ServerRefused, Unreachable
from edge_client.transport.link import Link, download, parse_answer, upload
from edge_client.wire.device import (
    BlobRef,
    CheckIn,
    CheckInAnswer,
    Decline,
    EvaluationResult,
    TaskOffer,
    UploadStart,
    to_json,
)
from edge_client.wire.scores import ClassScores, has_small_class
from edge_client.wire.statistics import StatisticsRequest
from edge_client.wire.strict import InvalidDocument, parse, parse_message, printable

FORGET_BLOBS_SECONDS = 600.0
"""A run that gave no work for so long, while the coordinator holds this device for no run, is over: its blobs are deleted."""

FORGET_RUN_SECONDS = 14 * 86_400.0
"""The client rule's state of a run is kept longer: a run may resume."""

PERSONAL_RULES = ("local_tensors", "head_then_body", "personal_model")
"""Client rules by which this device has a model of its own, as `strategies.personalisation` knows them; importing that takes numpy."""

_ABOUT_THIS_DEVICE = {
    "no_certificate",
    "expired",
    "not_yet_valid",
    "foreign_certificate",
    "revoked",
    "unknown_device",
    "pending",
    "wire_version",
}
"""Codes that say nothing about the task: it may be accepted once they are resolved."""

_LATE_SECONDS = 3600.0
"""A result that the coordinator cannot accept so long after the end of its round is dropped."""

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**53


@dataclass
class Executor:
    """Executes steps. `training`: the daemon's one training process."""

    config: EdgeConfig
    state: State
    outbox: Outbox
    ledger: Ledger
    training: TrainingProcess
    deflate: bool = False

    def check_in(self, link: Link, message: CheckIn) -> tuple[CheckInAnswer, float | None]:
        """The coordinator's answer, whose task is checked, and its clock."""
        answer = link.post("/checkin", message, wait_seconds=message.wait_seconds)
        parsed = parse_answer(CheckInAnswer, answer)
        if parsed.task is not None:
            parsed = replace(parsed, task=check_offer(parsed.task))
        # Deflated uploads came with 1.2.
        self.deflate = self.config.deflate_uploads and parsed.wire not in ("1.0", "1.1")
        return parsed, answer.date

    def take(self, offer: TaskOffer, now: float) -> None:
        """Holds a new task and deletes the files of others."""
        self.state.hold(offer, now)
        self._clean_work(keep=offer.task)

    def fetch(self, link: Link, offer: TaskOffer, check_cancelled: Callable[[], None]) -> None:
        """Fetches everything that the task needs and the device does not have yet.

        Raises:
            TrainingFailed: it is more than this device's disk holds or its limit allows.
        """
        folder = self._folder("blobs")
        needed = offer.blobs
        self._drop_blobs(keep=self.state.blobs_in_use())
        self._require_room(offer, needed, folder)
        for ref in needed:
            try:
                download(link, ref, folder / ref.sha256, check_cancelled=check_cancelled)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                (folder / f"{ref.sha256}.part").unlink(missing_ok=True)
                raise TrainingFailed("limits", f"this device's disk: {error.strerror}") from None
        rule = offer.message.get("rule")
        if isinstance(rule, Mapping) and rule.get("name") in PERSONAL_RULES:
            self.state.keep_own_model(offer)

    def work(
        self, offer: TaskOffer, stop_reason: Callable[[], str | None], now: Callable[[], float]
    ) -> list[PendingResult]:
        """Trains, evaluates or takes statistics in the training process and stores the result in the outbox, durably.

        Returns the results that were dropped from the outbox to make room.

        Raises:
            Interrupted: `stop_reason` named a reason.
            TrainingFailed: with the code for the decline.
        """
        job, done = self.train(offer, stop_reason)
        if offer.kind == "evaluate":
            self._complete_evaluation(offer, job.result)
        if offer.kind == "statistics":
            self._complete_statistics(offer, job.result)
        state_out = job.state_out if offer.kind == "train" else None
        deflate = self.deflate and offer.kind == "train"
        try:
            _, dropped = self.outbox.store(
                offer, job.result, state_out, treated=done.treated, deflate=deflate, now=now()
            )
        except OutboxFull as error:
            raise TrainingFailed("limits", str(error)) from None
        shutil.rmtree(self.folder_of(offer), ignore_errors=True)
        return dropped

    def folder_of(self, offer: TaskOffer) -> Path:
        """The files of a task, which are deleted when it is over."""
        return self._folder("work") / offer.task

    def train(self, offer: TaskOffer, stop_reason: Callable[[], str | None]) -> tuple[TrainingJob, Done]:
        """Does the task in the training process. Raises: as `work`."""
        folder = self.folder_of(offer)
        folder.mkdir(exist_ok=True, mode=0o700)
        job = self._job(offer, folder)
        return job, self.training.run(job, stop_reason)

    def deliver(
        self,
        link: Link,
        waiting: PendingResult,
        check_cancelled: Callable[[], None],
        now: Callable[[], float],
    ) -> str:
        """Sends one result. Returns its outcome: `delivered`, or why it never can be.

        Raises:
            Unreachable, ServerRefused: the result stays in the outbox for another try.
        """
        self.ledger.record(waiting, self.outbox.path(waiting.task), now())
        try:
            self._send(link, waiting, check_cancelled)
        except ServerRefused as refused:
            late = now() > waiting.closes_at + _LATE_SECONDS
            if refused.code in _ABOUT_THIS_DEVICE or (refused.is_transient and not late):
                raise
            self.ledger.record_outcome(waiting, f"refused: {refused.message} ({refused.code})", now())
            self.outbox.drop(waiting)
            return f"dropped: {refused.message} ({refused.code})"
        self.ledger.record_outcome(waiting, "delivered", now())
        self.outbox.accept(waiting, self._rule_state(waiting.run))
        return "delivered"

    def give_back(self, link: Link | None, offer: TaskOffer, decline: Decline | None) -> None:
        """Forgets the task in hand, and sends the coordinator the decline if there is one.

        Raises:
            Unreachable: the coordinator was not reached; the task is still held.
        """
        if link is not None and decline is not None:
            try:
                link.post(f"/tasks/{offer.task}/decline", decline)
            except ServerRefused as refused:
                if refused.is_transient or refused.code in _ABOUT_THIS_DEVICE:
                    raise
        with self.state.change() as write:
            self.state.release(write, offer.task)
        self._clean_work(keep=None)

    def forget(self, now: float, *, held: bool) -> None:
        """Deletes the files of runs that are over. `held`: the coordinator counts on this device for a run."""
        for run, used_at in self.state.runs().items():
            if not held and now - used_at > FORGET_BLOBS_SECONDS:
                self.state.forget_blobs(run)
            if now - used_at > FORGET_RUN_SECONDS:
                self.state.forget_run(run)
                self._rule_state(run).unlink(missing_ok=True)
        self._drop_blobs(keep=self.state.blobs_in_use())

    def sweep(self) -> list[PendingResult]:
        """Cleans up after a crash. Returns results that were lost on disk.

        Downloads are not made durable, because that would cost time each round: after a power cut a file may be empty.
        """
        lost = self.outbox.sweep()
        for path in self._folder("blobs").iterdir():
            if path.suffix != ".part" and file_sha256(path) != path.name:
                path.unlink()
        offer = self.state.task()
        self._clean_work(keep=offer.task if offer is not None else None)
        return lost

    def wipe(self) -> None:
        """Deletes all files of runs, models, waiting results and the task in hand; identity and ledger stay."""
        for waiting in self.outbox.pending():
            self.outbox.drop(waiting)
        for run in self.state.runs():
            self.state.forget_run(run)
        with self.state.change() as write:
            write.execute("DELETE FROM task")
        for name in ("work", "blobs", "rules", "releases"):
            shutil.rmtree(self.config.state_dir / name, ignore_errors=True)

    def _job(self, offer: TaskOffer, folder: Path) -> TrainingJob:
        rule_state = self._rule_state(offer.run)
        return TrainingJob(
            kind=offer.kind,
            runtime=offer.runtime,
            params=self._blob(offer.params) if offer.params else None,
            streams=self._blob(offer.streams) if offer.streams else None,
            tflite=self._blob(offer.artifact) if offer.artifact else None,
            manifest=self._blob(offer.manifest) if offer.manifest else None,
            schema=self._blob(offer.schema) if offer.schema else None,
            model=offer.model,
            message=self._request(offer) if offer.kind == "statistics" else offer.message,
            data=self.config.data[offer.dataset],
            state_in=rule_state if rule_state.exists() else None,
            state_out=folder / "state_out",
            result=folder / "result",
        )

    def _complete_evaluation(self, offer: TaskOffer, result: Path) -> None:
        """Turns the sums of the training process into the message that leaves the device."""
        assert offer.params is not None, "checked with the offer"
        sums = json.loads(result.read_text("utf-8"))
        least = self.config.statistics.minimum_count
        if sums["rows"] < least:
            sums.pop("quantity", None)  # few labels follow from their sums
        if "scores" in sums and has_small_class(parse(ClassScores, sums["scores"], "scores"), least):
            sums.pop("scores")
        message = EvaluationResult(base=offer.params.sha256, site=self.config.labels.get("site", ""), **sums)
        result.write_text(json.dumps(vars(message)), "utf-8")

    def _request(self, offer: TaskOffer) -> dict[str, Any]:
        """What the coordinator asks for, within what the owner allows. Raises: TrainingFailed: it is no request."""
        try:
            request = parse_message(StatisticsRequest, offer.message, "statistics")
        except InvalidDocument as error:
            raise TrainingFailed("failed", str(error)) from None
        least = max(request.minimum_count, self.config.statistics.minimum_count)
        return to_json(replace(request, minimum_count=least))

    def _complete_statistics(self, offer: TaskOffer, result: Path) -> None:
        """Adds the site to the statistics that leave the device. Raises: TrainingFailed: they are too long."""
        document = json.loads(result.read_text("utf-8")) | {"site": self.config.labels.get("site", "")}
        text = json.dumps(document)
        if len(text) > offer.result_limit_bytes:
            raise TrainingFailed(
                "limits",
                f"its statistics have {len(text)} bytes, expected {offer.result_limit_bytes} at most; ask for fewer columns",
            )
        result.write_text(text, "utf-8")

    def _send(self, link: Link, waiting: PendingResult, check_cancelled: Callable[[], None]) -> None:
        path = self.outbox.path(waiting.task)
        if waiting.kind == "evaluate":
            link.post(f"/tasks/{waiting.task}/evaluation", json.loads(path.read_bytes()))
            return
        if waiting.kind == "statistics":
            link.post(f"/tasks/{waiting.task}/statistics", json.loads(path.read_bytes()))
            return
        start = UploadStart(waiting.size_bytes, waiting.sha256, waiting.decoded_bytes, waiting.encoding)
        upload(link, waiting.task, path, start, check_cancelled=check_cancelled)

    def _rule_state(self, run: str) -> Path:
        return self.config.state_dir / "rules" / run

    def _blob(self, ref: BlobRef) -> Path:
        return self.config.state_dir / "blobs" / ref.sha256

    def _folder(self, name: str) -> Path:
        folder = self.config.state_dir / name
        folder.mkdir(exist_ok=True, mode=0o700)
        return folder

    def _require_room(self, offer: TaskOffer, needed: list[BlobRef], folder: Path) -> None:
        """Checks the sizes that the coordinator states before the first byte is requested."""
        needed_bytes, most = sum(ref.size_bytes for ref in needed), self.config.download_bytes
        if needed_bytes > most:
            raise TrainingFailed(
                "limits", f"its files take {needed_bytes} bytes, this device's download_bytes is {most}"
            )
        if needed_bytes + sum(path.stat().st_size for path in folder.iterdir()) > most:
            self._drop_blobs(keep={ref.sha256 for ref in needed})
        have = sum(_size(folder / name) for ref in needed for name in (ref.sha256, f"{ref.sha256}.part"))
        result = offer.params.size_bytes if offer.kind == "train" and offer.params else 0
        free, missing = shutil.disk_usage(folder).free, needed_bytes - have + result + SPARE_BYTES
        if missing > free:
            raise TrainingFailed(
                "limits",
                f"its files and its result take {missing} bytes more, this device's disk has {free} free",
            )

    def _drop_blobs(self, keep: set[str]) -> None:
        for path in self._folder("blobs").iterdir():
            if path.name.removesuffix(".part") not in keep:
                path.unlink()

    def _clean_work(self, keep: str | None) -> None:
        for path in self._folder("work").iterdir():
            if path.name != keep:
                shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def check_offer(offer: TaskOffer) -> TaskOffer:
    """The offer, with the names of its run and of its model class made printable.

    Raises:
        Unreachable: an id, a number or the nesting is invalid.
    """
    for name in (offer.task, offer.run):
        if not _ID.fullmatch(name):
            raise Unreachable(f"the coordinator offers a task with the invalid id {name[:40]!r}")
    for ref in offer.blobs:
        if not (_SHA256.fullmatch(ref.sha256) and 0 <= ref.size_bytes <= _LARGEST):
            raise Unreachable(
                f"the coordinator offers an invalid blob {ref.sha256[:40]!r} of {ref.size_bytes:.3g} bytes"
            )
    if offer.params is None and offer.kind != "statistics":
        raise Unreachable(f"the coordinator offers a task to {offer.kind} without a model")
    if not (0 <= offer.round <= _LARGEST and offer.lease_seconds > 0):
        raise Unreachable(
            f"the coordinator offers a task of round {offer.round:.3g} with a lease of {offer.lease_seconds:g} s"
        )
    if not (_is_shallow(offer.message) and _is_shallow(offer.model.options)):
        raise Unreachable("the coordinator offers a task that is nested too deep")
    run_name, model_class = printable(offer.run_name, 200), printable(offer.model_class, 50)
    return replace(offer, run_name=run_name, model_class=model_class)


def _is_shallow(value: object, levels: int = 20) -> bool:
    """Whether JSON is nested at most so deep: later code walks it by recursion."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(part, levels - 1) for part in parts)
