"""Which files pass the list of operations, tried on forged ones."""

from __future__ import annotations

from typing import Any

import flatbuffers
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from models.conversion.operators import (
    ALLOWED,
    ForeignOperator,
    minimum_runtime,
    operators,
)

BUILTIN = schema.BuiltinOperator


def test_builtin_operations_are_listed_with_version_and_count() -> None:
    content = forged((BUILTIN.ADD, 1, None), (BUILTIN.FULLY_CONNECTED, 5, None), (BUILTIN.ADD, 2, None))

    listed = [(found.name, found.version, found.count) for found in operators(content)]

    assert listed == [("ADD", 2, 2), ("FULLY_CONNECTED", 5, 1)]


def test_a_flex_operation_is_refused_by_name() -> None:
    with pytest.raises(ForeignOperator, match=r"FlexConv2DBackpropFilter is a Flex operation"):
        operators(forged((BUILTIN.ADD, 1, None), (BUILTIN.CUSTOM, 1, "FlexConv2DBackpropFilter")))


def test_a_custom_operation_is_refused_by_name() -> None:
    with pytest.raises(ForeignOperator, match=r"MyKernel is a custom operation"):
        operators(forged((BUILTIN.CUSTOM, 1, "MyKernel")))


def test_an_operation_outside_the_list_is_refused_by_name() -> None:
    with pytest.raises(ForeignOperator, match=r"STABLEHLO_SCATTER is not among"):
        operators(forged((BUILTIN.STABLEHLO_SCATTER, 1, None)))


def test_an_operation_that_the_schema_does_not_know_is_refused_by_number() -> None:
    with pytest.raises(ForeignOperator, match=r"builtin 9999 is not among"):
        operators(forged((9999, 1, None)))


def test_a_version_newer_than_listed_is_refused() -> None:
    newest = ALLOWED["CONV_2D"]
    assert operators(forged((BUILTIN.CONV_2D, newest, None)))
    with pytest.raises(ForeignOperator, match=rf"CONV_2D version {newest + 1} is newer than {newest}"):
        operators(forged((BUILTIN.CONV_2D, newest + 1, None)))


@pytest.mark.parametrize(
    ("axes", "complaint"), [([1, 2], "over 2 axes"), (None, "over axes known only at run time")]
)
def test_reverse_over_anything_but_one_constant_axis_is_refused(
    axes: list[int] | None, complaint: str
) -> None:
    assert operators(forged((BUILTIN.REVERSE_V2, 1, None), axes=[2]))[0].name == "REVERSE_V2"
    with pytest.raises(ForeignOperator, match=f"REVERSE_V2 {complaint}"):
        operators(forged((BUILTIN.REVERSE_V2, 1, None), axes=axes))


def test_the_listed_names_are_the_schemas() -> None:
    assert set(ALLOWED) <= {name for name, code in vars(BUILTIN).items() if isinstance(code, int)}


def test_a_file_without_a_note_of_its_runtime_says_unknown() -> None:
    assert minimum_runtime(forged((BUILTIN.ADD, 1, None))) == "unknown"


def forged(*operations: tuple[int, int, str | None], axes: list[int] | None = None) -> bytes:
    """A file of these (builtin code, version, custom name), each with two inputs; the second holds `axes`."""
    model: Any = schema.ModelT()
    model.version = 3
    model.buffers = [schema.BufferT(), schema.BufferT()]
    if axes is not None:
        model.buffers[1].data = np.frombuffer(np.asarray(axes, np.int32).tobytes(), np.uint8)
    graph: Any = schema.SubGraphT()
    graph.tensors = [schema.TensorT(), schema.TensorT()]
    graph.tensors[1].buffer, graph.tensors[1].shape = 1, [len(axes or [])]
    graph.inputs, graph.outputs, graph.operators = [0], [0], []
    model.operatorCodes = []
    for position, (code, version, custom) in enumerate(operations):
        entry: Any = schema.OperatorCodeT()
        entry.builtinCode, entry.deprecatedBuiltinCode, entry.version = code, min(code, 127), version
        entry.customCode = custom
        model.operatorCodes.append(entry)
        node: Any = schema.OperatorT()
        node.opcodeIndex, node.inputs, node.outputs = position, [0, 1], [0]
        graph.operators.append(node)
    model.subgraphs = [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
