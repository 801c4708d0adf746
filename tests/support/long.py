"""Long editions of tests, and the tests marked `extended`: `make test-long` runs them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

import pytest

LONG = bool(os.environ.get("FEDLOOP_TEST_LONG"))


def extended(*cases: Any) -> list[Any]:
    """Further cases for `pytest.mark.parametrize`, which `make test-long` runs. A tuple has one value for each argument."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.extended)
        for case in cases
    ]


def pairs_of(*axes: Mapping[str, Any]) -> list[Any]:
    """All combinations of values by name, for `pytest.mark.parametrize`. `make test` runs those that have each pair of values of the
    first axes once, by turns with all values of the last; `make test-long` runs the others."""
    turns = max(len(axis) for axis in axes)
    made = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        chosen = [list(axis.items())[place] for axis, place in zip(axes, places, strict=True)]
        marks = () if sum(places) % turns == 0 else (pytest.mark.extended,)
        made.append(
            pytest.param(
                *(value for _, value in chosen), marks=marks, id="-".join(name for name, _ in chosen)
            )
        )
    return made
