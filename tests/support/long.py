"""Long editions of tests, and the tests marked `extended`: `make test-long` runs them."""

from __future__ import annotations

import os
from typing import Any

import pytest

LONG = bool(os.environ.get("FEDLOOP_TEST_LONG"))


def extended(*cases: Any) -> list[Any]:
    """Further cases for `pytest.mark.parametrize`, which `make test-long` runs. A tuple has one value for each argument."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.extended)
        for case in cases
    ]
