"""The model of this device's own, which a personalised strategy leaves on it: the newest global params it received, with what it keeps.

state.db     the last task of each such run whose files were fetched: model, runtime, client rule
blobs/       its params, artifact, manifest and data schema
rules/<run>  what the device keeps: its local tensors, or its whole model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.errors import UserError
from edge_client.infer.runtime import InvalidRows, check_rows
from edge_client.state import State
from edge_client.train.evaluation import EVALUATION_ROWS
from edge_client.train.resolve import CannotRun, runtime_for
from edge_client.train.trainer import Runtime
from edge_client.wire import arrays
from edge_client.wire import schema as schemas
from edge_client.wire.device import BlobRef, TaskOffer
from edge_client.wire.manifest import InputSpec
from edge_client.wire.schema import DataSchema
from edge_client.wire.strict import InvalidDocument, printable
from strategies.params import Params, materialize, unflatten
from strategies.personalisation import PersonalRule, UnknownRule, from_options

_ANY_ID = 2**31 - 1


@dataclass(frozen=True)
class OwnDescription:
    """What the model is, as `infer.runtime.Described`. `model`: name of the run. `version`: round of its params."""

    model: str
    version: int
    classes: int
    input: InputSpec
    schema: DataSchema | None

    @property
    def data_schema(self) -> DataSchema:
        """The schema; without one, the form of the model's input."""
        return self.schema or DataSchema("array", self.input.shape, self.input.dtype)


@dataclass(frozen=True)
class OwnModel:
    """A model that is ready to predict."""

    manifest: OwnDescription
    runtime: Runtime
    params: Params

    def predict(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Logits of rows `x` [N, …]: [N, classes], for sequences [N, T, classes].

        Raises:
            InvalidRows: another shape or dtype, or ids out of range.
        """
        checked = check_rows(x, self.manifest)
        if not len(checked):
            raise InvalidRows("there are no rows")
        parts = (checked[at : at + EVALUATION_ROWS] for at in range(0, len(checked), EVALUATION_ROWS))
        return np.concatenate([self.runtime.logits(self.params, part) for part in parts])


def load(state_dir: Path, called: str) -> OwnModel:
    """This device's own model of a run. `called`: name of the run, or the beginning of its id.

    Raises:
        UserError: there is none, several runs are called so, or a file is gone.
        CannotRun: this device cannot run it.
    """
    offer = _find(_offers(state_dir), called)
    kept = state_dir / "rules" / offer.run
    if not kept.exists():
        raise UserError(
            f"this device has no model of its own in {offer.run_name} yet: none of its updates was accepted"
        )
    schema = _read_schema(offer, state_dir)
    if offer.model.task == "regression" and (schema is None or schema.label_scale is None):
        raise CannotRun(
            "no_model", f"{offer.run_name} predicts quantities, and their scale did not come with it"
        )
    params = _combine(offer, state_dir, kept)
    files = (
        _blob(state_dir, ref, offer) if ref is not None else None for ref in (offer.artifact, offer.manifest)
    )
    runtime = runtime_for(offer.runtime, offer.model, *files)
    return OwnModel(_describe(offer, schema), runtime, params)


def _read_schema(offer: TaskOffer, state_dir: Path) -> DataSchema | None:
    if offer.schema is None:
        return None
    path = _blob(state_dir, offer.schema, offer)
    try:
        return schemas.from_json(path.read_bytes(), "the data schema of its task")
    except InvalidDocument as error:
        raise UserError(f"this device's own model of {offer.run_name} cannot be read: {error}") from None


def _combine(offer: TaskOffer, state_dir: Path, kept: Path) -> Params:
    """The params of this device's own model. `kept`: the file of what it keeps."""
    assert offer.params is not None, "of a task that trains or evaluates"
    path = _blob(state_dir, offer.params, offer)
    try:
        rule = from_options(offer.message["rule"])
        assert isinstance(rule, PersonalRule), "the daemon stores offers of such rules only"
        return materialize(rule.personal(arrays.read(path), unflatten(arrays.read(kept))))
    except (arrays.Malformed, UnknownRule) as error:
        raise UserError(
            f"this device's own model of {offer.run_name} cannot be read: {printable(str(error), 300)}"
        ) from None


def _offers(state_dir: Path) -> Mapping[str, TaskOffer]:
    if not (state_dir / "state.db").exists():
        return {}
    state = State(state_dir)
    try:
        return state.own_models()
    finally:
        state.close()


def _find(offers: Mapping[str, TaskOffer], called: str) -> TaskOffer:
    found = [each for run, each in offers.items() if called == each.run_name or run.startswith(called)]
    if len(found) == 1 and called:
        return found[0]
    known = ", ".join(f"{each.run_name} ({run[:8]})" for run, each in sorted(offers.items())) or "none"
    problem = "several runs are called so" if len(found) > 1 else "this device has no model of its own of it"
    raise UserError(
        f"--own {printable(called, 100)}: {problem}; models of its own: {known}. Such models come from runs of fedper, fedrep, fedbn and "
        "ditto, and are kept for two weeks after a run's last task"
    )


def _blob(state_dir: Path, ref: BlobRef, offer: TaskOffer) -> Path:
    path = state_dir / "blobs" / ref.sha256
    if not path.exists():
        raise UserError(
            f"a file of {offer.run_name} is gone, as more than download_bytes was needed; it comes again with the run's next task"
        )
    return path


def _describe(offer: TaskOffer, schema: DataSchema | None) -> OwnDescription:
    model = offer.model
    # Which ids a model takes, its task does not say; the schema's own texts are within them.
    vocab = _ANY_ID if model.input_dtype == "int32" and model.task != "next_token" else None
    spec = InputSpec(tuple(model.input_shape), model.input_dtype, vocab)
    return OwnDescription(offer.run_name, offer.round, model.classes, spec, schema)
