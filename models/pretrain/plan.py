"""How a training is spread over processes: the degrees of every kind of parallelism, as one value.

    dp=2,tp=2,pp=2,schedule=interleaved,microbatches=8

A plan is checked against the model and the number of processes before anything starts; an impossible one is
refused with all its reasons. No torch here, so that commands may read and check plans.

Axes, from the slowest-varying rank to the fastest: `pp` stages of layers, `dp` = `replicate` x `shard` shares of
the batch, `cp` shares of the sequence, `tp` shares of every matrix. Heavy traffic is that of the last axes, so
neighbouring ranks, which a launcher puts on one host, carry it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from models.options import bounded

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16"]
Exchange = Literal["fp32", "fp16", "bf16", "powersgd", "onebit"]
Outer = Literal["average", "nesterov"]
Offload = Literal["none", "cpu", "disk"]
Device = Literal["cpu", "cuda"]

MOST = 65536


class PlanError(ValueError):
    """No such plan, or none that this model and these processes can follow; the message gives every reason."""


@dataclass(frozen=True)
class ParallelPlan:
    """Degrees and variants; the default is one process.

    Attributes:
        dp: shares of the batch; every one is computed by a group of cp · tp · pp processes.
        tp: shares of every matrix, split by attention head and feature (Shoeybi 2019).
        pp: stages of consecutive layers.
        cp: shares of the sequence, exchanged around attention (Jacobs 2023, Ulysses).
        ep: groups of experts; divides dp, whose ranks keep them.
        zero: what the dp ranks share out: 1 optimizer state, 2 gradients too, 3 params too (Rajbhandari 2020).
        shards: over how many of the dp ranks `zero` 2 and 3 spread; 0: all. Fewer is hybrid sharding.
        sequence: with tp, also split what lies between the matrices, by sequence (Korthikanti 2022).
        loss_parallel: with tp, never gather the logits.
        schedule: order of micro-batches through the stages.
        microbatches: into how many pieces each rank's share of a batch is cut: gradient accumulation without
            stages; 0: 1 without stages, 2 · pp with them.
        stages: per rank, for the schedules that interleave.
        split: layers of every stage, from the first; empty: as even as can be.
        devices: kind of processor of every place along pp, cpu or cuda; empty: all alike.
        recompute: which activations are computed again in the backward pass rather than kept (Chen 2016).
        precision: of the matrix products; params and optimizer stay float32.
        exchange: how gradients are coded between dp ranks.
        exchange_warmup: per cent of the steps in which powersgd and onebit code nothing yet.
        exchange_rank: of powersgd's matrices.
        rows: of every batch, one number for each dp rank, relative to the others; empty: equal shares.
        rebalance: shares follow the ranks' speeds, measured anew every so many steps; 0: never.
        sync_every: steps that every dp rank takes alone before params are averaged; 0: gradients are, in every step.
        outer: what becomes of that average: the new params (Stich 2019), or the gradient of an outer optimizer
            (Douillard 2023, DiLoCo).
        offload: where params, gradients and optimizer state rest between uses, with zero=3.
        compile: torch.compile for every block.
    """

    dp: int = bounded(1, 1, MOST)
    tp: int = bounded(1, 1, MOST)
    pp: int = bounded(1, 1, MOST)
    cp: int = bounded(1, 1, MOST)
    ep: int = bounded(1, 1, MOST)
    zero: int = bounded(0, 0, 3)
    shards: int = bounded(0, 0, MOST)
    sequence: bool = False
    loss_parallel: bool = False
    schedule: Schedule = "1f1b"
    microbatches: int = bounded(0, 0, MOST)
    stages: int = bounded(1, 1, 64)
    split: tuple[int, ...] = ()
    devices: tuple[Device, ...] = ()
    recompute: Recompute = "none"
    precision: Precision = "fp32"
    exchange: Exchange = "fp32"
    exchange_warmup: int = bounded(15, 0, 100)
    exchange_rank: int = bounded(4, 1, 1024)
    rows: tuple[int, ...] = ()
    rebalance: int = bounded(0, 0, 1_000_000)
    sync_every: int = bounded(0, 0, 1_000_000)
    outer: Outer = "average"
    offload: Offload = "none"
    compile: bool = False

    @property
    def processes(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shard(self) -> int:
        """Size of the inner part of the dp axis: what params, or experts, are spread over."""
        return self.ep if self.ep > 1 else (self.shards or self.dp) if self.zero >= 2 else self.dp

    @property
    def replicate(self) -> int:
        """Size of the outer part of the dp axis."""
        return self.dp // self.shard

    @property
    def pieces(self) -> int:
        """Micro-batches of one rank's share."""
        return self.microbatches or (2 * self.pp if self.pp > 1 else 1)

    @property
    def virtual_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        """Interleaving needs two at least; the V-shaped schedule exactly two."""
        if self.schedule in ("interleaved", "zero-bubble", "zbv") and self.pp > 1:
            return max(2, self.stages)
        return 1

    def layers_of(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """Layer numbers of every stage, of `layers` in all."""
        counts = self.split or tuple(
            layers // self.virtual_stages + (stage < layers % self.virtual_stages)
            for stage in range(self.virtual_stages)
        )
        ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
        return tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))

    def __str__(self) -> str:
        """As `parse` reads it: what differs from the default."""
        return (
            ",".join(
                f"{field.name}={_written(getattr(self, field.name))}"
                for field in dataclasses.fields(self)
                if getattr(self, field.name) != field.default
            )
            or "dp=1"
        )


@dataclass(frozen=True)
class Sizes:
    """What of a model limits a plan; 0 where the model has no such thing.

    Attributes:
        layers: blocks that a pipeline may split between.
        heads: attention heads.
        width, hidden: features between blocks, and inside a block's feed-forward part.
        vocab: rows of the embedding and columns of the head.
        length: tokens of one sequence; 0 where sequences cannot be split.
        experts: of one layer.
        tensor: whether it says how its matrices split.
        head: whether it says which matrix gives the logits.
        tied: whether its first and last modules share a param.
    """

    layers: int = 0
    heads: int = 0
    width: int = 0
    hidden: int = 0
    vocab: int = 0
    length: int = 0
    experts: int = 0
    tensor: bool = False
    head: bool = False
    tied: bool = False


def parse(text: str, base: Mapping[str, Any] | None = None) -> ParallelPlan:
    """The plan that `text`, "key=value,…", makes of `base`, the `[plan]` table of a configuration.

    Raises:
        PlanError: an unknown key, or a value of another kind or outside its range.
    """
    given: dict[str, Any] = dict(base or {})
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise PlanError(f"plan: {part!r} is not of the form key=value, such as dp=2")
        given[key.strip()] = value.strip()
    return from_table(given)


def from_table(given: Mapping[str, Any]) -> ParallelPlan:
    """The plan of a table; values may be text, as on a command line."""
    hints = get_type_hints(ParallelPlan)
    fields = {field.name: field for field in dataclasses.fields(ParallelPlan)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise PlanError(f"plan: unknown key {key!r}{hint}; known: {', '.join(fields)}")
        values[key] = _value(key, value, hints[key], fields[key].metadata)
    return ParallelPlan(**values)


def check(plan: ParallelPlan, sizes: Sizes, *, batch_size: int, processes: int | None = None) -> None:
    """Makes sure that the model and the processes can follow `plan`.

    Args:
        batch_size: rows of a global batch.
        processes: how many there are, or None where they will be started to fit.

    Raises:
        PlanError: with every reason.
    """
    problems = [*_problems(plan, sizes, batch_size)]
    if processes is not None and processes != plan.processes:
        problems.insert(
            0,
            f"pp={plan.pp} · dp={plan.dp} · cp={plan.cp} · tp={plan.tp} need {plan.processes} processes, "
            f"there are {processes}",
        )
    if problems:
        raise PlanError(f"plan {plan}: " + "; ".join(problems))


def _problems(plan: ParallelPlan, sizes: Sizes, batch_size: int) -> list[str]:
    pp, dp, cp, tp, ep = plan.pp, plan.dp, plan.cp, plan.tp, plan.ep
    found = []

    def unless(fine: bool, reason: str) -> None:
        if not fine:
            found.append(reason)

    if tp > 1:
        unless(sizes.tensor, "tp needs a model that says how its matrices split (its `layout`)")
        unless(sizes.heads % tp == 0, f"tp={tp} must divide the {sizes.heads} heads")
        unless(sizes.hidden % tp == 0, f"tp={tp} must divide the {sizes.hidden} hidden features")
    if plan.sequence:
        unless(tp > 1, "sequence splits over the tp ranks: it needs tp of 2 or more")
        unless(sizes.length > 0, "sequence needs a model whose sequences can be split")
        unless(sizes.length % (tp * cp) == 0, f"tp·cp={tp * cp} must divide the {sizes.length} tokens")
    if plan.loss_parallel:
        unless(tp > 1, "loss_parallel needs tp of 2 or more")
        unless(sizes.head, "loss_parallel needs a model that says what its head is (its `layout`)")
    if cp > 1:
        unless(sizes.heads > 0, "cp needs a model with attention")
        unless(sizes.heads // tp % cp == 0, f"cp={cp} must divide the {sizes.heads // tp} heads of a tp rank")
        unless(sizes.length > 0, "cp needs a model whose sequences can be split")
        unless(sizes.length % cp == 0, f"cp={cp} must divide the {sizes.length} tokens")
    if ep > 1:
        unless(sizes.experts > 0, "ep needs a model with experts")
        unless(dp % ep == 0, f"ep={ep} must divide dp={dp}")
        unless(sizes.experts % ep == 0, f"ep={ep} must divide the {sizes.experts} experts")
        unless(plan.zero == 0, "ep keeps experts on the dp ranks and goes with zero=0")
        unless(tp == 1, "ep goes with tp=1")
    if pp > 1:
        virtual = plan.virtual_stages
        unless(not sizes.tied, "stages cannot share a param as this model's do (its option tie)")
        unless(sizes.layers >= virtual, f"{virtual} stages need as many layers, the model has {sizes.layers}")
        if plan.split:
            unless(
                len(plan.split) == virtual,
                f"split names {len(plan.split)} stages, the schedule has {virtual}",
            )
            unless(
                sum(plan.split) == sizes.layers,
                f"split adds up to {sum(plan.split)}, there are {sizes.layers} layers",
            )
            unless(min(plan.split) > 0, "split leaves a stage without a layer")
        found += _schedule_problems(plan)
        unless(plan.zero in (0, 2, 3), "zero=1 goes with pp=1; use zero=2")
        if plan.devices:
            unless(
                len(plan.devices) == pp, f"devices names {len(plan.devices)} places along pp, there are {pp}"
            )
            unless(
                plan.zero == 0 and tp == cp == ep == 1,
                "devices goes with pp and dp alone and zero=0: what else moves between them cannot leave a GPU",
            )
    else:
        for key in ("split", "devices"):
            unless(not getattr(plan, key), f"{key} needs pp of 2 or more")
        unless(plan.stages == 1, "stages needs pp of 2 or more")
    if plan.zero == 1:
        unless(tp == 1, "zero=1 goes with tp=1; use zero=2")
    if plan.shards:
        unless(plan.zero >= 2, "shards needs zero=2 or 3")
        unless(cp == 1, "shards goes with cp=1")
        unless(dp % plan.shards == 0, f"shards={plan.shards} must divide dp={dp}")
    if plan.exchange != "fp32":
        unless(
            plan.zero <= 1 and tp == pp == cp == ep == 1,
            f"exchange={plan.exchange} goes with dp alone and zero of 0 or 1",
        )
        unless(
            plan.exchange != "onebit" or plan.zero == 0,
            "onebit goes with zero=0: every process keeps all momenta",
        )
    if plan.rows:
        unless(len(plan.rows) == dp, f"rows names {len(plan.rows)} shares, there are dp={dp} ranks")
        unless(pp == 1, "stages need equal pieces: rows goes with pp=1")
    if plan.rebalance:
        unless(dp > 1, "rebalance needs dp of 2 or more")
        unless(
            plan.zero <= 1 and tp == pp == cp == ep == 1,
            "rebalance goes with dp alone and zero of 0 or 1, where a rank's own speed can be told",
        )
    if plan.sync_every:
        unless(
            plan.zero == 0 and cp == ep == 1 and plan.exchange == "fp32",
            "sync_every goes with zero=0, cp=1, ep=1 and exchange=fp32",
        )
        unless(
            not plan.rows and not plan.rebalance,
            "sync_every averages ranks alike and goes with equal shares: no rows, no rebalance",
        )
    unless(plan.outer == "average" or plan.sync_every > 0, f"outer={plan.outer} needs sync_every")
    unless(plan.offload == "none" or plan.zero == 3, f"offload={plan.offload} needs zero=3")
    unless(
        batch_size >= dp * plan.pieces,
        f"a batch of {batch_size} rows cannot be shared by dp={dp} ranks in {plan.pieces} pieces each",
    )
    if pp > 1:
        unless(
            batch_size % (dp * plan.pieces) == 0,
            f"stages need equal pieces: dp·microbatches={dp * plan.pieces} must divide the {batch_size} rows of a batch",
        )
    return found


def _schedule_problems(plan: ParallelPlan) -> list[str]:
    """What the schedules themselves ask for, which torch would say once everything has started, or not at all."""
    pp, pieces, schedule = plan.pp, plan.pieces, plan.schedule
    apart = schedule in ("zero-bubble", "zbv")
    rounds = max(1, pieces // pp)
    asked = [
        (
            schedule != "1f1b" or pieces >= pp,
            f"1f1b needs microbatches={pieces} to be at least pp={pp}; gpipe does not",
        ),
        (
            schedule not in ("interleaved", "zero-bubble") or pieces % rounds == 0,
            f"{schedule} runs microbatches={pieces} in {rounds} rounds of pp={pp} or more, which must be equal: "
            f"{pieces // pp * pp} would do",
        ),
        (
            schedule != "zbv" or plan.stages in (1, 2),
            "zbv has exactly two stages a rank: stages=2 or none",
        ),
        (
            plan.stages == 1 or apart or schedule == "interleaved",
            f"{schedule} has one stage a rank: stages={plan.stages} needs interleaved or zero-bubble",
        ),
        (
            not apart or plan.zero < 3,
            f"{schedule} computes gradients of weights after those of the inputs, when zero=3 has let go of the "
            "params: use zero=2",
        ),
        (
            not apart or plan.recompute != "selective",
            f"{schedule} goes through a block twice, selective recomputation can do it once: use recompute=full",
        ),
        (
            not apart or not plan.compile,
            f"{schedule} needs the gradients of inputs and weights apart, compile fuses them",
        ),
    ]
    return [reason for fine, reason in asked if not fine]


def _value(key: str, value: Any, hint: Any, bounds: Mapping[str, Any]) -> Any:
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise PlanError(f"plan: {key} is {value!r}, expected one of {', '.join(get_args(hint))}")
    if hint is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        if isinstance(value, bool) or str(value).lower() in words:
            return value if isinstance(value, bool) else words[str(value).lower()]
        raise PlanError(f"plan: {key} is {value!r}, expected true or false")
    if hint is int:
        number = _whole(value)
        if number is None or not bounds["least"] <= number <= bounds["most"]:
            raise PlanError(
                f"plan: {key} is {value!r}, expected a whole number from {bounds['least']} to {bounds['most']}"
            )
        return number
    parts = value.strip("[]").replace("+", " ").split() if isinstance(value, str) else value
    if key == "devices":
        if not isinstance(parts, list | tuple) or not set(parts) <= set(get_args(Device)):
            raise PlanError(
                f"plan: devices is {value!r}, expected one of cpu and cuda a stage, such as cpu+cuda"
            )
        return tuple(parts)
    numbers = [_whole(part) for part in parts] if isinstance(parts, list | tuple) else [None]
    if any(number is None or number < 1 for number in numbers):
        raise PlanError(f"plan: {key} is {value!r}, expected counts such as 2+3+3")
    return tuple(numbers)


def _whole(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else None


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
