"""Measures seconds and bytes of every piece of a model in one process, for a profile.

Each piece is run forward and backward by itself for one row and for several, whole and with the narrower matrices of
one of two tp ranks. Each pair of figures gives a line. Identical layers are measured once, and only the piece that is being
measured has params (`models.pretrain.planner.pieces`). A piece that was measured before on this machine is not again.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.pretrain import optimizers
from models.pretrain.objective import as_targets, objective_of
from models.pretrain.parallel.model import activation_checkpoint
from models.pretrain.parallel.model.stage import Stage
from models.pretrain.plan import POLICIES, ActivationCheckpoint
from models.pretrain.planner import pieces
from models.pretrain.planner.live_memory import LiveBytes
from models.pretrain.planner.profile import Cost, Optimizer, Piece, most
from models.pretrain.planner.profile_cache import Cache
from models.pretrain.training import TrainingOptions
from models.zoo.layout import Layout, matching
from models.zoo.spec import ModelSpec

REPEATS = 7
ENOUGH_SECONDS = 0.2
"""After this time no pass is repeated."""
SLOW_SECONDS = 0.01
"""A piece whose passes of one row take longer is timed with few rows."""
MAX_ROWS, FEW_ROWS = 16, 2
MAX_BYTES = 64 * 2**20
"""Of a pass that is timed, if it has more than few rows."""
COUNTED_ROWS = (1, 2, 16, 32)
"""Rows of the passes whose bytes are counted, in pairs that give a line each."""
NARROW = 2
SMALL, LARGE = 1 << 10, 1 << 22
"""Values of the tensors whose optimizer steps are timed: the time of the call, and of the values, more than caches hold."""

Run = Callable[[torch.Tensor], torch.Tensor]
Figures = dict[str, float]
_SECONDS, _BYTES = ("forward", "backward"), ("kept", "forward_bytes", "backward_bytes")


@dataclass(frozen=True)
class Shape:
    """Of a tensor that enters a piece, without the rows."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def of_rows(self, rows: int, spec: ModelSpec, device: torch.device) -> torch.Tensor:
        """Such a tensor: numbers around 0, or what the model takes."""
        if self.dtype.is_floating_point:
            return torch.randn((rows, *self.sizes), dtype=self.dtype, device=device)
        return spec.example_batch(rows)[0].to(device)


def measure(
    spec: ModelSpec, device: torch.device, cache: Cache
) -> tuple[Piece, tuple[Piece, ...], Piece, Piece]:
    """`first`, `layers`, `last` and `loss` of a `models.pretrain.planner.profile.Profile`."""
    layout = spec.layout or Layout(order=())
    x = spec.example_batch(1)[0]
    shape = Shape(tuple(x.shape[1:]), x.dtype)
    known: dict[str, Measured] = {}
    found, counted = [], set[int]()
    for place, part in enumerate(pieces.parts_of(pieces.without_params(spec), layout)):
        key = json.dumps(
            [pieces.identity(part), place == 0, _splits(layout), _roles(part, layout), str(shape)]
        )
        if key not in known:
            makes = partial(shape.of_rows, spec=spec, device=device)
            known[key] = cache.get(key, Measured, partial(_measured, part, makes, layout, device))
        piece = known[key].piece
        shared = [p for p in {*part.parameters()} if id(p) in counted]  # as the head of a model that is tied
        found.append(replace(piece, values=piece.values - sum(p.numel() for p in shared)))
        counted |= {id(parameter) for parameter in part.parameters()}
        shape = Shape(known[key].sizes, getattr(torch, known[key].dtype))
    loss_key = [pieces.code_of(spec.loss), spec.task, str(shape), _splits(layout)]
    loss = cache.get(loss_key, Piece, lambda: _loss(spec, shape, _splits(layout), device))
    first, *layers, last = found
    return (
        replace(first, name="first"),
        tuple(replace(piece, name=f"layer {number}") for number, piece in enumerate(layers)),
        replace(last, name="last"),
        loss,
    )


@dataclass(frozen=True)
class Measured:
    """A piece and what it gives: the sizes of its output without the rows, and its dtype."""

    piece: Piece
    sizes: tuple[int, ...]
    dtype: str


def _splits(layout: Layout) -> bool:
    """Whether tp can split the model."""
    return bool(layout.columns) and layout.heads % NARROW == 0


def _roles(part: nn.Module, layout: Layout) -> list[list[str]]:
    """Names of the modules of a piece that a plan treats differently."""
    patterns = (
        layout.columns,
        layout.rows,
        layout.attention,
        layout.experts,
        (layout.head, layout.vocabulary),
    )
    return [[name for name, _ in _matching(part, layout, of)] for of in patterns]


def optimizer(options: TrainingOptions, device: torch.device, cache: Cache) -> Optimizer:
    """Time of a step by number of tensors and of values, and the memory of one."""
    key = [options.optimizer, options.momentum, options.weight_decay, options.clip_norm]
    return cache.get(["optimizer", *key], Optimizer, lambda: _optimizer(options, device))


def _optimizer(options: TrainingOptions, device: torch.device) -> Optimizer:
    seconds = []
    for values in (SMALL, LARGE):
        parameter = nn.Parameter(torch.zeros(values, device=device))
        stepper = optimizers.over([parameter], options)
        parameter.grad = gradient = torch.full_like(parameter, 1e-3)
        stepper.step()
        seconds.append(_median(stepper.step, device))
    states = [v for s in stepper.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    with LiveBytes([parameter, gradient, *states]) as live:
        before = live.now
        stepper.step()
    per_value = max(0.0, seconds[1] - seconds[0]) / (LARGE - SMALL)
    return Optimizer(
        fixed=max(0.0, seconds[0] - SMALL * per_value),
        per_value=per_value,
        state=round(sum(v.numel() for v in states) / LARGE, 2),
        working=round(max(0, live.peak - before) / LARGE, 2),
    )


def _narrowed(part: nn.Module, layout: Layout) -> nn.Module:
    """A copy of a piece, on the meta device as that is, with the slices of its matrices that one of `NARROW` tp ranks has."""
    part = copy.deepcopy(part)
    for _, linear in _matching(part, layout, (*layout.columns, layout.head)):
        _cut(linear, 0)  # not the embedding, whose lookups cost the same
    for _, linear in _matching(part, layout, layout.rows):
        _cut(linear, 1)
    return part


def _cut(linear: nn.Module, dim: int) -> None:
    for name, parameter in list(linear.named_parameters(recurse=False)):
        if dim < parameter.dim():
            share = parameter.detach().chunk(NARROW, dim)[0].clone()
            setattr(linear, name, nn.Parameter(share))


def _measured(
    part: nn.Module, makes: Callable[[int], torch.Tensor], layout: Layout, device: torch.device
) -> Measured:
    """Measures a piece, whose parameters are on the meta device. `makes` gives an input of so many rows."""
    policies = POLICIES if layout.layers and _is_layer(part) else POLICIES[:1]
    sizes: dict[str, dict[str, tuple[Cost, ...]]] = {}
    for policy in policies:
        for name, lines in _piece_bytes(part, policy, makes, layout, device).items():
            sizes.setdefault(name, {})[policy] = lines
    wide = pieces.with_params(part, device)
    thin = pieces.with_params(_narrowed(part, layout), device) if _splits(layout) else None
    times: dict[str, dict[str, Cost]] = {}
    for policy in policies:
        narrow = _recomputing(thin, policy) if thin is not None else None
        many = _rows_within(sizes["backward_bytes"][policy])
        for name, cost in _seconds_by_rows(_recomputing(wide, policy), narrow, makes, many).items():
            times.setdefault(name, {})[policy] = cost
    with torch.no_grad():
        y = wide(makes(1))
    total = sum(parameter.numel() for parameter in wide.parameters())
    cut = total - sum(p.numel() for p in thin.parameters()) if thin is not None else 0

    def named(patterns: tuple[str, ...]) -> list[nn.Module]:
        return [module for _, module in _matching(part, layout, patterns)]

    vocabulary = _numel(named((layout.vocabulary,))) if _splits(layout) else 0
    split, experts = cut * NARROW // (NARROW - 1) + vocabulary, named(layout.experts)
    piece = Piece(
        name="",
        values=total - split - _numel(experts),
        split_values=split,
        expert_values=_numel(experts),
        tensors=len(list(part.parameters())),
        largest=max((parameter.numel() for parameter in part.parameters()), default=0),
        forward=times["forward"]["none"],
        backward=times["backward"],
        kept={policy: lines[-1] for policy, lines in sizes["kept"].items()},
        forward_bytes=sizes["forward_bytes"],
        backward_bytes=sizes["backward_bytes"],
        output_bytes=float(y.numel() * y.element_size()),
        columns=len(named(layout.columns)),
        rows=len(named(layout.rows)),
        attentions=len(named(layout.attention)),
        experts=len(experts),
    )
    return Measured(piece, tuple(y.shape[1:]), str(y.dtype).removeprefix("torch."))


def _loss(spec: ModelSpec, shape: Shape, splits: bool, device: torch.device) -> Piece:
    """The objective itself, which `loss_parallel` splits over tp ranks."""
    objective = objective_of(spec)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = as_targets(spec.example_batch(len(x))[1]).to(device)
        return objective(x, y % x.shape[-1])

    def thin(x: torch.Tensor) -> torch.Tensor:
        return run(x.chunk(NARROW, -1)[0])

    makes, narrow = partial(shape.of_rows, spec=spec, device=device), thin if splits else None
    sizes = _bytes_by_rows(lambda: (run, narrow), makes)
    times = _seconds_by_rows(run, narrow, makes, _rows_within(sizes["backward_bytes"]))
    return Piece(
        name="loss",
        forward=times["forward"],
        backward={"none": times["backward"]},
        kept={"none": sizes["kept"][-1]},
        forward_bytes={"none": sizes["forward_bytes"]},
        backward_bytes={"none": sizes["backward_bytes"]},
    )


def _matching(part: nn.Module, layout: Layout, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """The modules of a piece, and their paths in it, that `patterns`, of paths in the whole model, match."""
    if _is_layer(part):
        above = layout.layers.count(".") + 2  # the path of a layer, such as "layers.0"
        patterns = tuple(pattern.split(".", above)[-1] for pattern in patterns)
    return [*matching(part, patterns)]


def _numel(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _is_layer(part: nn.Module) -> bool:
    return not isinstance(part, Stage | nn.Identity)


def _recomputing(part: nn.Module, policy: ActivationCheckpoint) -> nn.Module:
    """`part` as the only layer of a recomputing model."""
    if policy == "none":
        return part
    holder = nn.Module()
    holder.add_module("layers", nn.ModuleDict({"0": part}))
    activation_checkpoint.wrap(holder, Layout(order=("layers.*",)), policy)
    return holder.get_submodule("layers.0")


def _rows_within(peak: tuple[Cost, ...]) -> int:
    """The most rows of a pass that stays within `MAX_BYTES`, at most `MAX_ROWS` and at least `FEW_ROWS`."""
    fitting = [rows for rows in range(FEW_ROWS, MAX_ROWS + 1) if most(peak, rows) <= MAX_BYTES]
    return max(fitting, default=FEW_ROWS)


def _seconds_by_rows(
    wide: Run, thin: Run | None, makes: Callable[[int], torch.Tensor], most_rows: int
) -> dict[str, Cost]:
    """`forward` and `backward` seconds, from passes of one row and of several, few where one takes long."""
    low = _seconds(wide, makes(1))
    many = FEW_ROWS if sum(low.values()) > SLOW_SECONDS else most_rows
    whole = {1: low, many: _seconds(wide, makes(many))}
    part = {rows: _seconds(thin, makes(rows)) for rows in whole} if thin is not None else whole
    return {name: _fit(whole, part, name) for name in _SECONDS}


def _piece_bytes(
    part: nn.Module,
    policy: ActivationCheckpoint,
    makes: Callable[[int], torch.Tensor],
    layout: Layout,
    device: torch.device,
) -> dict[str, tuple[Cost, ...]]:
    def build() -> tuple[Run, Run | None]:
        wide = pieces.with_params(part, device)
        thin = pieces.with_params(_narrowed(part, layout), device) if _splits(layout) else None
        return _recomputing(wide, policy), None if thin is None else _recomputing(thin, policy)

    return _bytes_by_rows(build, makes)


def _bytes_by_rows(
    build: Callable[[], tuple[Run, Run | None]], makes: Callable[[int], torch.Tensor]
) -> dict[str, tuple[Cost, ...]]:
    """Bytes of passes without data, which cost nothing for any number of rows.

    A peak is the largest of several moments, each of which grows evenly with the rows: two lines, one for few rows and one
    for many, of which the larger holds. A piece whose work depends on the data is run with data.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            wide, thin = build()
            whole = {rows: _bytes(wide, makes(rows)) for rows in COUNTED_ROWS}
            part = {rows: _bytes(thin, makes(rows)) for rows in COUNTED_ROWS} if thin is not None else whole
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        wide, thin = build()
        whole = {rows: _bytes(wide, makes(rows)) for rows in COUNTED_ROWS[:2]}
        part = {rows: _bytes(thin, makes(rows)) for rows in whole} if thin is not None else whole
    counted = [*whole]
    pairs = list(zip(counted[::2], counted[1::2], strict=True))
    return {
        name: tuple(_fit({few: whole[few], many: whole[many]}, part, name) for few, many in pairs)
        for name in _BYTES
    }


def _fit(whole: dict[int, Figures], part: dict[int, Figures], name: str) -> Cost:
    """A line through the figures of both numbers of rows; the part that shrinks with narrower matrices is split by tp."""
    few, many = whole

    def line(figures: dict[int, Figures]) -> tuple[float, float]:
        low, high = figures[few][name], figures[many][name]
        slope = max(0.0, (high - low) / (many - few))
        return max(0.0, low - slope * few), slope

    fixed, slope = line(whole)
    shares = [
        min(total, max(0.0, (total - narrow) * NARROW / (NARROW - 1)))
        for total, narrow in zip((fixed, slope), line(part), strict=True)
    ]
    return Cost(fixed - shares[0], slope - shares[1], *shares)


def _seconds(run: Run, x: torch.Tensor) -> Figures:
    """Seconds of a forward and a backward pass, after one that warms up."""
    x = x.detach().requires_grad_(x.is_floating_point())
    seconds: dict[str, list[float]] = {name: [] for name in _SECONDS}
    spent = 0.0
    for turn in range(REPEATS + 1):
        began = _now(x.device)
        y = run(x)
        middle = _now(x.device)
        if y.requires_grad:
            y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
        ended = _now(x.device)
        if turn:
            seconds["forward"].append(middle - began)
            seconds["backward"].append(ended - middle)
        _drop_gradients(run, x)
        spent += ended - began
        if turn and spent > ENOUGH_SECONDS:
            break
    return {name: statistics.median(values) for name, values in seconds.items()}


def _bytes(run: Run, x: torch.Tensor) -> Figures:
    x = x.detach().requires_grad_(x.is_floating_point())
    figures: Figures = {}
    params = list(run.parameters()) if isinstance(run, nn.Module) else []
    with LiveBytes([x, *params]) as live:
        before = live.now
        y = run(x)
        figures["kept"], figures["forward_bytes"] = live.now - before, live.peak - before
        live.reset_peak()
        if y.requires_grad:
            y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
        figures["backward_bytes"] = live.peak - before
    _drop_gradients(run, x)
    return figures


def _drop_gradients(run: Run, x: torch.Tensor) -> None:
    x.grad = None
    if isinstance(run, nn.Module):
        run.zero_grad()


def _median(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = _now(device)
        work()
        seconds.append(_now(device) - began)
    return statistics.median(seconds)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()  # other uses of the cores meanwhile are no cost of the piece
