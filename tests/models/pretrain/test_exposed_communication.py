"""What the planner predicts of gradients that are exchanged during the backward pass: the same laws for every plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

import numpy as np
import pytest

from models.pretrain import plan as plans
from models.pretrain.parallel.data import buckets
from models.pretrain.planner import collective_cost, memory, predict, profile
from models.pretrain.planner.collective_cost import Link
from models.pretrain.planner.placement import Placement
from tests.bench import gradient_overlap
from tests.models.pretrain.made_profile import profile as made
from tests.support.namespaces import two_hosts

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds

BATCH = 16
PLANS = (
    "dp=2",
    "dp=2,microbatches=4",
    "dp=2,tp=2",
    "dp=2,cp=2",
    "dp=2,pp=2,schedule=gpipe,microbatches=1",
    "dp=2,pp=2,microbatches=4",
    "dp=2,pp=2,schedule=interleaved,microbatches=4",
    "dp=2,tp=2,pp=2,microbatches=2",
)
AFTER = ("dp=2,pp=2,schedule=zero-bubble,microbatches=4", "dp=2,pp=2,schedule=zbv,microbatches=4")
"""Their schedules halve backward passes."""


def exposed(text: str, of: profile.Profile) -> float:
    return predict.predict(plans.parse(text), of, BATCH).parts.get("dp", 0.0)


def whole(text: str, of: profile.Profile) -> float:
    """Seconds of the whole exchange of the rank that has most, bucket by bucket."""
    plan = plans.parse(text)
    placement = Placement(plan, of, BATCH)
    totals = []
    for place in range(plan.pp):
        pieces = [piece for stage in plan.stage_numbers(place) for piece in placement.stages()[stage]]
        size = 4 * placement.values(pieces)
        full = buckets.limit(size)
        sizes = [full] * int(size // full) + [size % full]
        costs = [collective_cost.all_reduce(placement.data, each) for each in sizes if each]
        totals.append(sum(cost.seconds(placement.link("data")) for cost in costs))
    return max(totals)


def with_machine(of: profile.Profile, **changed: object) -> profile.Profile:
    return dataclasses.replace(of, machine=dataclasses.replace(of.machine, **changed))  # type: ignore[arg-type]


def computing(factor: float, of: profile.Profile) -> profile.Profile:
    """`of` with passes that take `factor` times as long."""

    def scaled(piece: profile.Piece) -> profile.Piece:
        def times(cost: profile.Cost) -> profile.Cost:
            return profile.Cost(*(factor * part for part in dataclasses.astuple(cost)))

        back = {policy: times(cost) for policy, cost in piece.backward.items()}
        return dataclasses.replace(piece, forward=times(piece.forward), backward=back)

    first, last, loss = map(scaled, (of.first, of.last, of.loss))
    return dataclasses.replace(of, first=first, layers=tuple(map(scaled, of.layers)), last=last, loss=loss)


def test_buckets_are_exchanged_one_after_the_other() -> None:
    """Against a bucket at a time; never longer than all of them, never shorter than the last."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        edges = np.sort(rng.uniform(0, 10, size=8))[::-1].tolist()
        runs = [
            (first, last if count > 1 else first, count, float(rng.exponential()))
            for (first, last), count in zip(
                zip(edges[::2], edges[1::2], strict=True), rng.integers(1, 5, size=4).tolist(), strict=True
            )
        ]
        over = -math.inf
        for first, last, count, seconds in runs:
            for before in np.linspace(first, last, count):
                over = max(over, -before) + seconds
        found = collective_cost.exposed(runs)
        total = sum(count * seconds for _, _, count, seconds in runs)
        assert found == pytest.approx(max(0.0, over))
        assert max(0.0, runs[-1][3] - runs[-1][1]) <= found + 1e-12 and found <= total + 1e-12
        longer = [(first, last, count, 1.1 * seconds) for first, last, count, seconds in runs]
        earlier = [(first + 1, last + 1, count, seconds) for first, last, count, seconds in runs]
        assert collective_cost.exposed(earlier) <= found <= collective_cost.exposed(longer)
        assert collective_cost.exposed([(0.0, 0.0, *rest) for _, _, *rest in runs]) == pytest.approx(total)


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("between", [1, 30, 300])
def test_never_more_than_the_whole_exchange_and_less_beside_a_backward_pass(
    text: str, between: float
) -> None:
    found = made(between=between)
    assert 0 < exposed(text, found) < whole(text, found)


@pytest.mark.parametrize("text", PLANS)
def test_with_nothing_to_overlap_with_it_is_the_whole_exchange(text: str) -> None:
    idle = computing(0.0, made())
    silent = {
        name: dataclasses.replace(getattr(idle, name), output_bytes=0.0) for name in ("first", "last", "loss")
    }
    layers = tuple(dataclasses.replace(layer, output_bytes=0.0) for layer in idle.layers)
    idle = dataclasses.replace(idle, **silent, layers=layers)  # stages send each other nothing
    for between in (Link(0.0, 1e-10), Link(0.0, 1e-8)):
        free = with_machine(idle, inside=Link(0.0, 1e-10), between=between)
        assert exposed(text, free) == pytest.approx(whole(text, free))
    # no core is idle, and the processors move all bytes
    busy = with_machine(made(per_host=8), cores=1)
    assert exposed(text, busy) == pytest.approx(whole(text, busy))


@pytest.mark.parametrize("text", AFTER)
def test_schedules_that_compute_gradients_of_weights_later_exchange_them_afterwards(text: str) -> None:
    found = made(between=30)
    overlapped = exposed("dp=2,pp=2,schedule=interleaved,microbatches=4", found)
    assert exposed(text, found) > 1.2 * overlapped
    assert exposed(text, found) <= whole(text, found) * (1 + 1e-9)


@pytest.mark.parametrize("text", [*PLANS, *AFTER])
def test_slower_links_and_slower_passes_make_steps_longer(text: str) -> None:
    plan = plans.parse(text)

    def step(of: profile.Profile) -> float:
        return predict.predict(plan, of, BATCH).seconds

    for found in (made(per_host=2), with_machine(made(per_host=2), cores=2)):
        by_link = [step(with_machine(found, between=Link(k * 1e-5, k * 1e-10))) for k in (1, 2, 8, 64, 512)]
        by_pass = [step(computing(factor, made(between=30))) for factor in (0.0, 0.3, 1.0, 3.0)]
        assert increasing(by_link) and increasing(by_pass)


@pytest.mark.parametrize("text", [text for text in PLANS if "pp" not in text])
def test_longer_passes_hide_more(text: str) -> None:
    shown = [exposed(text, computing(factor, made(between=30))) for factor in (3.0, 1.0, 0.3, 0.0)]
    assert increasing(shown) and shown[0] < shown[-1]


def increasing(values: list[float]) -> bool:
    return all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(values))


def test_a_long_backward_pass_hides_all_but_the_last_bucket() -> None:
    for text in ("dp=2", "dp=2,tp=2"):
        slow = computing(100.0, made())
        placement = Placement(plans.parse(text), slow, BATCH)
        size = 4 * placement.values([slow.first, *slow.layers, slow.last])
        last = collective_cost.all_reduce(2, size % buckets.limit(size) or buckets.limit(size))
        assert exposed(text, slow) == pytest.approx(last.seconds(placement.link("data")))


def test_tp_and_pp_hide_what_dp_alone_hides_of_as_many_bytes() -> None:
    """Half of the params and half of the computation each, so half of what is exposed."""
    found = made(between=100, per_host=8)
    link = Link(0.0, 1e-8)
    found = with_machine(found, inside=link, between=link, cores=16)
    alone = exposed("dp=2", found)
    assert exposed("dp=2,tp=2", found) == pytest.approx(alone / 2, rel=0.15)
    # the first stage ends last
    assert exposed("dp=2,pp=2,schedule=gpipe,microbatches=1", found) == pytest.approx(alone / 2, rel=0.15)


def test_a_later_stage_exchanges_while_earlier_ones_compute() -> None:
    """A heavy last stage: its exchange is over before the first stage's backward pass is."""
    base = made(layers=2, between=1, per_host=8)
    heavy = dataclasses.replace(base.last, split_values=4_000_000)
    found = with_machine(dataclasses.replace(base, last=heavy), cores=16)
    text = "dp=2,pp=2,schedule=gpipe,microbatches=1"
    first_stage = 4 * (base.first.split_values + base.layers[0].split_values)
    assert exposed(text, found) <= collective_cost.all_reduce(2, first_stage).seconds(found.machine.inside)
    assert exposed(text, found) < 0.3 * whole(text, found)


def test_where_all_cores_compute_only_waiting_for_the_network_is_hidden() -> None:
    fast, slow = (with_machine(made(between=between, per_host=2), cores=2) for between in (1, 30))
    for text in ("dp=4", "dp=2,tp=2"):
        inside = exposed(text, with_machine(fast, per_host=4, cores=1))
        assert inside <= exposed(text, slow) < whole(text, slow)


def test_expert_shards_are_exchanged_afterwards_by_the_ranks_that_have_the_same() -> None:
    base = made(between=30, per_host=8)
    layers = tuple(dataclasses.replace(layer, expert_values=8_000_000) for layer in base.layers)
    found = with_machine(dataclasses.replace(base, layers=layers, loss=base.loss), cores=16)
    link = found.machine.inside
    shards = 4 * 8 * 8_000_000 / 2
    by_two = collective_cost.all_reduce(2, shards).seconds(link)
    assert exposed("dp=2,ep=2", found) < by_two  # every shard is on one rank
    assert by_two <= exposed("dp=4,ep=2", found) < 1.2 * by_two


def test_buckets_keep_their_copies_until_all_are_summed() -> None:
    base = made()
    layers = tuple(dataclasses.replace(layer, split_values=40_000_000) for layer in base.layers)
    heavy = dataclasses.replace(base, layers=layers)
    parts = memory.peak(plans.parse("dp=2,tp=2"), heavy, 2).parts
    assert parts["gradients"] > 10 * buckets.BUCKET_BYTES
    assert parts["buffers"] >= parts["gradients"] == parts["params"]


@pytest.mark.extended
@pytest.mark.parametrize("text", gradient_overlap.PLANS)
def test_real_processes_hide_over_a_network_what_is_predicted(text: str) -> None:
    """Layers sleep, which needs no core. Other programs delay an exchange, so the prediction is the least."""
    with two_hosts() as hosts:
        gradient_overlap.limit(hosts)
        times = gradient_overlap.across(hosts, text, "asleep")
    found = {way: statistics.median(each for each, _ in steps) for way, steps in times.items()}
    assert found["with"] < 0.5 * found["without"]
    assert 0.5 * gradient_overlap.predicted(text) < found["with"] < gradient_overlap.predicted(text) + 0.1
