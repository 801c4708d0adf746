"""The pipelines that a search tries, from the smallest change to the smallest model.

Float32, dynamic and static int8, with BatchNorm folded; a quarter, half, three quarters of the channels pruned; students of half and a
quarter of the width, with and without pruned channels. Single steps have no bound on accuracy: the search has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from models import catalog
from models.compress import distil
from models.compress.step import StepRefused
from models.zoo.spec import ModelSpec

Table = Mapping[str, Any]

RATIOS = (0.25, 0.5, 0.75)
_WIDTHS = ("width", "channels", "hidden")
_SHORTER = 5
"""Divides the epochs on the first rung."""
_UNBOUNDED = {"max_accuracy_drop": 1.0}
_FOLD: Table = {"kind": "fold", "show_operators": False}
_STATIC: Table = {"kind": "quantize", "precision": "static-int8", **_UNBOUNDED}
_FOLDED = (_FOLD, _STATIC)


@dataclass(frozen=True)
class Candidate:
    """One pipeline. `steps`: its tables, as in a pipeline's file."""

    name: str
    steps: tuple[Table, ...]

    @property
    def trains(self) -> bool:
        return any("epochs" in step for step in self.steps)

    def short(self) -> tuple[Table, ...]:
        """The same steps with few epochs."""
        return tuple(
            {**step, "epochs": max(1, step["epochs"] // _SHORTER)} if "epochs" in step else step
            for step in self.steps
        )


def ladder(
    spec: ModelSpec, student: str | None = None, sets: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Candidate]:
    """Candidates for a model of `spec`.

    Args:
        student: model to distil into; without one, the model's own architecture with smaller width.
        sets: kind of a step -> options that override those of all steps of that kind.
    """
    candidates = [*_same_architecture(spec), *_students(spec, student)]
    return [
        Candidate(each.name, tuple({**step, **(sets or {}).get(step["kind"], {})} for step in each.steps))
        for each in candidates
    ]


def _same_architecture(spec: ModelSpec) -> Iterator[Candidate]:
    entry = catalog.MODELS.get(spec.name)
    if entry is not None and "litert" not in entry.runtimes:
        return  # devices cannot run it in any precision
    yield Candidate("float32", ({"kind": "quantize", "precision": "float32", **_UNBOUNDED},))
    yield Candidate("dynamic-int8", ({"kind": "quantize", "precision": "dynamic-int8", **_UNBOUNDED},))
    yield Candidate("static-int8", (_STATIC,))
    yield Candidate("fold", _FOLDED)
    for ratio in RATIOS:
        yield Candidate(f"structured-{100 * ratio:.0f}", (_structured(ratio), *_FOLDED))


def _students(spec: ModelSpec, student: str | None) -> Iterator[Candidate]:
    students = {}
    if student is not None:
        students["distil"] = student
        spec = distil.parse_model(student, spec)
    for name, part in (("distil-half", 2), ("distil-quarter", 4)):
        if (smaller := narrower(spec, part)) is not None and smaller not in students.values():
            students[name] = smaller
    for name, text in students.items():
        distilled = {"kind": "distil", "student": text, "epochs": 15, "lr": 4e-3}
        yield Candidate(name, (distilled, *_FOLDED))
        if text == next(iter(students.values())):
            yield Candidate(f"{name}-structured-50", (distilled, _structured(0.5), *_FOLDED))


def _structured(ratio: float) -> Table:
    return {"kind": "structured", "ratio": ratio, "rounds": 2, "epochs": 5}


def narrower(spec: ModelSpec, part: int) -> str | None:
    """The same architecture with its widths divided by `part`, as the option of a `distil`; None if that is impossible."""
    entry = catalog.MODELS.get(spec.name)
    if entry is None:
        return None
    current = {**entry.options().model_dump(), **spec.options}
    smaller = {key: _divided(current[key], part) for key in _WIDTHS if current.get(key)}
    if not smaller:
        return None
    options = {**spec.options, **smaller}
    text = f"{spec.name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
    try:
        entry.options.model_validate(options)
        distil.parse_model(text, spec)
    except (ValueError, StepRefused):
        return None  # too narrow for its heads or norms
    return text


def _divided(width: int | list[int], part: int) -> int | list[int]:
    if isinstance(width, list):
        return [max(1, one // part) for one in width]
    return max(1, width // part)
