"""A device's part in the secure aggregation of a round: from its trained update to the last message of the protocol.

    read      the update is clipped, rounded by chance and encoded, with this device's share of the noise if the task says so
    keys, shares, masked update, confirmation, shares to unmask     one stage after the other, each once the whole group is through

Secrets are in memory only: a device that is restarted has left its group. `strategies.secagg.client` checks what the coordinator says;
whatever is wrong ends the device's part, and its update never leaves it in the open.
"""

from __future__ import annotations

import base64
import binascii
import os
import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edge_client import failpoints
from edge_client.train.process import TrainingFailed
from edge_client.transport.failures import Backoff, ServerRefused, Unreachable
from edge_client.transport.identity import Identity
from edge_client.transport.link import Link, parse_answer
from edge_client.transport.signatures import BadCertificate, DeviceKeys, sign
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage, TaskOffer
from edge_client.wire.secure import SecureMessage, SecureReply, SecureTask, Stage
from strategies.params import shape_of, unflatten
from strategies.privacy.noise.secure import SecureSource
from strategies.privacy.noised_vector import NoisedVector
from strategies.secagg.client import Client
from strategies.secagg.errors import ProtocolError
from strategies.update import Update

WAIT_SECONDS = 25.0
"""How long one request waits: between two of them the device may end, or be paused."""

T = TypeVar("T")

Pause = Callable[[float], None]
"""Waits so many seconds, or raises because the work must stop."""


class SecureUpdate:
    """One update. `upload` sends the masked update, a file, and returns when it counts; it may be called again after `Unreachable`.

    Raises, from every method:
        TrainingFailed: this device's part is over.
        What `pause` raises.
    """

    def __init__(
        self,
        link: Link,
        identity: Identity,
        offer: TaskOffer,
        upload: Callable[[Path], None],
        pause: Pause,
    ) -> None:
        self._link, self._identity, self._offer = link, identity, offer
        self._upload, self._pause = upload, pause

    def send(self, result: Path, masked: Path) -> None:
        """Takes the update in the file `result` through all stages. `masked`: a file for the masked update."""
        try:
            self._send(result, masked)
        except (ProtocolError, BadCertificate, ValueError) as error:
            raise TrainingFailed("failed", f"secure aggregation: {error}") from None

    def _send(self, result: Path, masked: Path) -> None:
        message = TaskMessage.from_json(self._offer.message)
        task = SecureTask.of(message)
        assert task is not None, "the caller has looked"
        update = _read(result)
        vector = task.vector({name: shape_of(update.delta, name) for name in update.delta})
        residues = (
            vector.encode(update, SecureSource())
            if isinstance(vector, NoisedVector)
            else vector.encode(update, np.random.default_rng(secrets.randbits(128)))
        )
        keys = DeviceKeys(x509.load_pem_x509_certificate(self._identity.ca_pem.encode()))
        credentials = self._identity.credentials
        certificate = credentials.certificate.read_text("ascii")
        own = serialization.load_pem_private_key(credentials.key.read_bytes(), None)
        assert isinstance(own, ec.EllipticCurvePrivateKey)
        client = Client(
            task.terms(self._offer.run, message.round, message.base, vector),
            self._identity.device,
            lambda content: sign(own, content),
            keys.verify,
            os.urandom,
        )
        listed = self._exchange("keys", client.advertise_keys(), certificate)
        for device, pem in listed.certificates.items():
            keys.add(device, pem)
        shares = self._exchange("shares", client.share_keys(_decode(listed)))
        masked.write_bytes(client.mask_input(_decode(shares), residues))
        del update, residues
        failpoints.reach("secure.shared")
        self._retried(lambda: self._upload(masked))
        failpoints.reach("secure.counted")
        survivors = self._exchange("input", b"")
        confirmations = self._exchange("confirmation", client.confirm_survivors(_decode(survivors)))
        self._exchange("reveal", client.reveal_shares(_decode(confirmations)))

    def _exchange(self, stage: Stage, body: bytes, certificate: str = "") -> SecureReply:
        """Sends a message and waits until the group is through with its stage."""
        encoded = base64.b64encode(body).decode("ascii")
        message = SecureMessage(stage, encoded, certificate, WAIT_SECONDS)
        path = f"/tasks/{self._offer.task}/secure"

        def post() -> SecureReply:
            return parse_answer(SecureReply, self._link.post(path, message, wait_seconds=WAIT_SECONDS))

        while True:
            reply = self._retried(post)
            if reply.message is not None:
                return reply
            self._pause(0.0)

    def _retried(self, act: Callable[[], T]) -> T:
        """The result of `act`, again and again while the coordinator cannot be reached."""
        backoff = Backoff(random.Random(), first_seconds=0.5, longest_seconds=30.0)
        while True:
            self._pause(0.0)
            try:
                return act()
            except ServerRefused as refused:
                if not refused.is_transient:
                    raise TrainingFailed("failed", f"secure aggregation: {refused.message}") from None
                at_least = refused.retry_after or 0.0
            except Unreachable:
                at_least = 0.0
            self._pause(backoff.failed(at_least))


def _read(result: Path) -> Update:
    """The update that this device has written; its tensors are read on access."""
    payload = arrays.FilePayload(result)
    header = arrays.read_header(payload)
    said = arrays.result_header(header.values)
    delta = unflatten(arrays.StoredArrays(payload, header))[arrays.DELTA]
    return Update(delta, said.num_examples, said.num_steps, said.train_loss)


def _decode(reply: SecureReply) -> bytes:
    try:
        return base64.b64decode(reply.message or "", validate=True)
    except binascii.Error as error:
        raise ProtocolError(f"the coordinator's message is not base64: {error}") from None
