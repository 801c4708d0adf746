"""Peak memory of a process during a step under a plan. Pure arithmetic over a profile.

    params, gradients, optimizer state: 4 bytes a value each, sharded by zero (Rajbhandari 2020, figure 1); with sync_every, the
        params that processes had in common, and an outer momentum; errors that powersgd and onebit feed back
    activations: of the micro-batches in flight: one without stages, at most pp for 1F1B, all for GPipe
    buffers: working memory of a pass, above all logits and their gradient in float32; gathered params, flattened
        gradients, receive buffers of a pipeline

    process: Python, torch and the buffers of its libraries, measured
    allocator: on a CPU, free memory between tensors that glibc cannot return to the system

The peak is at the end of the forward pass, in the backward pass of some piece, in the exchange of gradients or in the
optimizer's step. On a CPU the sum is the resident memory of a process (VmHWM of Linux), shared libraries included; on a GPU
it is what torch allocates (`torch.cuda.max_memory_allocated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from models.pretrain.parallel.model.pipeline_schedule import Kind, Pass, held_by_others, orders
from models.pretrain.plan import ParallelPlan
from models.pretrain.planner.placement import VALUE_BYTES, Placement
from models.pretrain.planner.profile import Piece, Profile, most

HALVED = 0.55
"""Share of a transformer layer's kept bytes that are outputs of its matrices: about 9 widths of 16."""
EXCHANGED = 10
"""Tensors as large as a layer's output that cp keeps around attention: the exchanged ones, before and after."""


PROCESS_BYTES = 24 * 2**20
"""What a process takes besides while it trains: libraries of more operators, threads, buffers of messages."""
KEPT_BY_ALLOCATOR = {"whole": 0.15, "zero1": 0.3, "onebit": 0.3, "tp": 0.5, "fsdp": 0.2}
"""Free memory between tensors, relative to the tensors: of plans that keep their params, that broadcast them, that code all momenta in
one piece, of matrices that DTensor splits, and of params that FSDP2 gathers, where freed blocks are returned (`host_memory`). From the resident
memory of processes: `python -m tests.bench planner`."""

PARTS = {
    "params": "params",
    "gradients": "gradients",
    "optimizer": "the optimizer's state",
    "activations": "activations",
    "buffers": "buffers",
    "process": "Python and its libraries",
    "allocator": "free memory between tensors",
}


@dataclass(frozen=True)
class Memory:
    """Peak memory of the process that needs most.

    Attributes:
        parts: bytes at the peak, by the keys of `PARTS`; their sum is `bytes`.
    """

    bytes: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def tensors(self) -> float:
        """Bytes of tensors alone."""
        return sum(size for name, size in self.parts.items() if name not in ("process", "allocator"))

    @property
    def largest(self) -> str:
        """The largest part, in words."""
        return PARTS[max(self.parts, key=lambda name: self.parts[name])]


def peak(plan: ParallelPlan, profile: Profile, batch_size: int) -> Memory:
    """The peak of the process that needs most, over all ranks along pp."""
    placement = Placement(plan, profile, batch_size)
    by_place = [_of(placement, place, passes) for place, passes in enumerate(_passes(placement))]
    return max(by_place, key=lambda memory: memory.bytes)


def _of(placement: Placement, place: int, passes: Sequence[tuple[Pass, float]]) -> Memory:
    plan = placement.plan
    stages = placement.stages()
    mine = placement.plan.stage_numbers(place)
    sizes = {stage: placement.values(stages[stage]) * VALUE_BYTES for stage in mine}
    total = sum(sizes.values())
    n = placement.param_shards if plan.zero >= 2 and placement.data > 1 else 1
    owners = n if n > 1 else placement.data if plan.zero == 1 else 1
    state = total * placement.profile.optimizer.state / owners
    alone = placement.data > 1 and plan.sync_every > 0
    if placement.data > 1:
        state += total * _copies(plan, placement.data)
    lasting = {"params": total / n, "gradients": 0.0, "optimizer": state}
    buffers = _pipeline_buffers(placement, place)
    replicated = placement.data > 1 and plan.zero < 2 and plan.tp == plan.pp == plan.ep == 1 and not alone
    if replicated:
        buffers += total  # DistributedDataParallel's buckets
    moments = []
    with_gradients: set[int] = set()
    for (kind, stage, _), others in passes:
        # with zero=2, FSDP2 shards gradients only with the last micro-batch
        kept = n if plan.zero == 3 else 1
        accumulated = sum(sizes[each] for each in with_gradients) / kept
        for piece, activations, working, gradients in _moments(placement, kind, stage):
            gathered, flat = _gathered(placement, stage, piece, kind) if n > 1 else (0.0, 0.0)
            fresh = (
                0.0 if stage in with_gradients else gradients / (n if plan.num_microbatches == 1 else kept)
            )
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
            with_gradients.add(stage)
    if placement.data > 1 and not replicated and not alone and n == 1:
        moments.append({**lasting, "gradients": total, "activations": 0.0, "buffers": buffers + total})
    working = placement.profile.optimizer.working * _largest(placement, mine) / n
    if placement.data > 1:
        working = max(working, total * _exchanged(plan))
    moments.append({**lasting, "gradients": total / n, "activations": 0.0, "buffers": buffers + working})
    worst = max(moments, key=lambda moment: sum(moment.values()))
    machine = placement.profile.machine
    if machine.device == "cpu" and machine.process_bytes:
        share = KEPT_BY_ALLOCATOR[_allocation(plan)]
        worst = {
            **worst,
            "process": machine.process_bytes + PROCESS_BYTES,
            "allocator": share * sum(worst.values()),
        }
    return Memory(sum(worst.values()), worst)


def _copies(plan: ParallelPlan, processes: int) -> float:
    """Copies of its params that a process keeps between steps for the exchange with others."""
    if plan.sync_every:
        return 2.0 if plan.outer == "nesterov" else 1.0  # params in common, and momentum
    return {"powersgd": 1.0, "onebit": 1.0 + 1.0 / processes}.get(plan.grad_compression, 0.0)


def _exchanged(plan: ParallelPlan) -> float:
    """Copies of its params that a process makes in the optimizer's step: of their changes, the same in one piece, and the new params
    and momentum, with sync_every; of momenta in one piece, and of their signs as numbers, with onebit."""
    if plan.sync_every:
        return 4.0 if plan.outer == "nesterov" else 3.0
    return 2.5 if plan.grad_compression == "onebit" else 0.0


def _allocation(plan: ParallelPlan) -> str:
    if plan.zero >= 2:
        return "fsdp"
    if plan.tp > 1:
        return "tp"
    coded = plan.dp > 1 and plan.grad_compression == "onebit"
    return "zero1" if plan.zero else "onebit" if coded else "whole"


def _largest(placement: Placement, mine: Sequence[int]) -> float:
    """Values of the largest tensor of a rank before sharding."""
    stages, plan = placement.stages(), placement.plan
    return max(
        piece.largest * piece.local_values(plan.tp, plan.ep) / max(1, piece.local_values())
        for stage in mine
        for piece in stages[stage]
    )


def _ends(placement: Placement, stage: int) -> list[Piece]:
    """Pieces of a stage; the last one includes the loss."""
    stages = placement.stages()
    return [*stages[stage], placement.profile.loss] if stage == len(stages) - 1 else stages[stage]


def _moments(placement: Placement, kind: Kind, stage: int) -> list[tuple[Piece, float, float, float]]:
    """(piece, activations of this micro-batch, working memory of the pass, finished gradients) at every moment of one
    pass through a stage; activations of other micro-batches are not included."""
    rows, ends = placement.rows, _ends(placement, stage)
    kept = [_kept(placement, piece) for piece in ends]
    moments, before = [], 0.0
    if kind == "F":
        for piece, stays in zip(ends, kept, strict=True):
            peak = most(piece.forward_bytes[placement.policy(piece)], rows, _tp(placement, piece))
            moments.append((piece, before + stays, max(0.0, peak - stays), 0.0))
            before += stays
        return moments
    if kind == "I" and stage == 0:
        return []  # torch leaves all of it to W
    halved = kind != "B" and stage > 0
    before, waiting, gradients = sum(kept), 0.0, 0.0
    for piece, stays in zip(reversed(ends), reversed(kept), strict=True):
        peak = most(piece.backward_bytes[placement.policy(piece)], rows, _tp(placement, piece))
        if halved:
            moments.append((piece, before + waiting, max(0.0, peak - stays), gradients))
            waiting += _halved(placement, piece)
        else:
            moments.append((piece, before, max(0.0, peak - stays), gradients))
            before -= stays
        gradients += piece.local_values(placement.plan.tp, placement.plan.ep) * VALUE_BYTES
    return moments


def _halved(placement: Placement, piece: Piece) -> float:
    """Output gradients of every matrix, which a halved backward pass keeps for the gradients of the weights."""
    if piece.name == placement.profile.loss.name:
        return 0.0
    if piece.name == placement.profile.last.name:
        return piece.output_bytes * placement.rows / placement.loss_tp()
    return HALVED * _kept(placement, piece)


def _kept(placement: Placement, piece: Piece) -> float:
    cost = piece.kept[placement.policy(piece)]
    if placement.plan.sequence and placement.is_layer(piece):
        # half of the activations between the matrices are gathered for them
        shared = cost.per_row / 2
        cost = replace(cost, per_row=cost.per_row - shared, split_per_row=cost.split_per_row + shared)
    extra = 0.0
    gathers = placement.plan.tp > 1 and not placement.plan.loss_parallel
    if piece.name == placement.profile.last.name and gathers:
        extra = piece.output_bytes * placement.rows * (1 - 1 / placement.plan.tp)  # logits are gathered
    if placement.plan.cp > 1:
        extra += EXCHANGED * piece.attentions * piece.output_bytes * placement.rows / placement.plan.tp
    return cost.at(placement.rows, _tp(placement, piece)) + extra


def _tp(placement: Placement, piece: Piece) -> int:
    return placement.loss_tp() if piece.name == placement.profile.loss.name else placement.plan.tp


def _passes(placement: Placement) -> list[list[tuple[Pass, float]]]:
    """For every rank along pp: its passes, and the activation bytes of other micro-batches meanwhile."""
    plan = placement.plan
    ends = [_ends(placement, stage) for stage in range(plan.virtual_stages)]
    kept = [sum(_kept(placement, piece) for piece in pieces) for pieces in ends]
    halved = [0.0, *(sum(_halved(placement, piece) for piece in pieces) for pieces in ends[1:])]
    # micro-batches beyond the first few times pp repeat the same pattern
    all_held = plan.pp > 1 and plan.schedule == "gpipe"
    few = plan.num_microbatches if all_held else min(plan.num_microbatches, 4 * plan.pp)
    return [
        list(zip(order, held_by_others(order, kept.__getitem__, halved.__getitem__), strict=True))
        for order in orders(replace(plan, microbatches=few))
    ]


def _pipeline_buffers(placement: Placement, place: int) -> float:
    """Receive buffers of a rank's stages, for every micro-batch in both directions."""
    count, stages = placement.plan.num_microbatches, placement.stages()
    return sum(
        count * stages[sender][-1].output_bytes * placement.rows
        for stage in placement.plan.stage_numbers(place)
        for sender in (stage - 1, stage)
        if 0 <= sender < len(stages) - 1
    )


def _gathered(placement: Placement, stage: int, piece: Piece, kind: Kind) -> tuple[float, float]:
    """Params that FSDP2 has gathered during a pass of `piece`, and the buffer a layer is gathered through: all params
    with zero=2; with zero=3 those outside layers, the current layer, and on a GPU, in a backward pass, the next one already."""
    pieces = placement.stages()[stage]
    size, layers = placement.values(pieces), [each for each in pieces if placement.is_layer(each)]
    own = placement.values([piece]) if piece in layers else 0.0
    if placement.plan.zero == 2:
        return size * VALUE_BYTES, own * VALUE_BYTES
    early = placement.profile.machine.device != "cpu" and kind != "F" and piece in layers[1:]
    ahead = own if early else 0.0
    gathered = size - placement.values(layers) + own + ahead
    return gathered * VALUE_BYTES, own * VALUE_BYTES
