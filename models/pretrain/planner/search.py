"""Ranks all plans for a number of processes by predicted seconds, and lists those that do not fit with the reason.

Keys in the fixed table are kept. Plans that cannot be faster than another one are left out:

    recomputation       only costs time where memory suffices: the least that fits is used
    split               even, unless another makes the slowest stage faster by a twentieth, embedding, head, loss included
    micro-batches       one without stages, as more only save memory; with stages from pp / 2 to 4 · pp, where the bubble is
                        a fifth or less (Huang 2019, section 3.3), to 2 · pp for schedules with a smaller bubble
    gpipe, naive, zbv   1f1b idles as long as gpipe and holds less, so gpipe is for fewer micro-batches than stages, where
                        there is no 1f1b; naive idles longer; zero-bubble idles no longer than zbv and holds as much
    zero                with 3, params are gathered twice as often as with 2; with stages and 2, for every micro-batch
    sequence            sends as much as without
    loss_parallel       always on with stages, since it sends less; both ways without stages

If one of the remaining plans would not fit in memory without recomputation, plans of its degrees that only save memory
are included too: more micro-batches, zbv, zero of 2 and 3, sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from models.pretrain import plan_rules
from models.pretrain.plan import POLICIES, ParallelPlan, canonical, from_table
from models.pretrain.planner import memory, predict
from models.pretrain.planner.memory import Memory
from models.pretrain.planner.placement import Placement
from models.pretrain.planner.predict import Prediction
from models.pretrain.planner.profile import Piece, Profile

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
MAX_PIECES = 64
WORTH_UNEVEN = 0.95
EVERY_COUNT = 8
"""Up to which every number of processes is planned for."""


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, its prediction, and the result of `verify`.

    Attributes:
        measured: seconds of a step.
        correction: how many times longer than predicted similar plans took.
    """

    plan: ParallelPlan
    prediction: Prediction
    memory: Memory
    measured: float | None = None
    correction: float = 1.0

    @property
    def seconds(self) -> float:
        """Best known seconds of a step."""
        return self.prediction.seconds * self.correction if self.measured is None else self.measured


@dataclass(frozen=True)
class Refused:
    """A plan that does not fit, and why."""

    plan: ParallelPlan
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """`ranking`: the fastest first; `refused`: unordered."""

    ranking: list[Candidate] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def search(
    profile: Profile, batch_size: int, processes: int, fixed: Mapping[str, Any] | None = None
) -> SearchResult:
    """Ranks every plan for `processes` that agrees with the table `fixed`.

    Raises:
        PlanError: `fixed` is not part of a valid plan.
    """
    table = canonical(fixed or {})
    result = SearchResult()
    for plan in candidates(profile, batch_size, processes, table):
        problems = plan_rules.problems(plan, profile.sizes, batch_size=batch_size, processes=processes)
        if problems:
            result.refused.append(Refused(plan, "; ".join(problems)))
            continue
        fitting = _fitting(plan, profile, batch_size, fixed="activation_checkpoint" in table)
        if isinstance(fitting, Refused):
            result.refused.append(fitting)
        else:
            plan, needs = fitting
            result.ranking.append(Candidate(plan, predict.predict(plan, profile, batch_size), needs))
    result.ranking.sort(key=_sort_key)
    return result


def search_up_to(
    profile: Profile, batch_size: int, processes: int, fixed: Mapping[str, Any] | None = None
) -> SearchResult:
    """Ranks every plan for `processes` with plans for fewer: on a machine with fewer cores, or for a small model, they can
    be faster.

    For each smaller number, those of `counts`, it has the best plan of every combination of degrees.

    Raises:
        PlanError: as `search`.
    """
    result = search(profile, batch_size, processes, fixed)
    ranking = [*result.ranking]
    for count in counts(processes)[:-1]:
        by_degrees: dict[tuple[int, ...], Candidate] = {}
        for candidate in search(profile, batch_size, count, fixed).ranking:
            by_degrees.setdefault(candidate.plan.degrees, candidate)
        ranking += by_degrees.values()
    return replace(result, ranking=sorted(ranking, key=_sort_key))


def counts(processes: int) -> list[int]:
    """Numbers of processes to plan for: all up to a few, of more the divisors and powers of two."""
    return [
        count
        for count in range(1, processes + 1)
        if count <= EVERY_COUNT or processes % count == 0 or count & (count - 1) == 0
    ]


def _sort_key(candidate: Candidate) -> tuple[float, str]:
    return candidate.seconds, str(candidate.plan)


def candidates(
    profile: Profile, batch_size: int, processes: int, fixed: Mapping[str, Any]
) -> Iterator[ParallelPlan]:
    """Plans for so many processes, valid or not; variants of an invalid one are left out."""
    base = from_table(fixed)
    divisors = [number for number in range(1, processes + 1) if processes % number == 0]
    for tp, pp, cp in itertools.product(
        *(_choices(base, fixed, key, divisors) for key in ("tp", "pp", "cp"))
    ):
        if processes % (tp * pp * cp):
            continue
        dp = processes // (tp * pp * cp)
        if "dp" in fixed and base.dp != dp:
            continue
        shape = replace(base, dp=dp, tp=tp, pp=pp, cp=cp)
        simplest = replace(shape, zero=0, microbatches=1, schedule="gpipe")
        if plan_rules.problems(simplest, profile.sizes, batch_size=batch_size):
            yield replace(shape, microbatches=1, schedule="gpipe")
            continue
        variants = [*_variants(shape, profile, batch_size, fixed, saving=False)]
        if _exceeds_memory(variants, profile, batch_size):
            variants = [*_variants(shape, profile, batch_size, fixed, saving=True)]
        yield from variants


def _variants(
    shape: ParallelPlan, profile: Profile, batch_size: int, fixed: Mapping[str, Any], saving: bool
) -> Iterator[ParallelPlan]:
    """Plans of the same degrees; with `saving`, also those that only save memory."""
    dp, tp, pp = shape.dp, shape.tp, shape.pp
    experts = range(1, dp + 1) if profile.sizes.experts else (1,)
    zeros: Sequence[int] = (0,)
    if dp * shape.cp > 1:
        zeros = (0, 1, 2, 3) if saving else (0, 1, 2) if pp == 1 else (0,)
    zeros = [zero for zero in zeros if zero != 1 or tp == pp == 1]
    sequences = (False, True) if tp > 1 and saving else (False,)
    losses: Sequence[bool] = (False,)
    if tp > 1 and profile.sizes.head:
        losses = (False, True) if pp == 1 or saving else (True,)
    tried = {
        "ep": [ep for ep in experts if dp % ep == 0],
        "zero": zeros,
        "sequence": sequences,
        "loss_parallel": losses,
        "schedule": SCHEDULES if pp > 1 else (shape.schedule,),
        "microbatches": _piece_counts(batch_size // dp, pp, saving),
    }
    for values in itertools.product(*(_choices(shape, fixed, key, tried[key]) for key in tried)):
        plan = replace(shape, **dict(zip(tried, values, strict=True)))
        if pp == plan.microbatches == 1:
            plan = replace(plan, microbatches=0)
        if saving or _can_be_best(plan, fixed):
            yield plan if "split" in fixed else _split(plan, profile, batch_size)


def _choices(base: ParallelPlan, fixed: Mapping[str, Any], key: str, values: Sequence[Any]) -> Sequence[Any]:
    return (getattr(base, key),) if key in fixed else values


def _can_be_best(plan: ParallelPlan, fixed: Mapping[str, Any]) -> bool:
    """Whether no plan with another schedule or number of micro-batches is always at least as fast."""
    if plan.pp == 1 or "schedule" in fixed:
        return True
    if plan.num_microbatches < plan.pp or plan.schedule in ("gpipe", "zbv"):
        return plan.schedule == "gpipe" and plan.num_microbatches < plan.pp
    return plan.schedule == "1f1b" or plan.num_microbatches <= 2 * plan.pp or "microbatches" in fixed


def _exceeds_memory(variants: Sequence[ParallelPlan], profile: Profile, batch_size: int) -> bool:
    """Whether any of the valid variants exceeds the memory limit."""
    limit = profile.machine.memory_of(variants[0].processes) if variants else 0.0
    return limit > 0 and any(
        memory.peak(plan, profile, batch_size).bytes > limit
        for plan in variants
        if not plan_rules.problems(plan, profile.sizes, batch_size=batch_size)
    )


def _split(plan: ParallelPlan, profile: Profile, batch_size: int) -> ParallelPlan:
    """`plan` with layers split unevenly over stages, where that is worthwhile."""
    if plan.pp == 1 or len(profile.layers) < plan.virtual_stages:
        return plan
    uneven = replace(plan, split=balanced(plan, profile, batch_size))
    gain = _slowest(uneven, profile, batch_size) / _slowest(plan, profile, batch_size)
    return uneven if gain <= WORTH_UNEVEN else plan


def _slowest(plan: ParallelPlan, profile: Profile, batch_size: int) -> float:
    """Seconds of the slowest stage for a micro-batch."""
    cost = _stage_costs(plan, profile, batch_size)
    ends = [0, *itertools.accumulate(len(layers) for layers in plan.layers_per_stage(len(profile.layers)))]
    return max(cost(stage, begin, end) for stage, (begin, end) in enumerate(itertools.pairwise(ends)))


def balanced(plan: ParallelPlan, profile: Profile, batch_size: int) -> tuple[int, ...]:
    """Layers of every stage that minimize the time of the slowest stage.

    By dynamic programming over (stages, layers): the best of s stages for the first n layers is, over the number k of
    layers in the last of them, the minimum of the maximum of that stage and the best of s - 1 stages for n - k layers.
    """
    layers, stages = len(profile.layers), plan.virtual_stages
    cost = _stage_costs(plan, profile, batch_size)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        further: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(stage + 1, layers - (stages - 1 - stage) + 1):
            further[end] = min(
                (max(slowest, cost(stage, begin, end)), (*split, end - begin))
                for begin, (slowest, split) in best.items()
                if begin < end
            )
        best = further
    return best[layers][1]


def _stage_costs(plan: ParallelPlan, profile: Profile, batch_size: int) -> Callable[[int, int, int], float]:
    """Seconds per micro-batch of a stage with a range of layers."""
    placement = Placement(replace(plan, split=()), profile, batch_size)
    stages = plan.virtual_stages

    def seconds(piece: Piece, tp: int) -> float:
        backward = piece.backward[placement.policy(piece)]
        return piece.forward.at(placement.rows, tp) + backward.at(placement.rows, tp)

    sums = [0.0, *itertools.accumulate(seconds(layer, plan.tp) for layer in profile.layers)]
    before = seconds(profile.first, plan.tp)
    after = seconds(profile.last, plan.tp) + seconds(profile.loss, placement.loss_tp())

    def cost(stage: int, begin: int, end: int) -> float:
        extra = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return sums[end] - sums[begin] + extra

    return cost


def _fitting(
    plan: ParallelPlan, profile: Profile, batch_size: int, fixed: bool
) -> tuple[ParallelPlan, Memory] | Refused:
    """`plan` with as little recomputation as memory allows."""
    limit = profile.machine.memory_of(plan.processes)
    tried: list[Memory] = []
    policies = () if fixed or not profile.layers else POLICIES[1:]
    for policy in (plan.activation_checkpoint, *policies):
        plan = replace(plan, activation_checkpoint=policy)
        tried.append(memory.peak(plan, profile, batch_size))
        if not limit or tried[-1].bytes <= limit:
            return plan, tried[-1]
    needs = min(tried, key=lambda memory: memory.bytes)
    return Refused(
        plan,
        f"needs {needs.bytes / 2**20:.0f} MiB a process, there are {limit / 2**20:.0f}; most of it {needs.largest}",
    )


def _piece_counts(rows: int, pp: int, saving: bool) -> list[int]:
    """Numbers of micro-batches to try for so many rows of a process: powers of two, multiples of pp with stages."""
    if saving:
        most, counts = max(MAX_PIECES, 4 * pp), [pp * 2**power for power in range(8)]
    else:
        most, counts = 4 * pp, [pp, 2 * pp, 4 * pp] if pp > 1 else [1]
    if pp > 1:
        counts.append(pp // 2)
    return [count for count in sorted(counts) if 1 <= count <= min(max(1, rows), most)] or [1]
