"""Attacks on the data of simulated clients, and how well they succeed.

`label_flip`: every label y of a malicious client becomes the last class less y. `backdoor`: a share of its rows bears a trigger
and the label of the target class. Gu 2017 (BadNets), section 4; Bagdasaryan 2020.

The trigger is a bright square in the last corner of an image, and of other rows the last twentieth of their numbers, at the
greatest value of the training rows.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.errors import UserError
from coordinator.rounds.plan import generator
from coordinator.workers.workspace_arrays import Workspace, open_workspace
from edge_client.files import write_durably
from models.datasets.large_arrays import LARGE_BYTES

DATA_ATTACKS = ("label_flip", "backdoor")
_CLEAN = "clean_labels.npy"
"""The labels before an attack, so that an attack which was interrupted starts from them."""


def choose(clients: int, malicious: int, seed: int) -> list[int]:
    """Indices of the malicious clients, ascending."""
    return sorted(generator(seed, "attack").permutation(clients)[:malicious].tolist())


def poison(request: Mapping[str, Any]) -> dict[str, Any]:
    """Changes the rows of malicious clients in the workspace `folder`; doing it again changes nothing more.

    `request`: folder, seed, classes, parts (indices of the clients) and attack (name, target and share).

    Raises:
        UserError: the attack is not for such data.
    """
    folder, attack = Path(request["folder"]), request["attack"]
    data = open_workspace(folder)
    if data.y.ndim != 1 or data.y.dtype.kind not in "iu":
        raise UserError(f"simulation.attack: {attack['name']} needs rows that each have one class")
    if not (folder / _CLEAN).exists():
        _save(folder / _CLEAN, np.array(data.y))
    labels = np.load(folder / _CLEAN, allow_pickle=False)
    rows = np.concatenate([data.part(index) for index in request["parts"]])
    if attack["name"] == "label_flip":
        rows = rows[labels[rows] >= 0]  # a row without a label stays one
        labels[rows] = request["classes"] - 1 - labels[rows]
    else:
        if data.x.dtype.kind != "f" or data.x.nbytes >= LARGE_BYTES:
            raise UserError(
                "simulation.attack: a backdoor needs rows of numbers that fit into memory; take another attack"
            )
        drawn = generator(request["seed"], "backdoor").permutation(rows)
        rows = drawn[: round(attack["share"] * len(rows))]
        x = np.array(data.x)
        x[rows] = add_trigger(x[rows], _brightest(data))
        labels[rows] = attack["target"]
        _save(folder / "x.npy", x)
    _save(folder / "y.npy", labels)
    return {}


def attacked_rows(data: Workspace, attack: Mapping[str, Any], classes: int) -> tuple[Any, Any]:
    """Held-out rows as an attacker would ask for them, and the class that it wants for each."""
    x, y = data.x[data.test_rows], data.y[data.test_rows]
    if attack["name"] == "label_flip":
        changed = (y >= 0) & (y != classes - 1 - y)
        return x[changed], (classes - 1 - y)[changed]
    others = (y >= 0) & (y != attack["target"])
    return add_trigger(x[others], _brightest(data)), np.full(int(others.sum()), attack["target"], y.dtype)


def add_trigger(x: npt.NDArray[Any], value: float) -> npt.NDArray[Any]:
    """Copies of rows [N, …] that bear the trigger."""
    marked = x.copy()
    if marked.ndim >= 3:  # images [N, H, W] or [N, H, W, C]
        side = max(1, min(marked.shape[1:3]) // 4)
        marked[:, -side:, -side:] = value
    else:
        marked[:, -max(1, marked.shape[1] // 20) :] = value
    return marked


def _brightest(data: Workspace) -> float:
    """The greatest value of the training rows; the trigger itself does not exceed it."""
    return float(data.x[data.parts].max())


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_durably(path, content.getvalue())
