"""The device API: every message between a device and its coordinator, and the version of the protocol.

The device always makes the request. Bodies are JSON objects or raw bytes; the client certificate identifies the device. `docs/wire.md`:

    enrol ─► (renew) ─► check in ─► fetch model and artifact ─► upload the result, or evaluate, or decline

A device's texts have at most 200 characters, lists and tables 256 entries, unless a field says otherwise; longer ones
are refused, and texts for people are cut (`strict.require_bounded`).

**Versions.** A minor version adds keys and message types; a reader ignores unknown keys and refuses missing keys and other types.
Both use the lower of their minor versions; a coordinator serves devices up to two old, and answers others with 426 `wire_version`.

    1.1  train tasks, and evaluate tasks: federated evaluation on the device's held-out rows
    1.2  uploads may be deflated (`encoding`)
    1.3  releases: a device reports their state and receives offers
    1.4  data schemas; codes of updates; `QuantitySums` and `ClassScores`; statistics tasks; momentum, gradient clipping and AdamW of local
         steps; narrower models (`divisors`, `model_class`); `clip_norm` of updates; secure aggregation (`wire.secure`); noise (`wire.privacy`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from edge_client.wire.quantities import QuantitySums
from edge_client.wire.scores import ClassScores
from edge_client.wire.strict import InvalidDocument, bounded, parse_message

WIRE = (1, 4)
OLDEST_MINOR = WIRE[1] - 2

PREFIX = "/device/v1"
Encoding = Literal["identity", "deflate"]
TaskKind = Literal["train", "evaluate", "statistics", "fold"]
RuntimeName = Literal["litert", "torch", "tensorflow"]

_PEM: Mapping[str, Any] = {"max_characters": 8192}
_FOR_PEOPLE: Mapping[str, Any] = {"for_people": True}


@dataclass(frozen=True)
class EnrolRequest:
    """POST /enrol, without a client certificate. Idempotent: the same key gets the same device.

    Attributes:
        token: as printed by `fedloop device token`. `name`: for people; need not be unique.
        csr: PEM, signed with the device's own P-256 key.
        serial_number: of the machine, for tokens that admit listed machines only.
    """

    token: str
    csr: str = field(metadata=_PEM)
    name: str
    serial_number: str | None = None


@dataclass(frozen=True)
class RenewRequest:
    """POST /renew, with or without a client certificate, also after its expiry.

    Attributes:
        certificate: the one to be renewed, PEM. `csr`: PEM, for the next key.
        proof: base64; ECDSA-SHA256 over the DER bytes of the CSR by the certificate's key.
    """

    certificate: str = field(metadata=_PEM)
    csr: str = field(metadata=_PEM)
    proof: str


@dataclass(frozen=True)
class Enrolled:
    """Answer to both. While approval is pending, `certificate` is empty: repeat after `retry_seconds`."""

    device: str
    certificate: str
    not_after: str
    retry_seconds: float = 0.0


ReleaseStanding = Literal["installing", "active", "failed", "rolled_back"]


@dataclass(frozen=True)
class ReleaseEvaluation:
    """Sums of the new model and the active one on the device's held-out rows, nothing of the rows themselves.

    The champion's are None if no model was active.
    """

    labels: int
    correct: int
    loss_sum: float
    champion_correct: int | None = None
    champion_loss_sum: float | None = None


@dataclass(frozen=True)
class ReleaseReport:
    """The state of a release on this device.

    Attributes:
        rollout: the rollout that offered it.
        standing: `active`: it runs, after its self-test; `failed`: it never ran; `rolled_back`: it no longer runs.
        code: stable reason of a failure, such as `self_test`, `wrong_runtime`, `memory`, `signature`, `crash_loop`.
        words: for people.
        golden_accuracy: on the manifest's real rows, None if it has none.
    """

    rollout: str
    model: str
    version: int
    standing: ReleaseStanding
    code: str = ""
    words: str = field(default="", metadata=_FOR_PEOPLE)
    golden_accuracy: float | None = None
    evaluation: ReleaseEvaluation | None = None


@dataclass(frozen=True)
class ReleaseOffer:
    """The version of a model that this device is to run, if the signed repository confirms it.

    Attributes:
        action: `roll_back`: to this version, which the device has in its other slot; to 0: to none, as before.
        force: also if the version failed on this device before.
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
        memory_bytes: what a training process may have; 0: nobody knows.
        device_class: free text, such as `server` or `gateway`.
        labels: free key -> value.
        datasets: logical name -> training rows.
        models: names of the installed model builders.
        ineligible: reasons why no task may run now; empty: one may.
        opted_out: runs that this device takes no part in.
        working_on: the task it holds, if any; this renews the lease.
        wait_seconds: how long the device waits for a task within this request.
        releases: the state of every model that it was told to run.
        release_runtime: the runtime for released models, `litert` or `tflite-runtime`; empty: none, or an older daemon.
            In `runtimes` both are `litert`, because they train alike.
    """

    wire: str
    software: str
    runtimes: Mapping[str, str]
    memory_bytes: int
    device_class: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, int] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    ineligible: tuple[str, ...] = field(default=(), metadata=_FOR_PEOPLE)
    opted_out: tuple[str, ...] = ()
    working_on: str | None = None
    wait_seconds: float = 0.0
    releases: tuple[ReleaseReport, ...] = ()
    release_runtime: str = ""


@dataclass(frozen=True)
class BlobRef:
    """Bytes to fetch: GET /blobs/{sha256}, with ranges."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class ModelRef:
    """The model builder for torch and TensorFlow, from code installed on the device. `divisors`: layer -> what its outputs are divided by."""

    name: str
    options: Mapping[str, Any]
    input_shape: tuple[int, ...]
    classes: int
    input_dtype: Literal["float32", "int32"]
    task: Literal["classification", "next_token", "regression"]
    divisors: Mapping[str, float] = field(default_factory=dict, metadata={"range": (2**-20, 1.0)})


@dataclass(frozen=True)
class TaskOffer:
    """One task for one device.

    Attributes:
        task: its id, which is also the lease: another id is no lease.
        dataset: logical name, which the device's configuration maps to its data.
        message: a `TaskMessage` as JSON for a train task, a `StatisticsRequest` for a statistics task, else empty.
        params: to start from, or to evaluate; None for a statistics task. Of a narrower model, its part of them.
        streams: arrays of the client rule, if it has any.
        artifact, manifest: for the litert runtime.
        schema: a `DataSchema`: how a table is read, and what other data is compared with.
        lease_seconds: the task is given up if the device is silent for so long.
        deadline_seconds: from now, for the whole task.
        result_limit_bytes: largest result accepted, decoded.
        model_class: of this device, in a run whose devices train models of different width.
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
    params: BlobRef | None
    streams: BlobRef | None
    artifact: BlobRef | None
    manifest: BlobRef | None
    lease_seconds: float
    deadline_seconds: float
    result_limit_bytes: int
    schema: BlobRef | None = None
    model_class: str = ""

    @property
    def blobs(self) -> list[BlobRef]:
        """What the task needs."""
        refs = (self.params, self.streams, self.artifact, self.manifest, self.schema)
        return [ref for ref in refs if ref is not None]


@dataclass(frozen=True)
class TaskMessage:
    """One client's work in one round. `base`: SHA-256 of the round's (whole) params. `code`: of the update, after it was scaled down to
    `clip_norm` (0: as it is). `optimizer`: None: SGD. `secure`: a `wire.secure.SecureTask`, if the update is to be masked. `noise`: a
    `wire.privacy.NoiseTask`, if the device adds noise itself."""

    round: int
    client: str
    base: str
    seed: int
    batch_size: int
    lr: float
    epochs: int | None
    steps: int | None
    rule: Mapping[str, Any]
    momentum: float = bounded(0.0, 0.0, 1 - 2**-53)
    clip_grad_norm: float = bounded(0.0, 0.0, float("inf"))
    code: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] | None = None
    clip_norm: float = bounded(0.0, 0.0, float("inf"))
    secure: Mapping[str, Any] | None = None
    noise: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        defaults = {each.name: each.default for each in fields(self)}  # left out, as before 1.4
        return {key: value for key, value in vars(self).items() if value != defaults[key]}

    @staticmethod
    def from_json(document: object) -> TaskMessage:
        """Raises InvalidDocument if a key is missing or of another type, or the work is invalid."""
        message = parse_message(TaskMessage, document, "task")
        if (message.epochs is None) == (message.steps is None):
            raise InvalidDocument(
                f"task: exactly one of epochs and steps is expected, got {message.epochs} and {message.steps}"
            )
        for name in ("round", "batch_size", "epochs", "steps"):
            value = getattr(message, name)
            if value is not None and value < 1:
                raise InvalidDocument(f"task.{name} is {value}, expected 1 or more")
        return message


@dataclass(frozen=True)
class CheckInAnswer:
    """The coordinator's instructions.

    Attributes:
        wire: the version that both use from now on.
        task: a task to start, or None.
        stop: the task in `working_on` is no longer wanted.
        hold: the device belongs to a run's pool: check in again at once, with `wait_seconds`.
        next_seconds: else check in after this time; already jittered.
        releases: versions to run from now on that differ from those reported.
    """

    wire: str
    next_seconds: float
    task: TaskOffer | None = None
    stop: bool = False
    hold: bool = False
    releases: tuple[ReleaseOffer, ...] = ()


@dataclass(frozen=True)
class UploadStart:
    """POST /tasks/{task}/upload: begins an upload, or returns its state.

    Attributes:
        size_bytes, sha256: of the encoded bytes to be sent.
        decoded_bytes: of the result itself; equal to `size_bytes` with identity encoding.
    """

    size_bytes: int
    sha256: str
    decoded_bytes: int
    encoding: Encoding = "identity"


@dataclass(frozen=True)
class UploadState:
    """Answer to UploadStart and to PUT /tasks/{task}/upload?offset=N, whose body is part of the bytes.

    Attributes:
        offset: number of bytes that the coordinator has; continue from here.
        accepted: the complete result is durable and counts. Repeated requests get the same answer.
    """

    offset: int
    accepted: bool = False


@dataclass(frozen=True)
class EvaluationResult:
    """POST /tasks/{task}/evaluation: sums over the device's held-out rows, nothing of the rows themselves.

    Attributes:
        rows: held-out examples, >= 1.
        labels: counted labels; more than rows for sequences.
        correct: number of correct labels.
        loss_sum: cross-entropy summed over the labels; of quantities the squared errors.
        site: the device's name for the origin of its data, for the report.
        quantity: of a model that predicts a quantity (wire 1.4); None if the device has fewer rows than its owner lets it
            report sums of, because the labels of few rows follow from their sums.
        scores: of a classifier (wire 1.4); None if a class has so few rows, or for the reasons in `train.class_scores`.
    """

    base: str
    rows: int
    labels: int
    correct: int
    loss_sum: float
    site: str = field(default="", metadata=_FOR_PEOPLE)
    quantity: QuantitySums | None = None
    scores: ClassScores | None = None


DeclineCode = Literal[
    "ineligible", "no_data", "wrong_runtime", "no_model", "bad_artifact", "opted_out", "limits", "failed"
]


@dataclass(frozen=True)
class Decline:
    """POST /tasks/{task}/decline: the device gives the task back. `code` is stable, `words` are for people."""

    code: DeclineCode
    words: str = field(metadata=_FOR_PEOPLE)


def beat_seconds(lease_seconds: float) -> float:
    """How often a device at work checks in, so that its task's lease does not run out: a third of it, at most 10 minutes."""
    return min(max(0.05, lease_seconds / 3), 600.0)


def to_json(message: Any) -> dict[str, Any]:
    """A message as a JSON object."""
    return asdict(message)


def version(text: str) -> tuple[int, int]:
    """`"1.2"` as (1, 2). Raises: ValueError: not two integers separated by a dot."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(text) <= 16):
        raise ValueError(f"wire version {text[:20]!r} is not of the form 1.2")
    return int(major), int(minor)


def negotiate(theirs: tuple[int, int]) -> tuple[int, int] | None:
    """The version that both support, or None."""
    if theirs[0] != WIRE[0] or theirs[1] < OLDEST_MINOR:
        return None
    return WIRE[0], min(WIRE[1], theirs[1])


def supports(theirs: str, since: tuple[int, int]) -> bool:
    """Whether both sides can speak the version `since` or a newer one; `theirs` as in a check-in."""
    try:
        return (negotiate(version(theirs)) or (0, 0)) >= since
    except ValueError:
        return False
