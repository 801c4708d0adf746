"""The figures of a model before and after every step: parameters, MACs, bytes, latency, accuracy.

Files run on LiteRT with one thread and XNNPACK, a row at a time, as on a device. Latencies are medians of interleaved runs,
so that a busy machine slows all models alike; only those of one measurement are comparable. Workers measure without AMX tiles,
which devices do not have (`models.compress.amx`).
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from operator import le
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
from edge_client.infer.runtime import dequantize, quantize
from edge_client.train.evaluation import score
from models.compress.step import StepModel
from models.pretrain import evaluation
from models.pretrain.params import params_of
from models.tasks import of_figures
from models.zoo.spec import ModelSpec

CPU = torch.device("cpu")
_BLOCK = 8
"""Counted runs of one model before the next one's; an uncounted run before them warms the caches."""


def measure(
    model: StepModel, x: npt.NDArray[Any], y: npt.NDArray[Any], float32: bytes | None = None
) -> dict[str, Any]:
    """All figures but the latency, on test rows. `float32`: the `.tflite` of a model that has none of its own yet.

    Returns:
        accuracy: of the file if there is one, otherwise of the module; over the test labels that count. Of a model that
            predicts a quantity None, and r2 in its place.
        parameters: of the module; nonzero: of these.
        macs: multiply-accumulates of one row.
        bytes: of the `.tflite`, of the packed params, of a float model's float32 `.tflite`, or of the params if devices cannot run it.
        compressed_bytes: of the same after zlib, as in transport.
        precision: of the model.
    """
    content = model.tflite or model.packed or float32 or safetensors.numpy.save(params_of(model.module))
    scored = score(logits(model.tflite or model.module, x), y)
    return {
        "accuracy": None,
        scored.quality_name: scored.quality,
        "parameters": parameters(model.module),
        "nonzero": nonzero(model.module),
        "macs": macs(model.module, model.spec),
        "bytes": len(content),
        "compressed_bytes": len(zlib.compress(content, 9)),
        "precision": model.precision,
    }


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
    # the counter knows neither fused attention, which gradients disable, nor oneDNN's LSTM
    with warnings.catch_warnings(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        warnings.simplefilter("ignore")  # about TF32, when oneDNN is turned off
        with torch.backends.mkldnn.flags(enabled=False):
            trained(x)
    return int(counter.get_total_flops()) // 2


def quality(model: nn.Module | bytes, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> float:
    """The accuracy of a module, or of a `.tflite` on LiteRT; of quantities R2."""
    return score(logits(model, x), y).quality


def logits(model: nn.Module | bytes, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Logits [N, (T,) classes], dequantized if the file's output is quantized."""
    if isinstance(model, nn.Module):
        answer: npt.NDArray[np.float32] = evaluation.logits_of(model, x, CPU).numpy()
        return answer
    runner = Runner(model)
    return np.concatenate([runner(row[None]) for row in x])


class Runner:
    """A `.tflite` in LiteRT, one thread, a row at a time: x [1, …] -> logits [1, (T,) classes], float32."""

    def __init__(self, content: bytes) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self._interpreter = Interpreter(model_content=content, num_threads=1)
        self._interpreter.allocate_tensors()
        (self.input,) = self._interpreter.get_input_details()
        (self.output,) = self._interpreter.get_output_details()

    def __call__(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        self.feed(x)
        self.invoke()
        return dequantize(self._interpreter.get_tensor(self.output["index"]), self.output)

    def feed(self, x: npt.NDArray[Any]) -> None:
        self._interpreter.set_tensor(self.input["index"], quantize(x, self.input))

    def invoke(self) -> None:
        self._interpreter.invoke()


def latency(files: Mapping[str, bytes], x: npt.NDArray[Any], turns: int = 20) -> dict[str, float]:
    """Median microseconds of each `.tflite` for one row of `x`, measured in turns, one thread."""
    row = np.ascontiguousarray(x[:1])
    runners = {name: Runner(content) for name, content in files.items()}
    microseconds: dict[str, list[float]] = {name: [] for name in runners}
    for runner in runners.values():
        runner.feed(row)
    for _ in range(turns):
        for name, runner in runners.items():
            runner.invoke()
            for _ in range(_BLOCK):
                started = time.perf_counter()
                runner.invoke()
                microseconds[name].append((time.perf_counter() - started) * 1e6)
    return {name: statistics.median(values) for name, values in microseconds.items()}


def pareto_front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of the Pareto-optimal points, whose numbers are costs: no other one is at most as high in all and lower in one."""
    return [
        index
        for index, one in enumerate(points)
        if not any(other != one and all(map(le, other, one)) for other in points)
    ]


def plot(rows: Iterable[Mapping[str, Any]], path: Path, test_rows: int) -> None:
    """Accuracy against bytes, latency and memory, with their Pareto fronts, as a PNG.

    Args:
        rows: `name`, the figures of `measure` and `latency_us`; `memory_bytes` if measured. Points are labelled with a row's `step`, as in
            the table; rows without one count from 1.
        test_rows: number of rows that accuracies are measured on.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    listed = list(rows)
    numbers = [row.get("step", index) for index, row in enumerate(listed, 1)]
    name = of_figures(listed[0] if listed else {}).title
    panels = [("bytes", "size (KB)", 1e-3), ("latency_us", "latency of a row (µs)", 1.0)]
    if any("memory_bytes" in row for row in listed):
        panels.append(("memory_bytes", "memory (KB)", 1e-3))
    figure = Figure(figsize=(5 * len(panels) + 2, max(4.5, 0.2 * len(listed))), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, label, unit) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        shown = [
            (number, row) for number, row in zip(numbers, listed, strict=True) if row.get(key) is not None
        ]
        points = [(row[key] * unit, worth(row)) for _, row in shown]
        for (number, _), point in zip(shown, points, strict=True):
            axes.plot(*point, "o", color="tab:blue")
            if point not in points[: [each for each, _ in shown].index(number)]:
                same = [str(each) for (each, _), other in zip(shown, points, strict=True) if other == point]
                axes.annotate(",".join(same), point, textcoords="offset points", xytext=(4, 4), fontsize=8)
        best = sorted(points[index] for index in pareto_front([(cost, -worth) for cost, worth in points]))
        axes.plot(
            [cost for cost, _ in best],
            [worth for _, worth in best],
            drawstyle="steps-post",
            color="tab:orange",
            zorder=0,
        )
        axes.set(xlabel=label, ylabel=f"{name} on {test_rows} rows")
        axes.margins(0.12, 0.1)  # room for numbers beside the outermost points
        if points:
            axes.set_xscale("log")
            costs = [cost for cost, _ in points]
            narrow = max(costs) < 4 * min(costs)  # decades would give at most one label
            axes.xaxis.set_major_locator(MaxNLocator(5) if narrow else LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    names = "\n".join(f"{number}  {_label(row)}" for number, row in zip(numbers, listed, strict=True))
    figure.legend([Line2D([], [], ls="")], [names], loc="outside right upper", handlelength=0, fontsize=8)
    make_durably(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def worth(row: Mapping[str, Any]) -> float:
    """The accuracy in a row's figures, or R2."""
    return float(row[of_figures(row).figure])


def _label(row: Mapping[str, Any]) -> str:
    """The label of a step, as in the table: its kind with its precision or model; of a candidate its name."""
    if "kind" not in row:
        return str(row["name"])
    return f"{row['kind']} ({row['model'] if row['precision'] == 'float32' else row['precision']})"
