"""Gradient inversion: the rows of a client from its update.

Which attack fits depends on the layer that the input meets first (`layers.inspect`):

    embedding   tokens that occurred have moved their rows of the embedding
    dense       each neuron's weights have moved by its bias's movement times the input
    other       rows are sought whose gradient points where the update points

To the attacker the update is -lr times a gradient at the params that the client received. After one step of SGD that is exact, after more it is
an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from coordinator.workers.audit import layers, matching
from models.zoo import ModelSpec
from strategies.params import Params

Method = Literal["embedding", "analytic", "matching"]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Known:
    """What the attacker knows besides the update.

    Attributes:
        params: that the client received.
        low, high: least and greatest value of each number of a row, float32 in the shape of a row; empty for tokens.
        rows: how many rows to reconstruct at most; 1: the update is of a single row.
        iterations: of the attack by optimisation.
    """

    params: Params
    low: Floats
    high: Floats
    rows: int
    iterations: int
    seed: int


@dataclass(frozen=True)
class Found:
    """What the attacker has found.

    Attributes:
        labels: class of each sought row, most likely first; empty if the update does not show it.
        rows: reconstructions [n, …].
        tokens: how far the embedding of each token has moved, float32 [vocab].
    """

    method: Method
    labels: list[int]
    rows: Floats | None = None
    tokens: Floats | None = None


def invert(spec: ModelSpec, known: Known, delta: Params) -> Found:
    """Rows or tokens behind an update. `delta`: trained minus received params, of the tensors that are sent."""
    seen = layers.inspect(spec)
    labels = (
        recover_labels(delta.get(seen.last_bias or ""), known.rows) if spec.task == "classification" else []
    )
    embedding = None if seen.embedding is None else delta.get(seen.embedding)
    if embedding is not None:
        moved = np.sqrt(np.square(embedding, dtype=np.float64).sum(axis=1))
        return Found("embedding", labels, tokens=moved.astype(np.float32))
    if seen.first_dense is not None and all(
        f"{seen.first_dense}.{name}" in delta for name in ("weight", "bias")
    ):
        weight, bias = (delta[f"{seen.first_dense}.{name}"] for name in ("weight", "bias"))
        flat = inputs_of_dense(weight, bias, known.rows)
        rows = np.clip(flat.reshape(-1, *spec.input_shape), known.low, known.high)
        return Found("analytic", labels, rows=rows.astype(np.float32))
    return Found("matching", labels, rows=matching.match(spec, known, delta, labels))


def inputs_of_dense(weight: Floats, bias: Floats, rows: int) -> Floats:
    """Inputs of a dense layer from the gradients of its weight [out, in] and bias [out], up to a common factor; float32 [<= rows, in].

    Neuron i has ∂L/∂W_i = Σ_b g_bi x_b and ∂L/∂b_i = Σ_b g_bi, so of a single input x each neuron gives x = ∂L/∂W_i / ∂L/∂b_i exactly. Here
    all of them do, by least squares. Of more inputs each neuron gives a mean of them, weighted by g_bi; those whose bias has moved most are
    taken. Phong 2018, section 3; Geiping 2020, proposition 3.1.
    """
    wide, moved = weight.astype(np.float64), bias.astype(np.float64)
    if rows == 1:
        return np.asarray((moved @ wide / max(float(moved @ moved), 1e-300))[None], np.float32)
    chosen = np.argsort(-np.abs(moved), kind="stable")[:rows]
    chosen = chosen[np.abs(moved[chosen]) > 1e-12]
    return np.asarray(wide[chosen] / moved[chosen, None], np.float32)


def recover_labels(bias: Floats | None, rows: int) -> list[int]:
    """Classes of the rows behind an update, the most likely first. `bias`: movement of the bias of the layer that makes logits.

    Of cross-entropy its gradient is p - y, summed over the rows: negative only for classes that occur. Of a single row that is its class
    (Zhao 2020, iDLG); of more, classes are dealt out in proportion.
    """
    if bias is None:
        return []
    risen = np.maximum(bias.astype(np.float64), 0.0)
    if rows == 1 or not risen.any():
        return [int(np.argmax(bias))]
    shares, counts = risen / risen.sum() * rows, np.zeros(len(risen), np.int64)
    for _ in range(rows):
        counts[np.argmax(shares - counts)] += 1
    order = np.argsort(-counts, kind="stable")
    return np.repeat(order, counts[order]).tolist()
