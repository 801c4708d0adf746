"""A grid of experiments: every combination of values of some keys, each with several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments.experiment import apply_settings, resolve, with_start
from coordinator.experiments.schema import Experiment

_LARGEST_SEED = 2**63 - 1
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "\"'"


@dataclass(frozen=True)
class Axis:
    """A key and its values, each written as for `--set`."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Combination:
    """One value of every axis, by key, and an experiment for each seed."""

    values: Mapping[str, str]
    experiments: tuple[Experiment, ...]

    @property
    def label(self) -> str:
        """`key=value key=value`; of a grid without axes `all defaults`."""
        return _label(self.values)


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """The axes that `--over KEY=VALUE,VALUE` names. Commas in brackets and quotes do not part values.

    Raises:
        UserError: one is not of this form, or names a key or a value twice.
    """
    axes: list[Axis] = []
    for text in texts:
        key, equals, rest = text.partition("=")
        axis = Axis(key.strip(), tuple(value.strip() for value in _split(rest, text)))
        if not equals or not axis.key or not all(axis.values):
            raise UserError(
                f"--over {text!r} is not of the form KEY=VALUE,VALUE, such as --over local.lr=0.02,0.05"
            )
        if axis.key == "seed":
            raise UserError(f"--over {text!r}: seeds are no axis of the table; give their number as --seeds")
        if any(axis.key == other.key for other in axes):
            raise UserError(f"--over {text!r}: {axis.key} has values already; give all of them in one --over")
        if len(set(axis.values)) < len(axis.values):
            raise UserError(f"--over {text!r}: a value is there twice")
        axes.append(axis)
    return axes


def expand(document: Mapping[str, Any], axes: Sequence[Axis], seeds: int, source: str) -> list[Combination]:
    """Every combination of the axes' values, with `seeds` seeds counted up from the experiment's own.

    Raises:
        UserError: an experiment of the grid is wrong, or two are the same; messages call the document `source`.
    """
    combinations: list[Combination] = []
    refused: dict[str, list[str]] = {}
    for chosen in product(*(axis.values for axis in axes)):
        values = dict(zip((axis.key for axis in axes), chosen, strict=True))
        settings = [f"{key}={value}" for key, value in values.items()]
        try:
            first = resolve(with_start(apply_settings(deepcopy(dict(document)), settings)), source)
        except UserError as error:
            refused.setdefault(str(error).removeprefix(f"{source}: "), []).append(_label(values))
            continue
        if first.seed + seeds - 1 > _LARGEST_SEED:
            raise UserError(f"{source}: seed = {first.seed} leaves no room for {seeds} seeds below 2^63")
        combinations.append(Combination(values, _seeded(first, seeds)))
    if refused:
        raise _refusal(refused, source, len(combinations))
    for index, later in enumerate(combinations):
        for earlier in combinations[:index]:
            if earlier.experiments == later.experiments:
                raise UserError(f"{source}: {earlier.label} and {later.label} are the same experiment")
    return combinations


def _seeded(first: Experiment, seeds: int) -> tuple[Experiment, ...]:
    """Copies with their seeds. Each has one worker unless the experiment says more: the grid's runs share the cores."""
    workers = first.simulation.workers or 1
    simulation = first.simulation.model_copy(update={"workers": workers})
    return tuple(
        first.model_copy(update={"seed": first.seed + index, "simulation": simulation})
        for index in range(seeds)
    )


def _refusal(refused: Mapping[str, Sequence[str]], source: str, good: int) -> UserError:
    """All problems, each with the combinations that have it, unless all have it."""
    if good == 0 and len(refused) == 1:
        return UserError(f"{source}: {next(iter(refused))}")
    return UserError("\n".join(f"{source}, with {'; '.join(who)}: {what}" for what, who in refused.items()))


def _label(values: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items()) or "all defaults"


def _split(text: str, whole: str) -> list[str]:
    """The parts between commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    if quote or depth:
        raise UserError(f"--over {whole!r}: a bracket or a quote has no partner")
    return parts
