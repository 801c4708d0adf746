"""The params that a run starts from: the safetensors file that `model.init` names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from edge_client.files import read_regular
from edge_client.wire import arrays
from strategies.params import Params, ShapeMismatch, require_same_shapes


def read_init(experiment: Experiment) -> bytes | None:
    """Contents of the file that `model.init` names; None if it names none.

    Raises:
        UserError: the file cannot be read.
    """
    if experiment.model.init is None:
        return None
    try:
        return read_regular(Path(experiment.model.init))
    except OSError as error:
        raise UserError(f"model.init = {experiment.model.init!r}: {error.strerror}") from None


def decode_init(named: str, content: bytes, built: Params) -> Params:
    """The params of a safetensors file, as float32. `named`: its name in messages; `built`: the model's own params.

    Raises:
        UserError: it is not a safetensors file, or does not fit the model.
    """
    try:
        params = arrays.decode(content)
        require_same_shapes(params, built)
    except arrays.Malformed:  # its message could quote a file of another kind
        raise UserError(f"{named} is not a safetensors file") from None
    except ShapeMismatch as error:
        raise UserError(f"{named} does not fit the model: {error}") from None
    return {name: value.astype(np.float32) for name, value in params.items()}
