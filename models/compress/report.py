"""What a model costs and what it is worth, before and after every step: parameters, MACs, bytes, latency, accuracy.

Files run on LiteRT with one thread and XNNPACK, a row at a time, as a device would. Latencies are medians of runs taken in
turns, so that a busy machine slows all models alike; only those of one measurement compare. Workers measure without AMX tiles, which
devices do not have (`models.compress.tiles`).
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from edge_client.files import make_durably
from edge_client.infer.runtime import dequantized, quantized
from edge_client.train.trainer import score
from models.compress.step import Model
from models.pretrain import evaluation
from models.pretrain.params import params_of
from models.zoo.spec import ModelSpec

CPU = torch.device("cpu")
_BLOCK = 8
"""Runs of one model before it is the next one's turn; the first of them finds cold caches and is not counted."""


@dataclass(frozen=True)
class Figures:
    """One model in numbers.

    Attributes:
        accuracy: of the file where there is one, else of the module; over the labels of the test rows that count.
        parameters: of the module; nonzero: of these.
        macs: multiply-accumulates of one row.
        bytes: of the `.tflite`, of a float model's float32 one, or of the params where devices cannot run it.
        compressed_bytes: of the same through zlib: what transport costs.
        latency_us: of one row in LiteRT; None: not measured, or devices cannot run this model.
    """

    accuracy: float
    parameters: int
    nonzero: int
    macs: int
    bytes: int
    compressed_bytes: int
    precision: str
    latency_us: float | None = None

    def document(self) -> dict[str, Any]:
        return asdict(self)


def figures(
    model: Model, x: npt.NDArray[Any], y: npt.NDArray[np.int32], float32: bytes | None = None
) -> Figures:
    """All but the latency, on test rows. `float32`: the `.tflite` of a model that has none of its own yet."""
    content = model.tflite or float32 or safetensors.numpy.save(params_of(model.module))
    return Figures(
        accuracy(model.tflite or model.module, x, y),
        parameters(model.module),
        nonzero(model.module),
        macs(model.module, model.spec),
        len(content),
        len(zlib.compress(content, 9)),
        model.precision,
    )


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def nonzero(module: nn.Module) -> int:
    """Parameters that are not zero."""
    return sum(int(parameter.count_nonzero()) for parameter in module.parameters())


def macs(module: nn.Module, spec: ModelSpec) -> int:
    """Multiply-accumulates of one row in matrix products and convolutions, zeros included."""
    x, _ = spec.example_batch(1)
    counter = FlopCounterMode(display=False)
    trained = copy.deepcopy(module).requires_grad_(True)
    # the counter does not know fused attention, which is not used with gradients, nor oneDNN's LSTM
    with warnings.catch_warnings(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        warnings.simplefilter("ignore")  # of TF32, whenever oneDNN is turned off
        with torch.backends.mkldnn.flags(enabled=False):
            trained(x)
    return int(counter.get_total_flops()) // 2


def accuracy(model: nn.Module | bytes, x: npt.NDArray[Any], y: npt.NDArray[np.int32]) -> float:
    """Of a module, or of a `.tflite` on LiteRT."""
    return float(score(logits(model, x), y).accuracy)


def logits(model: nn.Module | bytes, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """[N, (T,) classes], dequantized where the file's output is not."""
    if isinstance(model, nn.Module):
        answer: npt.NDArray[np.float32] = evaluation.logits_of(model, x, CPU).numpy()
        return answer
    runner = Runner(model)
    return np.concatenate([runner(row[None]) for row in x])


class Runner:
    """A `.tflite` in LiteRT, one thread, that takes a row at a time: x [1, …] -> logits [1, (T,) classes], float32."""

    def __init__(self, content: bytes) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self._interpreter = Interpreter(model_content=content, num_threads=1)
        self._interpreter.allocate_tensors()
        (self.input,), (self.output,) = (
            self._interpreter.get_input_details(),
            self._interpreter.get_output_details(),
        )

    def __call__(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        self.feed(x)
        self.invoke()
        return dequantized(self._interpreter.get_tensor(self.output["index"]), self.output)

    def feed(self, x: npt.NDArray[Any]) -> None:
        self._interpreter.set_tensor(self.input["index"], quantized(x, self.input))

    def invoke(self) -> None:
        self._interpreter.invoke()


def latency(
    models: Mapping[str, nn.Module | bytes], x: npt.NDArray[Any], turns: int = 20
) -> dict[str, float]:
    """Median microseconds of one row of `x` by each of the models, taken in turns, one thread."""
    row = np.ascontiguousarray(x[:1])
    ways = {name: _way(model, row) for name, model in models.items()}
    microseconds: dict[str, list[float]] = {name: [] for name in ways}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(turns):
            for name, way in ways.items():
                way()
                for _ in range(_BLOCK):
                    began = time.perf_counter()
                    way()
                    microseconds[name].append((time.perf_counter() - began) * 1e6)
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(values) for name, values in microseconds.items()}


def _way(model: nn.Module | bytes, row: npt.NDArray[Any]) -> Callable[[], object]:
    if isinstance(model, bytes):
        runner = Runner(model)
        runner.feed(row)
        return runner.invoke
    x, module = torch.from_numpy(row), model.eval()

    def way() -> None:
        with torch.inference_mode():
            module(x)

    return way


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points (cost, worth) that no other one beats in both, by rising cost."""
    best, chosen = -np.inf, []
    for place in sorted(range(len(points)), key=lambda place: (points[place][0], -points[place][1])):
        if points[place][1] > best:
            best = points[place][1]
            chosen.append(place)
    return chosen


def plot(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Accuracy against bytes, latency and memory, with their Pareto fronts, as a PNG.

    Args:
        rows: `name` and the keys of `Figures`; `memory_bytes` where it was measured. Points bear a row's number, from 1.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    listed = list(rows)
    panels = [("bytes", "size (KB)", 1e-3), ("latency_us", "latency of a row (µs)", 1.0)]
    if any("memory_bytes" in row for row in listed):
        panels.append(("memory_bytes", "memory (KB)", 1e-3))
    figure = Figure(figsize=(5 * len(panels) + 2, max(4.5, 0.2 * len(listed))), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, label, unit) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        shown = [(number, row) for number, row in enumerate(listed, 1) if row.get(key) is not None]
        points = [(row[key] * unit, row["accuracy"]) for _, row in shown]
        for (number, _), point in zip(shown, points, strict=True):
            axes.plot(*point, "o", color="tab:blue")
            if point not in points[: [each for each, _ in shown].index(number)]:
                alike = [str(each) for (each, _), other in zip(shown, points, strict=True) if other == point]
                axes.annotate(",".join(alike), point, textcoords="offset points", xytext=(4, 4), fontsize=8)
        best = [points[place] for place in front(points)]
        axes.plot(
            [cost for cost, _ in best],
            [worth for _, worth in best],
            drawstyle="steps-post",
            color="tab:orange",
            zorder=0,
        )
        axes.set(xlabel=label, ylabel="accuracy")
        if points:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    names = "\n".join(f"{number}  {row['name']}" for number, row in enumerate(listed, 1))
    figure.legend([Line2D([], [], ls="")], [names], loc="outside right upper", handlelength=0, fontsize=8)
    make_durably(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
