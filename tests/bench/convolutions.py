"""How fast a simulation of the CNN could be at most: the convolutions of its step alone against a plain loop's step, in CPU time of a core.

The convolutions are those of `plain_loop.build_cnn` on a batch: forwards, and the gradients by both weights and by the second
one's input, as PyTorch's kernels compute them. Whatever else an engine spares, it takes these. Measured in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tests.bench.plain_loop import BATCH, CLIENTS, SAMPLES, WORKLOADS, PlainLoop

REPEATS, STEPS = 7, 100
_NAME = "CNN, 62,006 params"


def run() -> dict[str, Any]:
    """Milliseconds of a step by what takes it, and the share of the convolutions; medians."""
    torch.set_num_threads(1)
    loop = PlainLoop(WORKLOADS[_NAME])
    ways = {
        "contiguous": _convolutions(torch.contiguous_format),
        "channels last": _convolutions(torch.channels_last),
    }
    steps = CLIENTS * -(-SAMPLES // BATCH)
    times: dict[str, list[float]] = {name: [] for name in (*ways, "plain loop")}
    for _ in range(REPEATS):
        times["plain loop"].append(_cpu_seconds(loop.train_round) / steps)
        for name, way in ways.items():
            times[name].append(_cpu_seconds(lambda way=way: [way() for _ in range(STEPS)]) / STEPS)  # type: ignore[misc]
    found: dict[str, Any] = {f"{name}_ms": 1000 * statistics.median(values) for name, values in times.items()}
    found["most_times_the_loop"] = found["plain loop_ms"] / min(found[f"{name}_ms"] for name in ways)
    print(
        f"convolutions of a step: {found['contiguous_ms']:.2f} ms contiguous, {found['channels last_ms']:.2f} ms channels last; the "
        f"plain loop's step: {found['plain loop_ms']:.2f} ms; at most {found['most_times_the_loop']:.1f} times the loop on a core"
    )
    return found


def _convolutions(layout: torch.memory_format) -> Callable[[], None]:
    """Computes the convolutions of one step, in tensors of this layout."""

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).contiguous(memory_format=layout)

    images, first, outputs = make(BATCH, 3, 32, 32), make(6, 3, 5, 5), make(BATCH, 6, 28, 28)
    pooled, second, further = make(BATCH, 6, 14, 14), make(16, 6, 5, 5), make(BATCH, 16, 10, 10)
    biases = torch.zeros(6), torch.zeros(16)
    plain = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    backward: Any = torch.ops.aten.convolution_backward

    @torch.inference_mode()
    def compute() -> None:
        functional.conv2d(images, first, biases[0])
        functional.conv2d(pooled, second, biases[1])
        backward(further, pooled, second, [16], *plain, [True, True, True])
        backward(outputs, images, first, [6], *plain, [False, True, True])

    return compute


def _cpu_seconds(work: Callable[[], Any]) -> float:
    work()  # not measured
    began = time.process_time()
    work()
    return time.process_time() - began
