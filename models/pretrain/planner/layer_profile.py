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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from models.pretrain import optimizers
from models.pretrain.objective import Objective, as_targets, objective_of
from models.pretrain.parallel.model import activation_checkpoint
from models.pretrain.parallelize import Stage
from models.pretrain.plan import POLICIES, ActivationCheckpoint
from models.pretrain.planner import pieces
from models.pretrain.planner.live_memory import LiveBytes
from models.pretrain.planner.profile import Cost, Optimizer, Piece
from models.pretrain.planner.profile_cache import Cache
from models.pretrain.training import TrainingOptions
from models.zoo.layout import Layout, matching
from models.zoo.spec import ModelSpec

REPEATS = 7
ENOUGH_SECONDS = 0.2
"""After this time no pass is repeated."""
SLOW_SECONDS = 0.01
NARROW = 2
FEW = 4
"""Rows of a pass by processes that share cores; 1 where a layer is large."""
SMALL, LARGE = 1 << 10, 1 << 22
"""Values of the tensors whose optimizer steps are timed: the time of the call, and of the values, more than caches hold."""

Run = Callable[[torch.Tensor], torch.Tensor]
Figures = dict[str, float]
_SECONDS, _BYTES = ("forward", "backward"), ("kept", "forward_bytes", "backward_bytes")


def measure(
    spec: ModelSpec, rows: int, device: torch.device, cache: Cache
) -> tuple[Piece, tuple[Piece, ...], Piece, Piece]:
    """`first`, `layers`, `last` and `loss` of a `models.pretrain.planner.profile.Profile`.

    `rows` > 1 is the larger of the two batch sizes measured.
    """
    layout = spec.layout or Layout(order=())
    parts = pieces.parts_of(pieces.without_params(spec), layout)
    batches = {number: spec.example_batch(number) for number in (1, rows)}
    inputs = {number: x.to(device) for number, (x, _) in batches.items()}
    known: dict[object, tuple[Piece, dict[int, torch.Tensor]]] = {}
    found, counted = [], set[int]()
    for place, part in enumerate(parts):
        shapes = [[str(x.dtype), *x.shape] for x in inputs.values()]
        key = json.dumps([pieces.identity(part), place == 0, shapes, _splits(layout), _roles(part, layout)])
        if key not in known:
            whole = pieces.with_params(part, device)

            def measured(whole: nn.Module = whole, x: dict[int, torch.Tensor] = inputs) -> Piece:
                return _piece(whole, x, layout)

            piece = cache.get(key, Piece, measured)
            with torch.no_grad():
                known[key] = piece, {number: whole(x) for number, x in inputs.items()}
            del whole, measured
        piece, inputs = known[key]
        shared = [p for p in {*part.parameters()} if id(p) in counted]  # as the head of a model that is tied
        found.append(replace(piece, values=piece.values - sum(p.numel() for p in shared)))
        counted |= {id(parameter) for parameter in part.parameters()}
    labels = {number: as_targets(y).to(device) for number, (_, y) in batches.items()}
    loss_key = [pieces.code_of(spec.loss), spec.task, [[*x.shape] for x in inputs.values()], _splits(layout)]
    loss = cache.get(loss_key, Piece, lambda: _loss(objective_of(spec), inputs, labels, _splits(layout)))
    first, *layers, last = found
    return (
        replace(first, name="first"),
        tuple(replace(piece, name=f"layer {number}") for number, piece in enumerate(layers)),
        replace(last, name="last"),
        loss,
    )


def slow(spec: ModelSpec, device: torch.device) -> bool:
    """Whether a forward pass of one row takes so long that few rows and few steps are enough."""
    layout = spec.layout or Layout(order=())
    x = spec.example_batch(1)[0].to(device)
    total, seconds = 0.0, dict[str, float]()
    outputs: dict[str, torch.Tensor] = {}
    for part in pieces.parts_of(pieces.without_params(spec), layout):
        kind = pieces.identity(part)
        if kind not in seconds:
            whole = pieces.with_params(part, device)
            with torch.no_grad():
                whole(x)
                began = _now(device)
                outputs[kind] = whole(x)
                seconds[kind] = _now(device) - began
        x = outputs[kind]
        total += seconds[kind]
    return total > SLOW_SECONDS


def busiest(spec: ModelSpec, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """The first layer of a model, or all of a model without layers, and an input of it."""
    layout = spec.layout or Layout(order=())
    before, layer, *_ = pieces.parts_of(pieces.without_params(spec), layout)
    few = FEW if sum(parameter.numel() for parameter in layer.parameters()) < LARGE else 1
    with torch.no_grad():
        x = pieces.with_params(before, device)(spec.example_batch(few)[0].to(device))
    return pieces.with_params(layer, device), x.requires_grad_(x.is_floating_point())


def _splits(layout: Layout) -> bool:
    """Whether tp can split the model."""
    return bool(layout.columns) and layout.heads % NARROW == 0


def _roles(part: nn.Module, layout: Layout) -> list[list[str]]:
    """Names of the modules of a piece that a plan treats differently."""
    patterns = (layout.columns, layout.rows, layout.attention, layout.experts, (layout.head, layout.vocabulary))
    return [[name for name, _ in _matching(part, layout, of)] for of in patterns]


def optimizer(
    options: TrainingOptions, device: torch.device, cache: Cache
) -> Optimizer:
    """Time of a step by number of tensors and of values, and the memory of one."""
    key = [options.optimizer, options.momentum, options.weight_decay, options.clip_norm]
    return cache.get(["optimizer", *key], Optimizer, lambda: _optimizer(options, device))


def _optimizer(options: TrainingOptions, device: torch.device) -> Optimizer:
    seconds = []
    for values in (SMALL, LARGE):
        parameter = nn.Parameter(torch.zeros(values, device=device))
        stepper = optimizers.over([parameter], options)
        parameter.grad = torch.full_like(parameter, 1e-3)
        stepper.step()
        seconds.append(_median(stepper.step, device))
    states = [v for s in stepper.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    with LiveBytes([parameter, parameter.grad, *states]) as live:
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
    """A copy of a piece with the slices of its matrices that one of `NARROW` tp ranks has."""
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


def _piece(wide: nn.Module, inputs: dict[int, torch.Tensor], layout: Layout) -> Piece:
    thin = _narrowed(wide, layout) if _splits(layout) else None
    policies = POLICIES if layout.layers and _is_layer(wide) else POLICIES[:1]
    costs: dict[str, dict[str, Cost]] = {}
    for policy in policies:
        narrow = _recomputing(thin, policy) if thin is not None else None
        for name, cost in _costs(_recomputing(wide, policy), narrow, inputs).items():
            costs.setdefault(name, {})[policy] = cost
    total = sum(parameter.numel() for parameter in wide.parameters())
    cut = total - sum(p.numel() for p in thin.parameters()) if thin is not None else 0
    vocabulary = _numel(found for _, found in _matching(wide, layout, (layout.vocabulary,))) if thin is not None else 0
    patterns = (layout.columns, layout.rows, layout.attention, layout.experts)
    columns, rows, attentions, experts = (
        [found for _, found in _matching(wide, layout, of)] for of in patterns
    )
    few, x = next(iter(inputs.items()))
    with torch.no_grad():
        y = wide(x)
    split = cut * NARROW // (NARROW - 1) + vocabulary
    return Piece(
        name="",
        values=total - split - _numel(experts),
        split_values=split,
        expert_values=_numel(experts),
        tensors=len(list(wide.parameters())),
        largest=max((parameter.numel() for parameter in wide.parameters()), default=0),
        forward=costs["forward"]["none"],
        backward=costs["backward"],
        kept=costs["kept"],
        forward_bytes=costs["forward_bytes"],
        backward_bytes=costs["backward_bytes"],
        output_bytes=float(y.numel() * y.element_size() / few),
        columns=len(columns),
        rows=len(rows),
        attentions=len(attentions),
        experts=len(experts),
    )


def _loss(
    objective: Objective, logits: dict[int, torch.Tensor], labels: dict[int, torch.Tensor], splits: bool
) -> Piece:
    """The objective itself, which `loss_parallel` splits over tp ranks."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return objective(x, labels[len(x)] % x.shape[-1])

    def thin(x: torch.Tensor) -> torch.Tensor:
        return run(x.chunk(NARROW, -1)[0])

    costs = _costs(run, thin if splits else None, logits)
    return Piece(
        name="loss",
        forward=costs["forward"],
        backward={"none": costs["backward"]},
        kept={"none": costs["kept"]},
        forward_bytes={"none": costs["forward_bytes"]},
        backward_bytes={"none": costs["backward_bytes"]},
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


def _costs(wide: Run, thin: Run | None, inputs: dict[int, torch.Tensor]) -> dict[str, Cost]:
    """Fits a line to the figures of both numbers of rows; the part that shrinks with narrower matrices is split by tp."""
    whole = {rows: _figures(wide, x) for rows, x in inputs.items()}
    part = {rows: _figures(thin, x) for rows, x in inputs.items()} if thin is not None else whole
    few, many = inputs

    def line(figures: dict[int, Figures], name: str) -> tuple[float, float]:
        low, high = figures[few][name], figures[many][name]
        slope = max(0.0, (high - low) / (many - few))
        return max(0.0, low - slope * few), slope

    costs = {}
    for name in (*_SECONDS, *_BYTES):
        fixed, slope = line(whole, name)
        shares = [
            min(total, max(0.0, (total - narrow) * NARROW / (NARROW - 1)))
            for total, narrow in zip((fixed, slope), line(part, name), strict=True)
        ]
        costs[name] = Cost(fixed - shares[0], slope - shares[1], *shares)
    return costs


def _figures(run: Run, x: torch.Tensor) -> Figures:
    """Seconds and bytes of one forward and backward pass. The pass whose bytes are counted warms up the others."""
    x = x.detach().requires_grad_(x.is_floating_point())
    figures = _bytes(run, x)
    seconds: dict[str, list[float]] = {name: [] for name in _SECONDS}
    spent = 0.0
    while len(seconds["forward"]) < REPEATS and spent < ENOUGH_SECONDS:
        began = _now(x.device)
        y = run(x)
        middle = _now(x.device)
        if y.requires_grad:
            y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
        ended = _now(x.device)
        seconds["forward"].append(middle - began)
        seconds["backward"].append(ended - middle)
        _drop_gradients(run, x)
        spent += ended - began
    return figures | {name: statistics.median(values) for name, values in seconds.items()}


def _bytes(run: Run, x: torch.Tensor) -> Figures:
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
