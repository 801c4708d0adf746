"""The device API as data: every message between a device and its coordinator, and the version of the wire.

A device speaks first, always. Bodies are JSON objects or raw bytes; identity comes from the TLS client
certificate and from nothing in a body. `docs/wire.md` tells the story, this module is its vocabulary:

    enrol ─► (renew) ─► check in ─► fetch model and artifact ─► upload the result, or evaluate, or decline

**Versions.** A minor version adds keys and kinds; a reader ignores keys it does not know and refuses what is
missing or of another kind. Device and coordinator use the lower of their minor versions; a coordinator
serves devices up to two minor versions old, and answers others with 426 `wire_version`.

    1.0  train tasks, uploads as they are
    1.1  evaluate tasks: federated evaluation on the device's held-out rows
    1.2  uploads may be deflated (`encoding`)
    1.3  releases: a device says how they stand, and hears which it is to run
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

WIRE = (1, 3)
OLDEST_MINOR = WIRE[1] - 2

PREFIX = "/device/v1"

Encoding = Literal["identity", "deflate"]
TaskKind = Literal["train", "evaluate"]
RuntimeName = Literal["litert", "torch", "tensorflow"]


@dataclass(frozen=True)
class EnrolRequest:
    """POST /enrol, without a client certificate. Safe to repeat: the same key gets the same device.

    Attributes:
        token: as `fedloop device token` printed it.
        csr: PEM, signed with the device's own P-256 key.
        name: for people; need not be unique.
        serial_number: of the machine, for tokens that admit listed machines only.
    """

    token: str
    csr: str
    name: str
    serial_number: str | None = None


@dataclass(frozen=True)
class RenewRequest:
    """POST /renew, with or without a client certificate, also after its expiry.

    Attributes:
        certificate: the one to be renewed, PEM.
        csr: PEM, for the next key.
        proof: base64; ECDSA-SHA256 over the DER bytes of the CSR by the certificate's key.
    """

    certificate: str
    csr: str
    proof: str


@dataclass(frozen=True)
class Enrolled:
    """Answer to both. While a person has yet to approve, `certificate` is empty: ask again after `retry_seconds`."""

    device: str
    certificate: str
    not_after: str
    retry_seconds: float = 0.0


ReleaseStanding = Literal["installing", "active", "failed", "rolled_back"]


@dataclass(frozen=True)
class ReleaseEvaluation:
    """The new model and the one before it on the device's held-out rows: sums, nothing of the rows. Champion's are None where
    there was no model before."""

    labels: int
    correct: int
    loss_sum: float
    champion_correct: int | None = None
    champion_loss_sum: float | None = None


@dataclass(frozen=True)
class ReleaseReport:
    """How a release stands on this device.

    Attributes:
        rollout: that told it to take it.
        standing: `active`: it runs, after its self-test; `failed`: it never did; `rolled_back`: it did, and does no more.
        code: stable reason of a failure, such as `self_test`, `wrong_runtime`, `memory`, `signature`, `crash_loop`.
        words: for people.
        golden_accuracy: on the manifest's real rows, None where it has none.
    """

    rollout: str
    model: str
    version: int
    standing: ReleaseStanding
    code: str = ""
    words: str = ""
    golden_accuracy: float | None = None
    evaluation: ReleaseEvaluation | None = None


@dataclass(frozen=True)
class ReleaseOffer:
    """Which version of a model this device is to run. Only what the signed repository says too is believed.

    Attributes:
        action: `roll_back`: to this version, which the device has in its other slot; to 0: it had none, and is to have none.
        force: also if this device failed with it before.
    """

    rollout: str
    model: str
    version: int
    action: Literal["install", "roll_back"] = "install"
    force: bool = False


@dataclass(frozen=True)
class CheckIn:
    """POST /checkin.

    Attributes:
        wire: such as "1.2", the newest this device speaks.
        software: version of the daemon.
        runtimes: name -> version of each runtime that works here.
        memory_bytes: what a training process may use.
        device_class: free word, such as `server` or `gateway`.
        labels: free key -> value.
        datasets: logical name -> training rows.
        models: names of the installed model builders.
        ineligible: why no task may run now, in words; empty: one may.
        opted_out: runs this device takes no part in.
        working_on: the task it holds, if any; this renews the lease.
        wait_seconds: how long the device is ready to wait for a task within this request.
        releases: how every model it was told to run stands.
    """

    wire: str
    software: str
    runtimes: Mapping[str, str]
    memory_bytes: int
    device_class: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, int] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    ineligible: tuple[str, ...] = ()
    opted_out: tuple[str, ...] = ()
    working_on: str | None = None
    wait_seconds: float = 0.0
    releases: tuple[ReleaseReport, ...] = ()


@dataclass(frozen=True)
class BlobRef:
    """Bytes to fetch: GET /blobs/{sha256}, with ranges."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class ModelRef:
    """What builds the model in torch and TensorFlow, from code installed on the device."""

    name: str
    options: Mapping[str, Any]
    input_shape: tuple[int, ...]
    classes: int
    input_dtype: Literal["float32", "int32"]
    task: Literal["classification", "next_token"]


@dataclass(frozen=True)
class TaskOffer:
    """One task for one device.

    Attributes:
        task: its id, which is also the lease: whoever holds another id holds nothing.
        dataset: logical name, which the device's configuration maps to data of its own.
        message: of a train task, `edge_client.wire.messages.TaskMessage` as JSON; of an evaluate task empty.
        params: what to start from, or to evaluate.
        streams: arrays of the client rule, where it has any.
        artifact, manifest: for the litert runtime.
        lease_seconds: silence of the device after which the task is given up.
        deadline_seconds: from now, for the whole task.
        result_limit_bytes: largest result accepted, decoded.
    """

    task: str
    kind: TaskKind
    run: str
    run_name: str
    round: int
    runtime: RuntimeName
    dataset: str
    message: Mapping[str, Any]
    model: ModelRef
    params: BlobRef
    streams: BlobRef | None
    artifact: BlobRef | None
    manifest: BlobRef | None
    lease_seconds: float
    deadline_seconds: float
    result_limit_bytes: int


@dataclass(frozen=True)
class CheckInAnswer:
    """What the device is to do.

    Attributes:
        wire: the version that both use from here on.
        task: one to start, or None.
        stop: the task in `working_on` is no longer wanted.
        hold: the device belongs to a run's pool: check in again at once, with `wait_seconds`.
        next_seconds: else come back after this long; already jittered.
        releases: what it is to run from now on, where that is not what it reported.
    """

    wire: str
    next_seconds: float
    task: TaskOffer | None = None
    stop: bool = False
    hold: bool = False
    releases: tuple[ReleaseOffer, ...] = ()


@dataclass(frozen=True)
class UploadStart:
    """POST /tasks/{task}/upload: begins an upload, or finds out how far it came.

    Attributes:
        size_bytes: of what will be sent, encoded.
        sha256: of the same bytes.
        decoded_bytes: of the result itself; equal to `size_bytes` with identity encoding.
    """

    size_bytes: int
    sha256: str
    decoded_bytes: int
    encoding: Encoding = "identity"


@dataclass(frozen=True)
class UploadState:
    """Answer to UploadStart and to PUT /tasks/{task}/upload?offset=N, whose body is a piece of the bytes.

    Attributes:
        offset: bytes the coordinator holds; go on from here.
        accepted: the whole result is durable and counts. Sent again, it is answered so again.
    """

    offset: int
    accepted: bool = False


@dataclass(frozen=True)
class EvaluationResult:
    """POST /tasks/{task}/evaluation: sums over the device's held-out rows, nothing of the rows themselves.

    Attributes:
        rows: held-out examples, >= 1.
        labels: counted labels; more than rows for sequences.
        correct: of these.
        loss_sum: cross-entropy summed over the labels.
        site: the device's own name for where its data is from, for the report.
    """

    base: str
    rows: int
    labels: int
    correct: int
    loss_sum: float
    site: str = ""


@dataclass(frozen=True)
class Decline:
    """POST /tasks/{task}/decline: the device gives the task back. `code` is stable, `words` are for people."""

    code: Literal[
        "ineligible", "no_data", "wrong_runtime", "no_model", "bad_artifact", "opted_out", "limits", "failed"
    ]
    words: str


def to_json(message: Any) -> dict[str, Any]:
    """A message as a JSON object."""
    return asdict(message)


def version(text: str) -> tuple[int, int]:
    """`"1.2"` as (1, 2).

    Raises:
        ValueError: not two whole numbers with a dot between.
    """
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(text) <= 16):
        raise ValueError(f"wire version {text[:20]!r} is not of the form 1.2")
    return int(major), int(minor)


def negotiated(theirs: tuple[int, int]) -> tuple[int, int] | None:
    """The version both speak, or None where there is none."""
    if theirs[0] != WIRE[0] or theirs[1] < OLDEST_MINOR:
        return None
    return WIRE[0], min(WIRE[1], theirs[1])
