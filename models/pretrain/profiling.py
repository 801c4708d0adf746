"""Where the time of a training goes: a job's `profile`.

    "profile": {"folder": "profile", "start": 3, "steps": 5}

Every process records those steps with torch's profiler and writes `trace-rank0.json`, for a trace viewer, and its
figures, `rank0.json`; process 0 combines them in `profile.json`.

Every moment of a step counts for the first of these that covers it:

    loader          waiting for a batch
    compute         an operator runs: on the CPU, ATen and compiled ones; on a GPU, every kernel except NCCL's
    communication   a collective is in flight and nothing is computed: exposed communication
    bubble          only a message between stages is in flight: the other stage is not ready
    other           none of these: Python, kernel launches, waiting for another thread

so they add up to the step. MFU is the model's share of the processors' peak: floating-point operations of forward and
backward passes, excluding recomputation (Chowdhery 2022, appendix B), divided by seconds and peak.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from edge_client.files import write_durably
from models.pretrain.training import ProfileOptions
from models.pretrain.world import World
from models.zoo.spec import ModelSpec

NAME = "profile.json"
STEP, LOADER = "pretrain:step", "pretrain:loader"
POINTS = 400
"""Points of a memory timeline, at most."""

_COMMUNICATION, _MESSAGES = ("gloo:", "nccl"), ("send", "recv", "sendrecv")
_COMPUTE = ("aten::", "## Call CompiledFxGraph", "Torch-Compiled Region")
_DISPATCH = ("c10d::", "_c10d_functional::")

Span = tuple[float, float]
"""Begin and end, seconds."""


@dataclass(frozen=True)
class Split:
    """Seconds of a step by category; they add up to the step."""

    loader: float
    compute: float
    communication: float
    bubble: float
    other: float

    @property
    def seconds(self) -> float:
        return self.loader + self.compute + self.communication + self.bubble + self.other


class Profiler:
    """Profiles some steps of one process's training.

    Args:
        rows: rows of a global batch.
    """

    def __init__(
        self, options: ProfileOptions, folder: Path, spec: ModelSpec, world: World, rows: int
    ) -> None:
        self.options, self.folder = options, folder / options.folder
        self.spec, self.world, self.rows = spec, world, rows
        self._profile: profile | None = None
        self._first: int | None = None
        self._seconds: list[float] = []
        self._bytes_before = 0

    def around(self, step: int) -> AbstractContextManager[None]:
        """Context of a step, counted from 0; the last profiled step is a collective."""
        if self._first is None:
            self._first = step
        number = step - self._first - self.options.start
        return self._profiled(number) if 0 <= number < self.options.steps else nullcontext()

    @contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        if self._profile is None:
            cuda = self.world.device.type == "cuda"
            self._bytes_before = torch.cuda.memory_allocated() if cuda else 0
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
            self._profile = profile(activities=kinds, profile_memory=True)
            self._profile.start()
        began = time.perf_counter()
        with record_function(STEP):
            yield
            torch.get_device_module(self.world.device).synchronize()
        self._seconds.append(time.perf_counter() - began)
        if number == self.options.steps - 1:
            self._end()

    def _end(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        rank, world = self.world.rank, self.world
        self.folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.folder / f"trace-rank{rank}.json"))
        results = self._profile.profiler
        assert results is not None and results.kineto_results is not None
        events = results.kineto_results.events()
        peak_tflops = self.options.peak_tflops
        figures = {
            "rank": rank,
            "steps": [asdict(split) for split in splits(events, world.device.type)],
            "step_seconds": self._seconds,
            "peak_flops": peak_tflops * 1e12 if peak_tflops else measured_peak(world),
            "memory": _memory(events, world.device.type, self._bytes_before),
        }
        _write(self.folder / f"rank{rank}.json", figures)
        dist.barrier()
        if rank == 0:
            _write(self.folder / NAME, self._report())

    def _report(self) -> dict[str, Any]:
        ranks = [
            json.loads((self.folder / f"rank{rank}.json").read_text("utf-8"))
            for rank in range(self.world.plan.processes)
        ]
        seconds = statistics.median(
            max(times) for times in zip(*(r["step_seconds"] for r in ranks), strict=True)
        )
        flops, source = flops_of_row(self.spec)
        tokens = self.rows * (self.spec.input_shape[0] if self.spec.task == "next_token" else 1)
        peak = sum(rank["peak_flops"] for rank in ranks)
        mean = [_mean([Split(**split) for split in rank["steps"]]) for rank in ranks]
        overall = _mean(mean)
        return {
            "plan": str(self.world.plan),
            "device": self.world.device.type,
            "backend": str(dist.get_backend()),
            "first_step": (self._first or 0) + self.options.start + 1,
            "steps": self.options.steps,
            "step_seconds": seconds,
            "rows_per_second": self.rows / seconds,
            "tokens_per_second": tokens / seconds if self.spec.task == "next_token" else None,
            "mean_seconds": asdict(overall),
            "exposed_share": overall.communication / overall.seconds,
            "bubble_share": overall.bubble / overall.seconds,
            "loader_share": overall.loader / overall.seconds,
            "flops_per_step": flops * self.rows,
            "flops_from": source,
            "peak_flops": peak,
            "peak_from": "given" if self.options.peak_tflops else "a matrix product on every process at once",
            "mfu": flops * self.rows / seconds / peak,
            "ranks": [
                {"rank": rank["rank"], "mean_seconds": asdict(split), "memory": rank["memory"]}
                for rank, split in zip(ranks, mean, strict=True)
            ],
        }  # fmt: skip


def splits(events: Sequence[Any], device: str) -> list[Split]:
    """The time of every profiled step by category. `events`: of torch's profiler (Kineto); `device`: cpu or cuda."""
    spans: dict[str, list[Span]] = defaultdict(list)
    on_gpu = device == "cuda"
    for event in events:
        name, span = event.name(), (event.start_ns() / 1e9, event.end_ns() / 1e9)
        kernel = event.device_type() == DeviceType.CUDA
        if name in (STEP, LOADER) and not kernel:
            spans[name].append(span)
        elif name.startswith(_COMMUNICATION):
            if kernel == on_gpu or name.startswith("gloo:"):
                point_to_point = any(kind in name.lower() for kind in _MESSAGES)
                spans["messages" if point_to_point else "collectives"].append(span)
        elif on_gpu:
            if kernel and not name.startswith("pretrain:") and name != "[memory]":
                spans["computing"].append(span)
        elif name.startswith(_DISPATCH):
            spans["dispatching"].append(span)
        elif name.startswith(_COMPUTE):
            spans["computing"].append(span)
    computing = subtract(spans["computing"], spans["dispatching"])
    claims = spans[LOADER], computing, spans["collectives"], spans["messages"]
    return [_split(step, *claims) for step in sorted(spans[STEP])]


def _split(step: Span, *claims: Iterable[Span]) -> Split:
    """Seconds of `step` that belong to each of `claims` and to none before it."""
    left, seconds = [step], []
    for claim in claims:
        rest = subtract(left, claim)
        seconds.append(length(left) - length(rest))
        left = rest
    return Split(*(*seconds, length(left)))


def merge(spans: Iterable[Span]) -> list[Span]:
    """The union of `spans` as disjoint spans, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def subtract(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The moments of `spans` that are in none of `others`."""
    left: list[Span] = []
    taken = merge(others)
    first = 0
    for begin, end in merge(spans):
        while first < len(taken) and taken[first][1] <= begin:
            first += 1
        number = first
        while number < len(taken) and taken[number][0] < end:
            if taken[number][0] > begin:
                left.append((begin, taken[number][0]))
            begin = max(begin, taken[number][1])
            number += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(spans: Iterable[Span]) -> float:
    """Seconds covered by any of `spans`."""
    return sum(end - begin for begin, end in merge(spans))


def flops_of_row(spec: ModelSpec) -> tuple[float, str]:
    """Floating-point operations of a forward and a backward pass over one example, and how they were determined:
    counted by torch on tensors without data, attention as if unmasked; or, where a model needs data, 6 per param and
    token.
    """
    with torch.device("meta"):
        module = spec.module()
    try:
        with FlopCounterMode(display=False) as counter:
            dtype = torch.int32 if spec.input_dtype == "int32" else torch.float32
            logits = module(torch.zeros((1, *spec.input_shape), dtype=dtype, device="meta"))
            logits.float().sum().backward()
        if counter.get_total_flops():
            return float(counter.get_total_flops()), "operators counted"
    except (RuntimeError, NotImplementedError):
        pass
    tokens = spec.input_shape[0] if spec.input_dtype == "int32" else 1
    return 6.0 * sum(p.numel() for p in module.parameters()) * tokens, "6 for every param and token"


def measured_peak(world: World) -> float:
    """Operations a second of a large matrix product in the plan's precision, on this process's processor; bfloat16 for fp8."""
    cuda = world.device.type == "cuda"
    size, turns = (8192, 20) if cuda else (512, 10)
    dtype = torch.bfloat16 if world.plan.precision != "fp32" else torch.float32
    left = torch.rand(size, size, device=world.device).to(dtype)
    seconds = []
    for _ in range(turns):
        began = time.perf_counter()
        left @ left
        torch.get_device_module(world.device).synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def _mean(splits: Sequence[Split]) -> Split:
    return Split(
        *(statistics.fmean(values) for values in zip(*(asdict(s).values() for s in splits), strict=True))
    )


def _memory(events: Sequence[Any], device: str, before: int) -> dict[str, Any]:
    """Allocated bytes during the profiled steps: on a GPU all, on the CPU those allocated since the start."""
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == kind
    )
    level, timeline = before, []
    for at, change in changes:
        level += change
        timeline.append(((at - changes[0][0]) / 1e9, level))
    stretch = max(1, -(-len(timeline) // POINTS))
    thinned = [  # the point with the most bytes of every stretch
        max(timeline[start : start + stretch], key=lambda point: point[1])
        for start in range(0, len(timeline), stretch)
    ]
    return {
        "from": "allocator" if device == "cuda" else "allocations since the first step",
        "seconds": [at for at, _ in thinned],
        "bytes": [level for _, level in thinned],
        "peak_bytes": max((level for _, level in timeline), default=before),
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    write_durably(path, (json.dumps(document, indent=1) + "\n").encode())
