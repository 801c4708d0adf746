"""Channels out, then single weights to zero: three quarters of the parameters go and accuracy stays, up to the file."""

from __future__ import annotations

import numpy as np
import pytest

from models.compress import pipeline, report
from models.compress.graph import FoldOptions, fold
from models.compress.quantization.quantize import to_tflite
from models.compress.step import StepModel
from models.conversion import flatbuffer
from tests.bench.compression_recipes import SPARSE_DIGITS
from tests.support.compression import accuracy, context, digits, trained

pytestmark = pytest.mark.slow


@pytest.mark.extended
def test_three_quarters_of_the_parameters_go_within_a_point_and_stay_gone_in_the_file() -> None:
    data = digits()
    dense = trained("resnet8", data, epochs=8, norm="batch", width=8)
    model = dense
    for step in pipeline.plan_steps(SPARSE_DIGITS, "SPARSE_DIGITS"):
        model = step.function(model, data, step.options, context(dense))
    sparse = model
    assert report.nonzero(sparse.module) <= 0.25 * report.parameters(dense.module)
    assert accuracy(sparse, data) >= accuracy(dense, data) - 0.01

    folded = fold(sparse, data, FoldOptions(show_operators=False), context(dense))
    tflite = to_tflite(folded.module, folded.spec)
    assert (
        np.abs(report.logits(tflite, data.x_test[:20]) - report.logits(sparse.module, data.x_test[:20])).max()
        < 1e-4
    )
    assert zeros_of_file(tflite) >= zeros_of_module(sparse)


def zeros_of_module(model: StepModel) -> int:
    return sum(int((p == 0).sum()) for p in model.module.parameters() if p.ndim >= 2)


def zeros_of_file(tflite: bytes) -> int:
    """Zeros among the float32 weights of two or more axes."""
    content = flatbuffer.read(tflite)
    return sum(
        int((np.frombuffer(bytes(content.buffers[tensor.buffer].data), np.float32) == 0).sum())
        for graph in content.subgraphs
        for tensor in graph.tensors
        if content.buffers[tensor.buffer].data is not None and len(tensor.shape) >= 2 and tensor.type == 0
    )
