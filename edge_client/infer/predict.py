"""Predictions of the model that a device has: which release it runs, and what it says of rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.errors import UserMistake
from edge_client.infer.runtime import Loaded, WrongRows
from edge_client.ota import slots
from edge_client.ota.slots import Pointer
from edge_client.wire.strict import printable


class NoRelease(UserMistake):
    """This device runs no release of the model."""


@dataclass(frozen=True)
class Prediction:
    """Of one row, or of each place of a sequence.

    Attributes:
        label: the class with the largest logit; probability: its softmax.
    """

    label: int | list[int]
    probability: float | list[float]


def active_release(state_dir: Path, model: str | None = None) -> Path:
    """The folder of the release that this device runs now. `model`: needed where it runs several.

    Raises:
        NoRelease: none was installed yet, or the one that was does not run any more.
        UserMistake: it runs several and none is named, or does not know the one that is.
    """
    pointers = {name: slots.read(state_dir, name) for name in slots.models(state_dir)}
    running = [name for name, pointer in pointers.items() if pointer.active is not None]
    choices = running or list(pointers)
    if model is None and len(choices) > 1:
        raise UserMistake(f"this device has several models; name one with --model: {', '.join(choices)}")
    chosen = model or next(iter(choices), None)
    if chosen is None:
        raise NoRelease(
            f"this device has no release yet, in {state_dir}; the daemon installs what it is told to run "
            "(fedloop-edge status); or give a folder with --release"
        )
    if chosen not in pointers:
        has = f"it has {', '.join(choices)}" if choices else "it has none yet"
        raise UserMistake(f"this device has no release of {chosen!r}; {has}; or give a folder with --release")
    pointer = pointers[chosen]
    if pointer.active is None:
        raise NoRelease(f"no version of {chosen} runs: {_why_none(pointer)}")
    return slots.slot_folder(state_dir, chosen, pointer.active)


def _why_none(pointer: Pointer) -> str:
    model, last = pointer.model, pointer.last
    if last is not None and last.standing in ("rolled_back", "failed"):
        words = printable(last.words, 300)
        return f"{model}:{last.version} does not run here, and there is no other version: {words}"
    return f"no release of {model} was installed yet"


def predictions(loaded: Loaded, x: npt.NDArray[Any]) -> list[Prediction]:
    """One for each row.

    Raises:
        WrongRows: they are not what the model takes, or so far from it that the answer is no number.
    """
    logits = loaded.predict(x).astype(np.float64)
    finite = np.isfinite(logits)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise WrongRows(f"row {row}: {loaded.manifest.model} answers with a number that is not finite")
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    labels, best = logits.argmax(-1), shares.max(-1)
    return [
        Prediction(label.tolist(), probability.tolist())
        for label, probability in zip(labels, best, strict=True)
    ]
