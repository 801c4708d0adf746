"""A file for one row takes many once its batch is open, and stays as it is where that would break it."""

from __future__ import annotations

from collections.abc import Sequence

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from models.conversion.batching import make_resizable

RESHAPE, BROADCAST = schema.BuiltinOperator.RESHAPE, schema.BuiltinOperator.BROADCAST_TO


def test_an_open_batch_takes_many_rows_also_where_two_reshapes_share_a_shape() -> None:
    opened = make_resizable(chain([RESHAPE, RESHAPE]))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(answer(opened, x), x)


def test_a_shape_that_another_operation_reads_stays() -> None:
    tflite = chain([RESHAPE, BROADCAST])
    assert make_resizable(tflite) == tflite
    np.testing.assert_array_equal(answer(tflite, np.ones((1, 4), np.float32)), np.ones((1, 4)))


def test_an_old_file_with_its_shape_among_the_options_stays() -> None:
    tflite = chain([RESHAPE], shapes=False)
    assert make_resizable(tflite) == tflite


def chain(kinds: Sequence[int], shapes: bool = True) -> bytes:
    """x[1, 4] through operations that all have the one constant shape [1, 4]. `shapes`: as an input."""
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.description = 3, b""
    model.buffers = [schema.BufferT(), schema.BufferT()]
    model.buffers[1].data = np.frombuffer(np.array([1, 4], np.int32).tobytes(), np.uint8)
    model.operatorCodes, graph.operators = [], []
    graph.tensors = [tensor(b"shape", [2], schema.TensorType.INT32, 1)]
    graph.tensors += [tensor(b"h%d" % place, [1, 4]) for place in range(len(kinds) + 1)]
    for place, kind in enumerate(kinds):
        code, node = schema.OperatorCodeT(), schema.OperatorT()
        code.builtinCode = kind
        code.deprecatedBuiltinCode = min(kind, 127)
        code.version = 2 if kind == BROADCAST else 1
        model.operatorCodes.append(code)
        node.opcodeIndex = place
        node.inputs = np.array([1 + place, 0] if shapes else [1 + place], np.int32)
        node.outputs = np.array([2 + place], np.int32)
        if kind == RESHAPE:
            node.builtinOptionsType = schema.BuiltinOptions.ReshapeOptions
            node.builtinOptions = schema.ReshapeOptionsT()
            node.builtinOptions.newShape = np.array([1, 4], np.int32)
        graph.operators.append(node)
    graph.inputs, graph.outputs = np.array([1], np.int32), np.array([1 + len(kinds)], np.int32)
    model.subgraphs = [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def tensor(
    name: bytes, shape: Sequence[int], kind: int = schema.TensorType.FLOAT32, buffer: int = 0
) -> schema.TensorT:
    made = schema.TensorT()
    made.name, made.shape, made.type, made.buffer = name, np.array(shape, np.int32), kind, buffer
    return made


def answer(tflite: bytes, x: np.ndarray) -> np.ndarray:
    interpreter = Interpreter(model_content=tflite, num_threads=1)
    (source,), (target,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(source["index"], x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(source["index"], x)
    interpreter.invoke()
    found: np.ndarray = interpreter.get_tensor(target["index"])
    return found
