"""A parallel plan: the degrees of every kind of parallelism of a training, as one value.

    dp=2,tp=2,pp=2,schedule=interleaved,microbatches=8

A plan is checked against the model and the number of processes before anything starts (`models.pretrain.plan_rules`). No
torch here, so that commands may read and check plans.

Axes, from the slowest-varying rank to the fastest: `pp` stages of layers, `dp` = `replicate` x `shard` shares of the
batch, `cp` shares of the sequence, `tp` shares of every matrix. The last axes communicate most, so neighbouring ranks,
which a launcher puts on one host, belong to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from models.options import OptionError, bounded, read

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
ActivationCheckpoint = Literal["none", "selective", "full"]
POLICIES: tuple[ActivationCheckpoint, ...] = get_args(ActivationCheckpoint)
Precision = Literal["fp32", "bf16", "fp8"]
GradCompression = Literal["fp32", "fp16", "bf16", "powersgd", "onebit"]
Outer = Literal["average", "nesterov"]
Offload = Literal["none", "cpu", "disk"]
Device = Literal["cpu", "cuda"]

MAX_PROCESSES = 65536

DEGREES = ("dp", "tp", "pp", "cp", "ep")
FORMER_KEYS = {"exchange": "grad_compression", "recompute": "activation_checkpoint", "rows": "batch_shares"}
"""Former names of keys -> keys. Plans, job files and experiments written with them are still read."""


class PlanError(ValueError):
    """An invalid plan, or one that this model and these processes cannot follow; the message has every reason."""


@dataclass(frozen=True)
class ParallelPlan:
    """Degrees and variants; the default is one process.

    Attributes:
        dp: shares of the batch; each is computed by a group of cp · tp · pp processes.
        tp: shares of every matrix, split by attention head and feature (Shoeybi 2019).
        pp: stages of consecutive layers.
        cp: shares of the sequence, exchanged around attention (Jacobs 2023, Ulysses).
        ep: groups of experts; divides dp, whose ranks keep them.
        zero: what the dp ranks shard: 1 optimizer state, 2 also gradients, 3 also params (Rajbhandari 2020).
        shards: number of dp ranks that `zero` 2 and 3 shard over; 0: all. Fewer is hybrid sharding.
        sequence: with tp, also split the activations between the matrices, by sequence (Korthikanti 2022).
        loss_parallel: with tp, never gather the logits.
        schedule: order of micro-batches through the stages.
        microbatches: pieces of each rank's share of a batch: gradient accumulation without stages; 0: 1 without stages,
            2 · pp with them.
        stages: per rank, for interleaved schedules.
        split: number of layers of every stage, from the first; empty: as even as possible.
        devices: kind of processor of every rank along pp, cpu or cuda; empty: all alike.
        activation_checkpoint: which activations are recomputed in the backward pass instead of kept (Chen 2016).
        precision: of the matrix products; params and optimizer stay float32.
        grad_compression: compression of gradients between dp ranks.
        exchange_warmup: per cent of the steps in which powersgd and onebit do not compress yet.
        exchange_rank: of powersgd's matrices.
        batch_shares: weight of each dp rank's share of every batch, relative to the others; empty: equal shares.
        rebalance: number of steps after which shares are adapted to the ranks' measured speeds; 0: never.
        sync_every: number of steps that every dp rank takes alone before params are averaged; 0: gradients are averaged
            in every step.
        outer: how the averaged params are applied: as the new params (Stich 2019), or as the gradient of an outer
            optimizer (Douillard 2023, DiLoCo).
        offload: where params, gradients and optimizer state are kept between uses, with zero=3.
        compile: torch.compile for every block.
    """

    dp: int = bounded(1, 1, MAX_PROCESSES)
    tp: int = bounded(1, 1, MAX_PROCESSES)
    pp: int = bounded(1, 1, MAX_PROCESSES)
    cp: int = bounded(1, 1, MAX_PROCESSES)
    ep: int = bounded(1, 1, MAX_PROCESSES)
    zero: int = bounded(0, 0, 3)
    shards: int = bounded(0, 0, MAX_PROCESSES)
    sequence: bool = False
    loss_parallel: bool = False
    schedule: Schedule = "1f1b"
    microbatches: int = bounded(0, 0, MAX_PROCESSES)
    stages: int = bounded(1, 1, 64)
    split: tuple[int, ...] = bounded((), 1, MAX_PROCESSES)
    devices: tuple[Device, ...] = ()
    activation_checkpoint: ActivationCheckpoint = "none"
    precision: Precision = "fp32"
    grad_compression: GradCompression = "fp32"
    exchange_warmup: int = bounded(15, 0, 100)
    exchange_rank: int = bounded(4, 1, 1024)
    batch_shares: tuple[int, ...] = bounded((), 1, MAX_PROCESSES)
    rebalance: int = bounded(0, 0, 1_000_000)
    sync_every: int = bounded(0, 0, 1_000_000)
    outer: Outer = "average"
    offload: Offload = "none"
    compile: bool = False

    @property
    def processes(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def degrees(self) -> tuple[int, ...]:
        """In the order of `DEGREES`."""
        return self.dp, self.tp, self.pp, self.cp, self.ep

    @property
    def shard(self) -> int:
        """Size of the inner part of the dp axis, which params or experts are sharded over."""
        return self.ep if self.ep > 1 else (self.shards or self.dp) if self.zero >= 2 else self.dp

    @property
    def replicate(self) -> int:
        """Size of the outer part of the dp axis."""
        return self.dp // self.shard

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one rank's share."""
        return self.microbatches or (2 * self.pp if self.pp > 1 else 1)

    @property
    def virtual_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        """Interleaving needs at least two; the V-shaped schedule exactly two."""
        if self.schedule in ("interleaved", "zero-bubble", "zbv") and self.pp > 1:
            return max(2, self.stages)
        return 1

    def stage_numbers(self, place: int) -> tuple[int, ...]:
        """The stages of the rank at `place` along pp: round-robin, or in a V for the schedule of that name."""
        if self.schedule == "zbv" and self.pp > 1:
            return (place, 2 * self.pp - 1 - place)
        return tuple(place + self.pp * turn for turn in range(self.stages_per_rank))

    def layers_per_stage(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """Layer indices of every stage, for a model of `layers` layers."""
        counts = self.split or tuple(
            layers // self.virtual_stages + (stage < layers % self.virtual_stages)
            for stage in range(self.virtual_stages)
        )
        ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
        return tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))

    def __str__(self) -> str:
        """As `parse` reads it: the keys that differ from the default."""
        return (
            ",".join(
                f"{field.name}={_format(getattr(self, field.name))}"
                for field in dataclasses.fields(self)
                if getattr(self, field.name) != field.default
            )
            or "dp=1"
        )


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that limit its plans; 0 where the model has no such thing.

    Attributes:
        layers: blocks that a pipeline may split between.
        heads: attention heads.
        kv_heads: of keys and values, where they are fewer.
        width, hidden: features between blocks, and inside a block's feed-forward network.
        vocab: rows of the embedding and columns of the head.
        length: tokens of one sequence; 0 where sequences cannot be split.
        attention: whether its layout names its attention, around which parts of sequences are exchanged.
        experts: of one layer.
        tensor: whether its layout says how its matrices split.
        head: whether its layout names the matrix of the logits.
        tied: whether its first and last modules share a param.
        documents: whether attention is confined to documents, which are found in the tokens of whole sequences.
    """

    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    width: int = 0
    hidden: int = 0
    vocab: int = 0
    length: int = 0
    attention: bool = False
    experts: int = 0
    tensor: bool = False
    head: bool = False
    tied: bool = False
    documents: bool = False


def parse(text: str, base: Mapping[str, Any] | None = None) -> ParallelPlan:
    """The plan of `base`, the `[plan]` table of a configuration, with the keys of `text`, "key=value,…", replaced.

    Raises:
        PlanError: an unknown key, or a value of the wrong kind or out of range.
    """
    table: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise PlanError(f"plan: {part!r} is not of the form key=value, such as dp=2")
        table[key.strip()] = value.strip()
    return from_table(canonical(base or {}) | canonical(table))


def from_table(table: Mapping[str, Any]) -> ParallelPlan:
    """The plan of a table; values may be text, as on a command line. Former names of keys are accepted."""
    hints = get_type_hints(ParallelPlan)
    values = {key: _from_text(value, hints.get(key)) for key, value in canonical(table).items()}
    try:
        return read(ParallelPlan, values, "plan")
    except OptionError as error:
        raise PlanError(str(error)) from None


def canonical(table: Mapping[str, Any]) -> dict[str, Any]:
    """`table` with the current names of its keys.

    Raises:
        PlanError: a key is there under both its names.
    """
    for former, key in FORMER_KEYS.items():
        if former in table and key in table:
            raise PlanError(f"plan: {former} is the former name of {key}; use only {key}")
    return {FORMER_KEYS.get(key, key): value for key, value in table.items()}


def _from_text(value: Any, hint: Any) -> Any:
    """`value` as a table has it, or what it says: a truth value, a number, or several such as 2+3+3."""
    if hint is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower(), value)
    if not isinstance(value, str):
        return value
    if get_origin(hint) is tuple:
        return tuple(
            _from_text(part, get_args(hint)[0]) for part in value.strip("[]").replace("+", " ").split()
        )
    return int(value) if hint is int and value.strip().isdecimal() else value


def _format(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
