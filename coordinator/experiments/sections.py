"""What a table of the experiment file is, and those within `[simulation]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tomlkit
from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A table of the file; unknown keys are errors, values are never coerced from strings."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
    )

    def to_toml(self) -> str:
        """The table, or the whole document, in TOML; keys without a value are left out."""
        return tomlkit.dumps(self.model_dump(mode="json", exclude_none=True))


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


class Uplink(Section):
    """How clients write their updates (`docs/update-compression.md`)."""

    code: Literal["topk", "qsgd", "sign", "drive", "eden", "powersgd"] | None = None
    """Code that makes updates small; default: they are sent as they are."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the values that topk sends; default: 0.01."""
    bits: Annotated[int, Field(ge=2, le=32)] | None = None
    """Of a value: topk 4, 8 or 32 (default), qsgd 2, 4 or 8 (default), eden 2 or 4 (default)."""
    rank: Annotated[int, Field(ge=1, le=64)] | None = None
    """Of the two factors of powersgd; default: 2."""

    @property
    def options(self) -> dict[str, Any]:
        """The keys that have a value, without the name."""
        return self.model_dump(exclude_none=True, exclude={"code"})
