"""Bytes a process needs at the worst moment of a step under a plan. Pure arithmetic over a profile.

    params, gradients, optimizer state: 4 bytes a value each, shared out as zero says (Rajbhandari 2020, figure 1)
    activations: of the micro-batches a schedule has in flight: one without stages, at most pp for 1F1B, all for GPipe
    buffers: what a pass needs besides, logits and their gradient in float32 above all; gathered params, gradients laid
        out flat, what a pipeline receives into

The moments that can be the worst are the end of the forward pass, the backward pass of any piece, the exchange of
gradients and the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from models.pretrain.model_parallel.timetable import Kind, Pass
from models.pretrain.plan import ParallelPlan
from models.pretrain.planner import pipeline
from models.pretrain.planner.profile import Piece, Profile
from models.pretrain.planner.spread import Spread

VALUE_BYTES = 4
BUCKET_BYTES = 25 * 1024 * 1024
HALVED = 0.55
"""Outputs of a transformer layer's matrices, of all that it keeps for its backward pass: about 9 widths of 16."""
EXCHANGED = 10
"""Tensors as large as a layer's output that cp keeps around attention: what travels, laid out before and after."""


@dataclass(frozen=True)
class Memory:
    """Of the process that needs most.

    Attributes:
        parts: params, gradients, optimizer, activations, buffers: bytes at the worst moment, adding up to `bytes`.
    """

    bytes: float
    parts: dict[str, float] = field(default_factory=dict)


def needed(plan: ParallelPlan, profile: Profile, batch_size: int) -> Memory:
    """By the process that needs most, of all places along pp."""
    return max(by_place(plan, profile, batch_size), key=lambda memory: memory.bytes)


def by_place(plan: ParallelPlan, profile: Profile, batch_size: int) -> list[Memory]:
    """By a process at every place along pp."""
    spread = Spread(plan, profile, batch_size)
    return [_of(spread, place, passes) for place, passes in enumerate(_passes(spread))]


def _of(spread: Spread, place: int, passes: Sequence[tuple[Pass, float]]) -> Memory:
    plan = spread.plan
    stages = spread.stages()
    mine = spread.stages_of(place)
    sizes = {stage: spread.values(stages[stage]) * VALUE_BYTES for stage in mine}
    whole = sum(sizes.values())
    n = spread.keepers if plan.zero >= 2 and spread.data > 1 else 1
    lasting = {
        "params": whole / n,
        "gradients": 0.0,
        "optimizer": whole
        * spread.profile.optimizer.state
        / (n if n > 1 else spread.data if plan.zero == 1 else 1),
    }
    buffers = _pipeline_buffers(spread, place)
    replicated = spread.data > 1 and plan.zero < 2 and plan.tp == plan.pp == plan.ep == 1
    if replicated:
        buffers += whole  # DistributedDataParallel's buckets
    moments = []
    went_back: set[int] = set()
    for (kind, stage, _), others in passes:
        # FSDP2 too shares gradients out with the last piece only
        accumulated = sum(sizes[each] for each in went_back)
        for piece, activations, working, gradients in _moments(spread, kind, stage):
            gathered, flat = _gathered(spread, stages[stage], piece, sizes[stage]) if n > 1 else (0.0, 0.0)
            fresh = 0.0 if stage in went_back else gradients / n if plan.pieces == 1 else gradients
            moments.append(
                {
                    "params": lasting["params"] + gathered,
                    "gradients": accumulated + fresh,
                    "optimizer": lasting["optimizer"],
                    "activations": others + activations,
                    "buffers": buffers + working + flat,
                }
            )
        if kind in ("B", "W"):
            went_back.add(stage)
    if spread.data > 1 and not replicated and n == 1:
        moments.append(
            {**lasting, "gradients": whole, "activations": 0.0, "buffers": buffers + min(whole, BUCKET_BYTES)}
        )
    working = spread.profile.optimizer.working_bytes / n
    moments.append({**lasting, "gradients": whole / n, "activations": 0.0, "buffers": buffers + working})
    worst = max(moments, key=lambda moment: sum(moment.values()))
    return Memory(sum(worst.values()), worst)


def _ends(spread: Spread, stage: int) -> list[Piece]:
    """Pieces of a stage, with the loss after the last one's."""
    stages = spread.stages()
    return [*stages[stage], spread.profile.loss] if stage == len(stages) - 1 else stages[stage]


def _moments(spread: Spread, kind: Kind, stage: int) -> list[tuple[Piece, float, float, float]]:
    """(piece, activations of this micro-batch, what a pass needs beyond them, finished gradients) at every moment of one
    pass through a stage; what other micro-batches hold comes on top."""
    rows, ends = spread.rows, _ends(spread, stage)
    kept = [_kept(spread, piece) for piece in ends]
    moments, before = [], 0.0
    if kind == "F":
        for piece, stays in zip(ends, kept, strict=True):
            peak = piece.forward_bytes[spread.policy(piece)].at(rows, _tp(spread, piece))
            moments.append((piece, before + stays, max(0.0, peak - stays), 0.0))
            before += stays
        return moments
    if kind == "I" and stage == 0:
        return []  # torch leaves all of it to W
    halved = kind != "B" and stage > 0
    before, waiting, gradients = sum(kept), 0.0, 0.0
    for piece, stays in zip(reversed(ends), reversed(kept), strict=True):
        peak = piece.backward_bytes[spread.policy(piece)].at(rows, _tp(spread, piece))
        if halved:
            moments.append((piece, before + waiting, max(0.0, peak - stays), gradients))
            waiting += _halved(spread, piece)
        else:
            moments.append((piece, before, max(0.0, peak - stays), gradients))
            before -= stays
        gradients += piece.local_values(spread.plan.tp, spread.plan.ep) * VALUE_BYTES
    return moments


def _halved(spread: Spread, piece: Piece) -> float:
    """Gradients that wait, where a backward pass is halved, for that of the weights: of what every matrix gave."""
    if piece.name == spread.profile.loss.name:
        return 0.0
    if piece.name == spread.profile.last.name:
        return piece.output_bytes * spread.rows / spread.loss_tp()
    return HALVED * _kept(spread, piece)


def _kept(spread: Spread, piece: Piece) -> float:
    cost = piece.kept[spread.policy(piece)]
    if spread.plan.sequence and spread.is_layer(piece):
        # of what lies between the matrices, half is gathered for them
        shared = cost.per_row / 2
        cost = replace(cost, per_row=cost.per_row - shared, split_per_row=cost.split_per_row + shared)
    extra = 0.0
    if piece.name == spread.profile.last.name and spread.plan.tp > 1 and not spread.plan.loss_parallel:
        extra = piece.output_bytes * spread.rows * (1 - 1 / spread.plan.tp)  # logits are gathered
    if spread.plan.cp > 1:
        extra += EXCHANGED * piece.attentions * piece.output_bytes * spread.rows / spread.plan.tp
    return cost.at(spread.rows, _tp(spread, piece)) + extra


def _tp(spread: Spread, piece: Piece) -> int:
    return spread.loss_tp() if piece.name == spread.profile.loss.name else spread.plan.tp


def _passes(spread: Spread) -> list[list[tuple[Pass, float]]]:
    """By place along pp: its passes, and the bytes of activations that other micro-batches than theirs hold meanwhile."""
    plan = spread.plan
    ends = [_ends(spread, stage) for stage in range(plan.virtual_stages)]
    kept = [sum(_kept(spread, piece) for piece in pieces) for pieces in ends]
    halved = [0.0, *(sum(_halved(spread, piece) for piece in pieces) for pieces in ends[1:])]
    return pipeline.passes(plan, kept, halved)


def _pipeline_buffers(spread: Spread, place: int) -> float:
    """A stage has a buffer for what it receives of every micro-batch, in both directions."""
    plan = spread.plan
    if plan.pp == 1:
        return 0.0
    stages = spread.stages()
    total = 0.0
    for stage in spread.stages_of(place):
        if stage:
            total += plan.pieces * stages[stage - 1][-1].output_bytes * spread.rows
        if stage < len(stages) - 1:
            total += plan.pieces * stages[stage][-1].output_bytes * spread.rows
    return total


def _gathered(spread: Spread, pieces: list[Piece], piece: Piece, size: float) -> tuple[float, float]:
    """Params that FSDP2 has together during a pass of `piece`, and the buffer that a layer's travel through: all with
    zero=2; with zero=3 what is in no layer, and the layer."""
    layers = sum(spread.values([each]) * VALUE_BYTES for each in pieces if spread.is_layer(each))
    own = spread.values([piece]) * VALUE_BYTES if spread.is_layer(piece) else 0.0
    return (size if spread.plan.zero == 2 else size - layers + own), own
