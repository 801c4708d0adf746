"""A task whose update is masked: trained, then taken through secure aggregation together with the devices of its group.

The secrets of the protocol are in memory only. If this process ends in between, the next one finds that the update was being masked, and
gives the task back: it has left its group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_client.daemon.executor import Executor
from edge_client.files import file_sha256
from edge_client.outbox import PendingResult
from edge_client.transport.identity import Identity
from edge_client.transport.link import Link, upload
from edge_client.wire.device import TaskOffer, UploadStart

_MASKED = "masked: the coordinator learns the sum of the device's group"
_BEGUN = "masking"
"""File in the folder of a task whose update is being masked."""


def has_left_its_group(executor: Executor, offer: TaskOffer) -> bool:
    """Whether an earlier process had begun to mask the update of this task."""
    return (executor.folder_of(offer) / _BEGUN).exists()


@dataclass(frozen=True)
class MaskedWork:
    """How masked updates are done.

    Attributes:
        pause: waits so many seconds. Raises: Interrupted: the work must stop.
        on_counted: called once the coordinator has the masked update.
        now: seconds since 1970.
    """

    executor: Executor
    link: Link
    identity: Identity
    pause: Callable[[float], None]
    on_counted: Callable[[], None]
    now: Callable[[], float]

    def do(self, offer: TaskOffer, stop_reason: Callable[[], str | None]) -> None:
        """Trains and takes part; the task is over then. What leaves the device is in the ledger first.

        Raises:
            Interrupted, TrainingFailed: as `Executor.work`.
        """
        from edge_client.privacy.secure_update import SecureUpdate  # takes numpy

        job, done = self.executor.train(offer, stop_reason)
        folder = self.executor.folder_of(offer)
        (folder / _BEGUN).touch()

        def send(masked: Path) -> None:
            self._send(offer, masked, "; ".join([*done.treated, _treated(offer)]))

        SecureUpdate(self.link, self.identity, offer, send, self.pause).send(job.result, folder / "masked")
        self.executor.give_back(None, offer, None)

    def _send(self, offer: TaskOffer, masked: Path, treated: str) -> None:
        size, digest = masked.stat().st_size, file_sha256(masked)
        sent = PendingResult(
            task=offer.task,
            run=offer.run,
            run_name=offer.run_name,
            round=offer.round,
            kind=offer.kind,
            size_bytes=size,
            sha256=digest,
            decoded_bytes=size,
            encoding="identity",
            stored_at=self.now(),
            closes_at=self.now() + offer.deadline_seconds,
            treated=treated,
        )
        self.executor.ledger.record(sent, masked, self.now())
        upload(self.link, offer.task, masked, UploadStart(size, digest, size))
        self.executor.ledger.record_outcome(sent, "delivered", self.now())
        self.on_counted()


def _treated(offer: TaskOffer) -> str:
    """What was done to a masked update before it left the device."""
    noise = (offer.message.get("secure") or {}).get("noise")
    if noise is None:
        return f"clipped and {_MASKED}"
    return f"clipped, with a share of noise of {noise['noise_multiplier']:g} times the norm in the sum, and {_MASKED}"
