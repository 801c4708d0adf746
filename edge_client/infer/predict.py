"""Predictions of the model that a device has: which release it runs, and what it says of rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.errors import UserMistake
from edge_client.infer.runtime import Loaded
from edge_client.wire.strict import printable

RELEASES, POINTER = "releases", "pointer.json"


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
    """The folder of the release that this device runs now. `model`: needed where it has several.

    Raises:
        NoRelease: none was installed yet, or the one that was does not run any more.
        UserMistake: it has several and none is named.
    """
    root = state_dir / RELEASES
    models = sorted(path.parent.name for path in root.glob(f"*/{POINTER}"))
    if model is None and len(models) == 1:
        model = models[0]
    if model is None or model not in models:
        what = f"no release of {model!r}" if model else ("several models" if models else "no release")
        hint = f"name one with --model: {', '.join(models)}" if models else "none was installed yet"
        refusal = UserMistake if models else NoRelease
        raise refusal(f"{root}: this device has {what}; {hint}, or give a folder with --release")
    path = root / model / POINTER
    try:
        pointer = json.loads(path.read_bytes())
        active, last = pointer["active"], pointer.get("last")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserMistake(f"{path}: cannot be read ({error!r}); `fedloop-edge run` repairs it") from None
    if active not in ("a", "b"):
        raise NoRelease(f"{path}: no slot is active; {_why_none(model, last)}")
    return root / model / str(active)


def _why_none(model: str, last: Any) -> str:
    """Why no version of the model runs. `last`: the report that the pointer has of it."""
    if isinstance(last, dict) and last.get("standing") in ("rolled_back", "failed"):
        words = printable(str(last.get("words")), 300)
        return f"{model}:{last.get('version')} does not run here, and there is no other version: {words}"
    return f"no release of {model} was installed yet"


def predictions(loaded: Loaded, x: npt.NDArray[Any]) -> list[Prediction]:
    """One for each row. Raises WrongRows where they are not what the model takes."""
    logits = loaded.predict(x).astype(np.float64)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    labels, best = logits.argmax(-1), shares.max(-1)
    return [
        Prediction(label.tolist(), probability.tolist())
        for label, probability in zip(labels, best, strict=True)
    ]
