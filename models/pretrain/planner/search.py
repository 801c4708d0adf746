"""All plans for so many processes, those that fit ranked by predicted seconds, the others with what refuses them.

What the given table fixes stays. Recomputation only costs time where memory suffices, so the least that fits is taken;
layers are split over stages so that the slowest stage is as fast as can be, embedding, head and loss included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from models.pretrain import plan as plans
from models.pretrain.plan import ParallelPlan, PlanError, Recompute
from models.pretrain.planner import memory, predict
from models.pretrain.planner.memory import Memory
from models.pretrain.planner.predict import Prediction
from models.pretrain.planner.profile import Profile
from models.pretrain.planner.spread import Spread

POLICIES: tuple[Recompute, ...] = get_args(Recompute)
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
MOST_PIECES = 64


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and what is predicted of it."""

    plan: ParallelPlan
    prediction: Prediction
    memory: Memory


@dataclass(frozen=True)
class Refused:
    """A plan that does not, and why."""

    plan: ParallelPlan
    reason: str


@dataclass(frozen=True)
class Found:
    """`ranking`: the fastest first; `refused`: in no order."""

    ranking: list[Candidate] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def search(
    profile: Profile, batch_size: int, processes: int, given: Mapping[str, Any] | None = None
) -> Found:
    """Every plan for `processes` that agrees with the table `given`.

    Raises:
        PlanError: `given` is no part of a plan.
    """
    found = Found()
    for plan in candidates(profile, batch_size, processes, given or {}):
        try:
            plans.check(plan, profile.sizes, batch_size=batch_size, processes=processes)
        except PlanError as error:
            found.refused.append(Refused(plan, str(error).partition(": ")[2]))
            continue
        fitting = _fitting(plan, profile, batch_size, fixed="recompute" in (given or {}))
        if isinstance(fitting, Refused):
            found.refused.append(fitting)
        else:
            plan, needs = fitting
            found.ranking.append(Candidate(plan, predict.predict(plan, profile, batch_size), needs))
    found.ranking.sort(key=lambda candidate: (candidate.prediction.seconds, str(candidate.plan)))
    return found


def candidates(
    profile: Profile, batch_size: int, processes: int, given: Mapping[str, Any]
) -> Iterator[ParallelPlan]:
    """Plans for so many processes, possible or not; variants of one that is not are left out."""
    base = plans.from_table(given)
    divisors = [number for number in range(1, processes + 1) if processes % number == 0]

    def choices(key: str, values: Sequence[Any]) -> Sequence[Any]:
        return (getattr(base, key),) if key in given else values

    for tp, pp, cp in itertools.product(*(choices(key, divisors) for key in ("tp", "pp", "cp"))):
        if processes % (tp * pp * cp):
            continue
        dp = processes // (tp * pp * cp)
        if "dp" in given and base.dp != dp:
            continue
        shape = replace(base, dp=dp, tp=tp, pp=pp, cp=cp)
        if _refused(replace(shape, zero=0, microbatches=1, schedule="gpipe"), profile, batch_size):
            yield replace(shape, microbatches=1, schedule="gpipe")
            continue
        experts = choices("ep", divisors if profile.sizes.experts else (1,))
        zeros = choices("zero", (0, 1, 2, 3) if dp * cp > 1 else (0,))
        switches = (False, True) if tp > 1 else (False,)
        for ep, zero, sequence, split_loss in itertools.product(
            [number for number in experts if dp % number == 0],
            zeros,
            choices("sequence", switches),
            choices("loss_parallel", switches),
        ):
            variant = replace(shape, ep=ep, zero=zero, sequence=sequence, loss_parallel=split_loss)
            schedules = choices("schedule", SCHEDULES if pp > 1 else (base.schedule,))
            for schedule, pieces in itertools.product(
                schedules, choices("microbatches", _piece_counts(batch_size // dp, pp))
            ):
                timed = replace(variant, schedule=schedule, microbatches=pieces)
                yield timed
                if pp > 1 and "split" not in given and len(profile.layers) >= timed.virtual_stages:
                    uneven = replace(timed, split=balanced(timed, profile, batch_size))
                    if uneven.layers_of(len(profile.layers)) != timed.layers_of(len(profile.layers)):
                        yield uneven


def balanced(plan: ParallelPlan, profile: Profile, batch_size: int) -> tuple[int, ...]:
    """Layers of every stage, so that the slowest stage is as fast as can be.

    By dynamic programming over (stages, layers): the best of s stages for the first n layers is, over the layers k of
    the last of them, the smaller maximum of that stage and the best of s - 1 for n - k.
    """
    spread = Spread(replace(plan, split=()), profile, batch_size)
    layers, stages = len(profile.layers), plan.virtual_stages

    def seconds(piece: Any, tp: int) -> float:
        policy = spread.policy(piece)
        return float(piece.forward.at(spread.rows, tp) + piece.backward[policy].at(spread.rows, tp))

    sums = [0.0]
    for layer in profile.layers:
        sums.append(sums[-1] + seconds(layer, plan.tp))
    before = seconds(profile.first, plan.tp)
    after = seconds(profile.last, plan.tp) + seconds(profile.loss, spread.loss_tp())

    def cost(stage: int, begin: int, end: int) -> float:
        extra = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return sums[end] - sums[begin] + extra

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


def _fitting(
    plan: ParallelPlan, profile: Profile, batch_size: int, fixed: bool
) -> tuple[ParallelPlan, Memory] | Refused:
    """`plan` with as little recomputation as memory allows."""
    limit = profile.machine.memory_bytes
    tried = [memory.needed(plan, profile, batch_size)]
    policies = () if fixed or not profile.layers else POLICIES[1:]
    for policy in (plan.recompute, *policies):
        plan = replace(plan, recompute=policy)
        tried.append(memory.needed(plan, profile, batch_size))
        if not limit or tried[-1].bytes <= limit:
            return plan, tried[-1]
    needs = min(tried, key=lambda memory: memory.bytes)
    largest = max(needs.parts, key=lambda name: needs.parts[name])
    return Refused(
        plan,
        f"needs {needs.bytes / 2**20:.0f} MiB a process, there are {limit / 2**20:.0f}; most of it {largest}",
    )


def _refused(plan: ParallelPlan, profile: Profile, batch_size: int) -> bool:
    try:
        plans.check(plan, profile.sizes, batch_size=batch_size)
    except PlanError:
        return True
    return False


def _piece_counts(rows: int, pp: int) -> list[int]:
    """Micro-batches to try for so many rows of a process: powers of two, of pp with stages."""
    counts = [pp * 2**power for power in range(8)]
    if pp > 1:
        counts.append(pp // 2)
    return [
        count for count in sorted(counts) if 1 <= count <= min(max(1, rows), max(MOST_PIECES, 4 * pp))
    ] or [1]
