"""Tables of the experiment file: the tables `[local]`, `[uplink]` and `[evaluation]`, and those within `[simulation]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from coordinator.document_checks import Section


class Local(Section):
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the client's rows in a round; or steps, not both."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Batches in a round; or epochs, not both."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 16
    """Rows in a batch."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate on clients."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the steps of a client in a round, from 0 up to below 1; 0: off."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 0.0
    """Largest L2 norm of a step's gradient, which a longer one is scaled down to; 0: off."""
    optimizer: Literal["sgd", "adamw"] | None = None
    """Of the steps of a client; default: sgd, or adamw with strategy.name = "diloco"."""
    beta1: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of adamw's first moment; default: 0.9."""
    beta2: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of adamw's second moment; default: 0.999."""
    eps: Annotated[float, Field(gt=0)] | None = None
    """Added to the root of adamw's second moment; default: 1e-8."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Of adamw, decoupled from the gradient; default: 0.01, or 0.1 with strategy.name = "diloco"."""
    keep_moments: bool | None = None
    """Whether a client keeps adamw's moments for its next round; default: no, or yes with strategy.name = "diloco"."""

    @property
    def changes_steps(self) -> bool:
        """Whether steps are other than plain SGD."""
        return self.momentum > 0 or self.clip_grad_norm > 0 or self.optimizer == "adamw"


class Attack(Section):
    """What malicious clients of a simulation do (`docs/strategies.md`)."""

    name: Literal["sign_flip", "scaling", "gaussian", "alie", "ipm", "label_flip", "backdoor"]
    """Of an update, or label_flip and backdoor of the data."""
    clients: Annotated[int, Field(ge=1)]
    """How many are malicious, drawn by the seed."""
    scale: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """What an attack multiplies; default: by its name, and 1 for a backdoor."""
    target: Annotated[int, Field(ge=0)] | None = None
    """Class that a backdoor leads to; default: 0."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of a malicious client's rows that a backdoor changes; default: 0.5."""


class Stragglers(Section):
    """Clients of a simulation that are too slow for all of their local work."""

    share: Annotated[float, Field(gt=0, le=1)]
    """Of the clients of each round, drawn by the seed; each does a random part of its epochs or steps."""
    partial: Literal["aggregate", "drop"] = "aggregate"
    """Whether their partial updates count."""


class FineTune(Section):
    """Training of the final model on each client's own rows."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Passes over the client's rows."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate; default: local.lr."""


class ServerData(Section):
    """Rows of the server's own in a simulation, of another data set than the clients' (`docs/strategies.md`)."""

    dataset: str | None = None
    """A shipped data set, csv, npz or package.module:load; default: the rows of data.public_samples."""
    path: str | None = None
    """The file of csv and npz."""
    label: str | None = None
    """Column of a table with the label; default: the one of the clients' table."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """How many rows, drawn by the data's seed; default: all."""


CodeName = Literal["topk", "qsgd", "sign", "drive", "eden", "powersgd"]


class CodeOptions(Section):
    """A code, and those options that it has."""

    code: CodeName | None = None
    """Code that makes what is sent small; default: it is sent as it is."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the values that topk (default 0.01) and drive (default 1) send."""
    bits: Annotated[int, Field(ge=1, le=32)] | None = None
    """Of a value: topk 1, 4, 8 or 32 (default), qsgd 2, 4 or 8 (default), eden 2 or 4 (default)."""
    rank: Annotated[int, Field(ge=1, le=64)] | None = None
    """Of the two factors of powersgd; default: 2."""

    @property
    def options(self) -> dict[str, Any]:
        """The keys that have a value, without the name."""
        return self.model_dump(exclude_none=True, exclude={"code"})


class Uplink(CodeOptions):
    """How clients write their updates (`docs/update-compression.md`)."""

    code: CodeName | None = None
    """Code that makes updates small; default: they are sent as they are."""


class Downlink(CodeOptions):
    """How the server of a simulation writes what changes of the model (`docs/update-compression.md`)."""

    code: CodeName | None = None
    """Code that makes the changes of the model small; default: each client gets the model as it is."""


class EvaluationSection(Section):
    """When models are scored, and on which of the held-out rows."""

    every: Annotated[int, Field(ge=1)] = 1
    """Rounds between scores on the coordinator's held-out rows; the last round is always scored."""
    sample: Annotated[int, Field(ge=1)] | None = None
    """Held-out rows that score the model after each round and at the end, drawn by the data's seed; default: all."""

    def is_due(self, round_number: int, rounds: int) -> bool:
        """Whether a round of a run of so many rounds is scored. Round 0 is the initial model."""
        return round_number % self.every == 0 or round_number == rounds
