"""JSON of events: standard JSON, whatever numbers they hold."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator import json_values


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text(), inner)
            | st.dictionaries(st.text(), inner).map(MappingProxyType)
        ),
    )
)
def test_finite_values_have_the_same_text_without_a_copy(value: Any) -> None:
    assert json_values.dumps_finite(value) == json_values.dumps(json_values.finite(value))
