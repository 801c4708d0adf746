"""A round over updates on disk needs the same little memory whatever the model's size."""

from __future__ import annotations

import pytest

from tests.bench.round_memory import measured
from tests.support.long import extended

MODEL_BYTES = 48_000_000


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fedadam, 1 tensor", *extended("fedavg clipped, 25 tensors")])
def test_a_round_over_updates_on_disk_holds_no_model_in_memory(case: str) -> None:
    """Eight updates are checked, folded and committed; one tensor in float64 alone would be twice the model."""
    assert measured(case, MODEL_BYTES)["peak"] < MODEL_BYTES
