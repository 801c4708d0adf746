"""Measures seconds and bytes of every piece of a model in one process, for a profile.

Each piece is run forward and backward by itself for one row and for several, whole and with the narrower matrices of
one of two tp ranks. Each pair of figures gives a line. Identical layers are measured once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

from models.pretrain import optimizers
from models.pretrain.objective import Objective, as_targets, objective_of
from models.pretrain.parallel.model import activation_checkpoint
from models.pretrain.parallelize import Stage
from models.pretrain.plan import POLICIES, ActivationCheckpoint
from models.pretrain.planner.live_memory import LiveBytes
from models.pretrain.planner.profile import Cost, Optimizer, Piece
from models.pretrain.training import TrainingOptions
from models.zoo.layout import Layout, matching
from models.zoo.spec import ModelSpec

REPEATS = 7
MIN_REPEATS, ENOUGH_SECONDS = 2, 0.2
"""After this time fewer passes are enough."""
SLOW_SECONDS = 0.01
NARROW = 2

Run = Callable[[torch.Tensor], torch.Tensor]
Figures = dict[str, float]
_SECONDS, _BYTES = ("forward", "backward"), ("kept", "forward_bytes", "backward_bytes")


def measure(
    spec: ModelSpec, rows: int, device: torch.device
) -> tuple[Piece, tuple[Piece, ...], Piece, Piece]:
    """`first`, `layers`, `last` and `loss` of a `models.pretrain.planner.profile.Profile`.

    `rows` > 1 is the larger of the two batch sizes measured.
    """
    layout = spec.layout or Layout(order=())
    splits = bool(layout.columns) and layout.heads % NARROW == 0
    wide = _parts(spec.build(0).to(device), layout)
    thin = _parts(narrowed(spec.build(0).to(device), layout), layout) if splits else None
    batches = {number: spec.example_batch(number) for number in (1, rows)}
    inputs = {number: x.to(device) for number, (x, _) in batches.items()}
    known: dict[object, Piece] = {}
    pieces = []
    for place, part in enumerate(wide):
        identity = (str(part), place == 0, tuple(x.shape for x in inputs.values()))
        if identity not in known:
            known[identity] = _piece(part, thin[place] if thin else None, inputs, layout)
        pieces.append(known[identity])
        with torch.no_grad():
            inputs = {number: part(x) for number, x in inputs.items()}
    labels = {number: as_targets(y).to(device) for number, (_, y) in batches.items()}
    first, *layers, last = pieces
    return (
        replace(first, name="first"),
        tuple(replace(piece, name=f"layer {number}") for number, piece in enumerate(layers)),
        replace(last, name="last"),
        _loss(objective_of(spec), inputs, labels, splits),
    )


def slow(spec: ModelSpec, device: torch.device) -> bool:
    """Whether a forward pass of one row takes so long that few rows and few steps are enough."""
    module, x = spec.build(0).to(device), spec.example_batch(1)[0].to(device)
    with torch.no_grad():
        module(x)
        began = _now(device)
        module(x)
    return _now(device) - began > SLOW_SECONDS


def narrowed(module: nn.Module, layout: Layout) -> nn.Module:
    """`module` with the slices of its matrices that one of `NARROW` tp ranks has."""
    for _, linear in matching(module, (*layout.columns, layout.head)):
        _cut(linear, 0)  # not the embedding, whose lookups cost the same
    for _, linear in matching(module, layout.rows):
        _cut(linear, 1)
    return module


def optimizer(spec: ModelSpec, options: TrainingOptions, device: torch.device) -> Optimizer:
    """Time of a step by number of tensors and of values."""
    module = spec.build(0).to(device)
    values = sum(parameter.numel() for parameter in module.parameters())
    tensors = len(list(module.parameters()))
    small = nn.ParameterList([torch.zeros(1, device=device) for _ in range(tensors)])
    seconds = []
    for measured in (small, module):
        stepper = optimizers.over(list(measured.parameters()), options)
        for parameter in measured.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        stepper.step()
        seconds.append(_median(stepper.step, device))
    states = [v for s in stepper.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    with LiveBytes([*module.parameters(), *gradients, *states]) as live:
        before = live.now
        stepper.step()
    return Optimizer(
        fixed=seconds[0] / tensors,
        per_value=max(0.0, seconds[1] - seconds[0]) / values,
        state=round(sum(v.numel() for v in states) / values, 2),
        working_bytes=max(0, live.peak - before),
    )


def _parts(module: nn.Module, layout: Layout) -> list[nn.Module]:
    """Everything before the layers, the layers, everything after them."""
    if not layout.layers:
        return [nn.Identity(), module]
    order, layers = layout.sequence(module), layout.layer_names(module)
    before, after = order[: order.index(layers[0])], order[order.index(layers[-1]) + 1 :]
    return [Stage(module, before), *(module.get_submodule(name) for name in layers), Stage(module, after)]


def _cut(linear: nn.Module, dim: int) -> None:
    for name, parameter in list(linear.named_parameters(recurse=False)):
        if dim < parameter.dim():
            share = parameter.detach().chunk(NARROW, dim)[0].clone()
            setattr(linear, name, nn.Parameter(share))


def _piece(wide: nn.Module, thin: nn.Module | None, inputs: dict[int, torch.Tensor], layout: Layout) -> Piece:
    policies = POLICIES if layout.layers and _is_layer(wide) else POLICIES[:1]
    costs: dict[str, dict[str, Cost]] = {}
    for policy in policies:
        narrow = _recomputing(thin, policy) if thin is not None else None
        for name, cost in _costs(_recomputing(wide, policy), narrow, inputs).items():
            costs.setdefault(name, {})[policy] = cost
    total = sum(parameter.numel() for parameter in wide.parameters())
    cut = total - sum(p.numel() for p in thin.parameters()) if thin is not None else 0
    vocabulary = _numel(_matching(wide, layout, (layout.vocabulary,))) if thin is not None else 0
    patterns = (layout.columns, layout.rows, layout.attention, layout.experts)
    columns, rows, attentions, experts = (_matching(wide, layout, of) for of in patterns)
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


def _matching(part: nn.Module, layout: Layout, patterns: tuple[str, ...]) -> list[nn.Module]:
    """The modules of a piece that `patterns`, of paths in the whole model, match."""
    if _is_layer(part):
        above = layout.layers.count(".") + 2  # the path of a layer, such as "layers.0"
        patterns = tuple(pattern.split(".", above)[-1] for pattern in patterns)
    return [found for _, found in matching(part, patterns)]


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
    """Seconds and bytes of one forward and backward pass."""
    seconds: dict[str, list[float]] = {name: [] for name in _SECONDS}
    spent = 0.0
    x = x.detach().requires_grad_(x.is_floating_point())
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
        if turn >= MIN_REPEATS and spent > ENOUGH_SECONDS:
            break
    figures = {name: statistics.median(values) for name, values in seconds.items()}
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
