"""What the planner reckons, refuses and chooses, from profiles of round numbers."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import options
from models.job import JobError
from models.pretrain import plan as plans
from models.pretrain.planner import __main__ as entry
from models.pretrain.planner import collective_cost, memory, predict, profile, scaling
from models.pretrain.planner.bench_workers import BenchWorkers
from models.pretrain.planner.collective_cost import Link
from models.pretrain.planner.explain import explain, rows
from models.pretrain.planner.placement import Placement
from models.pretrain.planner.probe import calibrate, computing_seconds
from models.pretrain.planner.profile import Machine
from models.pretrain.planner.search import balanced, counts, search, search_up_to
from models.pretrain.planner.verify import corrections, select_diverse, verify
from models.pretrain.training import TrainingOptions
from tests.models.pretrain.made_profile import LINK
from tests.models.pretrain.made_profile import profile as made

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


BATCH = 16


def seconds(plan: str, **changed: float) -> predict.Prediction:
    return predict.predict(plans.parse(plan), made(**changed), BATCH)  # type: ignore[arg-type]


def test_one_process_takes_the_sum_of_its_pieces() -> None:
    # 8 layers of 1 ms, 0.1 + 0.3 + 0.1 besides, three times that with the backward pass, 16 rows
    assert seconds("dp=1").parts["compute"] == pytest.approx(16 * 8.5e-3 * 3)


@pytest.mark.parametrize("pieces", [4, 8, 16])
def test_bubble_of_even_stages_is_that_of_theory(pieces: int) -> None:
    even = dataclasses.replace(
        made(per_host=8),
        first=dataclasses.replace(made().first, forward=profile.Cost(), backward={"none": profile.Cost()}),
        last=dataclasses.replace(made().last, forward=profile.Cost(), backward={"none": profile.Cost()}),
        loss=dataclasses.replace(made().loss, forward=profile.Cost(), backward={"none": profile.Cost()}),
        machine=Machine("cpu", cores=8, per_host=8, slowdown=((8, 1.0),)),
    )
    found = predict.predict(plans.parse(f"pp=4,microbatches={pieces}"), even, BATCH)
    ran = found.parts["compute"] + found.parts["bubble"]
    assert found.parts["bubble"] / ran == pytest.approx(3 / (pieces + 3))


def test_more_processes_than_cores_share_them() -> None:
    machine = dataclasses.replace(made().machine, cores=2, per_host=4, slowdown=((1, 1.0), (2, 1.0)))
    shared = dataclasses.replace(made(), machine=machine)
    four = predict.predict(plans.parse("dp=4"), shared, BATCH).parts["compute"]
    assert four == pytest.approx(seconds("dp=1").parts["compute"] / 4 * 2)


def test_a_pipeline_s_idle_processes_leave_their_cores_to_others() -> None:
    machine = dataclasses.replace(made().machine, cores=2, per_host=4, slowdown=((1, 1.0), (2, 1.0)))
    shared = dataclasses.replace(made(), machine=machine)
    one = seconds("dp=1").parts["compute"]
    four = predict.predict(plans.parse("pp=4,schedule=naive"), shared, BATCH)
    # one computes at a time, so nobody is slowed down
    assert four.seconds - four.parts["optimizer"] == pytest.approx(one, rel=0.05)


def test_slow_links_between_hosts_leave_only_stages_to_cross_them() -> None:
    fast = search(made(between=1), BATCH, 4).ranking[0].plan
    slow = search(made(between=100), BATCH, 4).ranking[0].plan
    assert crossing_bytes(slow) < crossing_bytes(fast)
    assert slow.pp > 1 and slow.tp * slow.cp * slow.dp <= 2


def crossing_bytes(plan: plans.ParallelPlan) -> float:
    """Seconds of dp, tp and cp exchanges over a link of one second a byte between hosts, none inside."""
    base = made()
    only = dataclasses.replace(base.machine, inside=profile.FREE, between=Link(0.0, 1.0))
    parts = predict.predict(plan, dataclasses.replace(base, machine=only), BATCH).parts
    sent = parts.get("bubble", 0.0) if plan.pp > 1 else 0.0
    return sum(parts.get(name, 0.0) for name in ("dp", "tp", "cp")) + sent


def test_slow_links_between_hosts_end_the_gathering_of_params_for_every_pass() -> None:
    def longer(between: float) -> float:
        return seconds("dp=4,zero=3", between=between).seconds / seconds("dp=4", between=between).seconds

    assert longer(1) < 1  # each steps a quarter of the params
    assert longer(100) > 1.3
    assert search(made(between=100), BATCH, 4, {"dp": 4}).ranking[0].plan.zero < 3


def test_tp_inside_a_host_uses_its_link() -> None:
    spread = Placement(plans.parse("dp=2,tp=2"), made(between=100), BATCH)
    assert spread.link("tp").beta == LINK.beta
    # both tp ranks of a host exchange gradients over its one way out
    assert spread.link("data").beta == pytest.approx(200 * LINK.beta)


def test_layers_are_split_so_that_a_heavy_head_has_fewer() -> None:
    plan = plans.parse("pp=4")
    assert balanced(plan, made(heavy_head=1), BATCH) == (2, 2, 2, 2)
    assert balanced(plan, made(heavy_head=8), BATCH)[-1] == 1
    assert sum(balanced(plan, made(heavy_head=8), BATCH)) == 8


def test_split_is_the_best_of_all() -> None:
    plan = plans.parse("pp=2")
    heavy = made(heavy_head=9)

    def slowest(split: tuple[int, ...]) -> float:
        spread = Placement(dataclasses.replace(plan, split=split), heavy, BATCH)
        sums = [sum(p.forward.at(1) + p.backward["none"].at(1) for p in pieces) for pieces in spread.stages()]
        return max(sums[0], sums[1] + heavy.loss.forward.at(1) + heavy.loss.backward["none"].at(1))

    best = balanced(plan, heavy, BATCH)
    assert slowest(best) == min(slowest((first, 8 - first)) for first in range(1, 8))


def test_memory_that_is_short_is_saved_by_sharing_out_or_recomputing() -> None:
    alone = memory.peak(plans.parse("dp=4"), made(), BATCH).bytes
    found = search(made(memory_bytes=alone / 2), BATCH, 4)
    assert found.ranking and all(c.memory.bytes <= alone / 2 for c in found.ranking)
    assert any("MiB a process" in refused.reason for refused in found.refused)
    assert search(made(), BATCH, 4).ranking[0].plan.activation_checkpoint == "none"


def test_zero_stages_share_out_what_they_say() -> None:
    pieces = (made().first, *made().layers, made().last)
    values = 4 * sum(piece.local_values() for piece in pieces)
    parts = {zero: memory.peak(plans.parse(f"dp=4,zero={zero}"), made(), 4).parts for zero in range(4)}
    assert parts[0]["params"] == parts[1]["params"] == values
    assert parts[0]["optimizer"] == 2 * values
    assert parts[1]["optimizer"] == parts[2]["optimizer"] == parts[3]["optimizer"] == values / 2
    assert parts[3]["params"] < parts[2]["params"] == values * 1.25  # a quarter, and what is gathered


def test_params_that_are_exchanged_now_and_then_cost_their_share_of_a_step() -> None:
    whole = 4.0 * (8 * 1_000_000 + 2 * 65_536)
    exchange = collective_cost.all_reduce(2, whole).seconds(LINK)
    assert seconds("dp=2,sync_every=1").parts["dp"] == pytest.approx(exchange)
    assert seconds("dp=2,sync_every=50").parts["dp"] == pytest.approx(exchange / 50)
    slow = search(made(between=100), BATCH, 4, {"dp": 4, "sync_every": 50})
    assert {each.plan.sync_every for each in slow.ranking} == {50}
    assert slow.ranking[0].seconds < search(made(between=100), BATCH, 4, {"dp": 4}).ranking[0].seconds


def test_gradients_of_sixteen_bits_are_half_the_bytes() -> None:
    only = dataclasses.replace(made().machine, inside=Link(0.0, 1.0))
    wide = dataclasses.replace(made(), machine=only)
    plain, short, coded = (
        predict.predict(plans.parse(f"dp=2{more}"), wide, BATCH)
        for more in ("", ",grad_compression=bf16", ",grad_compression=onebit")
    )
    assert short.parts["dp"] == pytest.approx(plain.parts["dp"] / 2, rel=0.01)
    assert coded == plain
    told = [
        explain(search(made(), BATCH, 2, {"grad_compression": kind}), made(), 2)
        for kind in ("bf16", "onebit")
    ]
    assert ["uncompressed" in " ".join(each) for each in told] == [False, True]


def test_plans_for_fewer_processes_are_in_the_same_ranking() -> None:
    slow = replace(made(), machine=replace(made().machine, inside=Link(0.05, 1e-7), between=Link(0.05, 1e-7)))
    all_of_them = search(slow, BATCH, 4)
    found = search_up_to(slow, BATCH, 4)
    assert {candidate.plan.processes for candidate in found.ranking} == {1, 2, 3, 4}
    assert all(candidate in found.ranking for candidate in all_of_them.ranking)
    assert [c.seconds for c in found.ranking] == sorted(c.seconds for c in found.ranking)
    # with slow links one process is faster than any number
    assert found.ranking[0].plan.processes == 1
    text = "\n".join(explain(found, slow, 4))
    assert f"1 of the 4 processes: the best plan for all of them, {all_of_them.ranking[0].plan}, is" in text
    assert rows(found)[0]["processes"] == 1
    # with the links as they are all are of use, and what is fixed stays
    assert search_up_to(made(), BATCH, 4).ranking[0] == search(made(), BATCH, 4).ranking[0]
    assert {c.plan.dp for c in search_up_to(slow, BATCH, 4, {"dp": 2}).ranking} == {2}


def test_fewer_processes_are_chosen_on_fewer_cores() -> None:
    machine = replace(made().machine, cores=2, per_host=8, slowdown=((1, 1.0), (2, 1.0), (8, 5.0)))
    found = search_up_to(replace(made(), machine=machine), BATCH, 8)
    assert found.ranking[0].plan.processes == 2


def test_a_measurement_chooses_fewer_processes() -> None:
    found = search_up_to(made(), BATCH, 4)
    assert found.ranking[0].plan.processes == 4
    measured = verify(found, timed(lambda plan: 9.0 if plan.processes == 4 else 1.0), 8)
    best = measured.ranking[0]
    assert best.plan.processes < 4 and best.measured is not None


def test_fewer_processes_are_proposed_where_no_plan_for_all_fits() -> None:
    small = made(layers=3)
    found = search_up_to(small, 2, 7)
    assert found.ranking and {candidate.plan.processes for candidate in found.ranking} <= {1, 2, 3, 4, 6}
    assert "no plan for all of them fits" in "\n".join(explain(found, small, 7))


def test_few_processes_have_the_memory_of_all() -> None:
    alone = memory.peak(plans.parse("dp=1"), made(), BATCH).bytes
    machine = replace(made(per_host=4).machine, memory_bytes=alone / 4, shared_memory=True)
    assert "dp=1" in {str(c.plan) for c in search_up_to(replace(made(), machine=machine), BATCH, 4).ranking}
    own = replace(machine, shared_memory=False)
    assert "dp=1" not in {str(c.plan) for c in search_up_to(replace(made(), machine=own), BATCH, 4).ranking}


def test_numbers_of_processes_to_plan_for() -> None:
    assert counts(6) == [1, 2, 3, 4, 5, 6]
    assert counts(24) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24]


def test_fixed_keys_stay() -> None:
    found = search(made(), BATCH, 4, {"tp": 2, "zero": 0})
    assert {(c.plan.tp, c.plan.zero) for c in found.ranking} == {(2, 0)}
    found = search(made(), BATCH, 4, {"recompute": "full"})  # a former name
    assert {c.plan.activation_checkpoint for c in found.ranking} == {"full"}


def test_explanation_names_choice_limit_next_best_and_refusals() -> None:
    found = search(made(layers=3), BATCH, 4)
    text = "\n".join(explain(found, made(layers=3), 4))
    for words in (str(found.ranking[0].plan), "Next best", "Refused", "the model has 3", "MiB"):
        assert words in text


def test_a_search_in_which_nothing_fits_says_so() -> None:
    found = search(made(memory_bytes=1), BATCH, 4)
    assert explain(found, made(), 4)[0] == "No plan fits 4 processes."


def steps(used: float, took: float = 9.0) -> list[list[float]]:
    """Seconds on the clock, mostly waiting, and of the processor."""
    return [[took, used * noise] for noise in (0.98, 1.0, 1.02)]


def computed(plan: str, of: profile.Profile) -> float:
    return computing_seconds(predict.predict(plans.parse(plan), of, BATCH))


def test_overhead_makes_computation_agree_with_probes() -> None:
    quiet = dataclasses.replace(made(per_host=2), machine=dataclasses.replace(made().machine, cores=2))
    slower = {text: 1.3 * computed(text, quiet) for text in ("tp=2", "cp=2", "pp=2,microbatches=4")}
    found = calibrate(
        quiet, BATCH, {text: steps(used) for text, used in slower.items()}, steps(computed("dp=1", quiet))
    )
    for text, used in slower.items():
        assert computed(text, found) == pytest.approx(used)


def test_overhead_is_never_negative_and_none_where_steps_disagree() -> None:
    alone = steps(computed("dp=1", made()))
    faster = calibrate(made(), BATCH, {"tp=2": steps(1e-3)}, alone)
    assert faster.overhead == {"tp": 0.0}
    apart = calibrate(made(), BATCH, {"tp=2": [[1.0, 0.1], [1.0, 0.9], [1.0, 5.0]]}, alone)
    assert apart.overhead == {}


@dataclasses.dataclass(frozen=True)
class Timed(BenchWorkers):
    """Processes that take `factor(plan)` times what is predicted, for a step."""

    profile: profile.Profile = dataclasses.field(default_factory=made)
    factor: Callable[[plans.ParallelPlan], float] = lambda plan: 1.0
    requested: list[str] = dataclasses.field(default_factory=list)

    def request(self, what: str, **parameters: Any) -> dict[str, Any]:
        self.requested.extend(parameters["plans"])
        found = {}
        for text in parameters["plans"]:
            plan = plans.parse(text)
            seconds = predict.predict(plan, self.profile, BATCH).seconds * self.factor(plan)
            found[text] = [[seconds * noise, seconds] for noise in (1.0, 3.0, 0.9, 1.1, 1.0)]
        return found


def timed(factor: Callable[[plans.ParallelPlan], float]) -> Timed:
    return Timed(None, [], io.StringIO(), made(), factor)  # type: ignore[arg-type]


def test_the_fastest_measured_is_chosen_and_both_figures_are_reported() -> None:
    found = search(made(), BATCH, 4)
    slow = found.ranking[0].plan
    workers = timed(lambda plan: 5.0 if plan == slow else 1.2)
    ranking = verify(found, workers, 6).ranking
    best = min(set(workers.requested) - {str(slow)}, key=lambda text: seconds(text).seconds)
    assert str(ranking[0].plan) == best
    assert ranking[0].measured == pytest.approx(1.2 * ranking[0].prediction.seconds)
    assert sorted(str(c.plan) for c in ranking) == sorted(str(c.plan) for c in found.ranking)
    row = rows(dataclasses.replace(found, ranking=ranking))[0]
    assert row["measured"] == row["seconds"] and row["predicted"] == ranking[0].prediction.seconds


def test_plans_of_different_kinds_are_measured_first() -> None:
    ranking = search_up_to(made(), BATCH, 4).ranking
    chosen = select_diverse(ranking, 6)
    assert len({candidate.plan.degrees for candidate in chosen}) == 6
    assert chosen[0] == ranking[0]
    assert len({candidate.plan.processes == 4 for candidate in chosen[:2]}) == 2
    assert len(select_diverse(ranking, 1000)) == len(ranking)


def test_measurements_of_some_plans_correct_predictions_of_others() -> None:
    found = search(made(), BATCH, 4)
    ranking = verify(found, timed(lambda plan: 2 * (3 if plan.pp > 1 else 1)), 8).ranking
    others = [candidate for candidate in ranking if candidate.measured is None]
    stages = [candidate.correction for candidate in others if candidate.plan.pp > 1]
    flat = [candidate.correction for candidate in others if candidate.plan.pp == 1]
    assert min(stages, default=9) > max(flat, default=0) >= 1


def test_corrections_are_those_that_plans_were_slowed_by() -> None:
    texts = [f"{key}={size}" for key in ("dp", "tp", "pp", "cp") for size in (2, 4)]
    predicted = {plans.parse(text): 1.0 for text in texts}
    measured = {plan: 4.0 if plan.pp > 1 else 2.0 for plan in predicted}
    factors = corrections(predicted, measured)
    assert factors["all"] == pytest.approx(2)
    # two measured plans against a prior as heavy as one: two thirds of the way, in logarithms
    assert factors["pp"] == pytest.approx(2 ** (2 / 3))
    assert factors["tp"] == factors["ep"] == pytest.approx(1)


def test_no_plan_left_out_is_predicted_faster_than_those_kept() -> None:
    """Against every plan there is, where memory is no concern."""
    kept = search(made(), BATCH, 4).ranking
    assert len(kept) <= 60
    for shape in {(c.plan.dp, c.plan.tp, c.plan.pp, c.plan.cp) for c in kept}:
        split = dict(zip(("dp", "tp", "pp", "cp"), shape, strict=True))
        best = min(c.seconds for c in kept if (c.plan.dp, c.plan.tp, c.plan.pp, c.plan.cp) == shape)
        schedules = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv") if split["pp"] > 1 else ("1f1b",)
        for schedule, zero, sequence, pieces in itertools.product(
            schedules, (0, 2, 3), (False, True) if split["tp"] > 1 else (False,), (1, 2, 4)
        ):
            switches = {"zero": zero, "sequence": sequence, "schedule": schedule, "microbatches": pieces}
            for other in search(made(), BATCH, 4, {**split, **switches}).ranking:
                assert best <= other.seconds * 1.06, other.plan


def test_profile_is_read_as_written(tmp_path: Path) -> None:
    profile.write(made(), tmp_path / "profile.json")
    assert profile.read(tmp_path / "profile.json") == made()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"machine": {"cores": -1}}, r"machine\.cores is -1, expected a whole number >= 0"),
        ({"machine": {"corse": 1}}, "unknown key 'corse'"),
        ({"step": "long"}, "step is 'long'"),
        ({"layers": 3}, "layers is 3, expected a list"),
    ],
)
def test_wrong_profile_is_refused(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**dataclasses.asdict(made()), **change}))
    with pytest.raises(JobError, match=complaint):
        profile.read(path)


def test_job_with_a_kept_profile_is_planned_without_measuring(tmp_path: Path) -> None:
    profile.write(made(), tmp_path / "kept.json")
    job = {
        "options": {"batch_size": BATCH, "optimizer": "adamw", "lr": 1e-3},
        "plan": {"cp": 1},
        "planner": {
            "processes": 4,
            "memory_mib": 64,
            "per_host": 2,
            "profile": "kept.json",
            "scaling": "sqrt",
            "base_batch_size": 4,
        },
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    entry.plan(tmp_path / "job.json", lambda **fields: None)
    found = json.loads((tmp_path / "result.json").read_text())
    assert [row["seconds"] for row in found["ranking"]] == sorted(row["seconds"] for row in found["ranking"])
    assert found["ranking"][0]["plan"] in found["explanation"][0]
    assert "Predicted only" in found["explanation"][-1]
    assert found["refused"][0]["reason"]
    assert found["scaling"]["applied"] and found["scaling"]["options"]["lr"] == pytest.approx(2e-3)


def test_options_for_a_larger_batch_can_be_applied_as_they_are(tmp_path: Path) -> None:
    """Goyal 2017: twice the batch, twice the rate, after five epochs of warm-up."""
    profile.write(made(), tmp_path / "kept.json")
    np.save(tmp_path / "tokens.npy", np.zeros(16 * 80 + 1, np.uint16))
    model = {"name": "gpt", "input_shape": [16], "classes": 32, "input_dtype": "int32", "task": "next_token"}
    given = {"batch_size": 8, "optimizer": "sgd", "lr": 0.1, "epochs": 90}
    job = {
        "model": {**model, "options": {"width": 16, "layers": 1, "heads": 2}},
        "tokens": {"train": "tokens.npy", "test": "tokens.npy"},
        "options": given,
        "planner": {"profile": "kept.json", "scaling": "linear", "base_batch_size": 4},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    entry.plan(tmp_path / "job.json", lambda **fields: None)
    found = json.loads((tmp_path / "result.json").read_text())["scaling"]
    assert found["options"] == {"lr": 0.2, "warmup": 5 * 10}
    applied = options.read(TrainingOptions, {**given, **found["options"]}, "options")
    assert applied.rate(50, 900) == 0.2 > applied.rate(0, 900)


def test_learning_rate_grows_with_the_batch_by_rule() -> None:
    given = TrainingOptions(batch_size=64, lr=0.1, steps=100, warmup=10)
    linear = scaling.scaled(dataclasses.replace(given, optimizer="sgd"), 16, "linear")
    assert (linear.lr, linear.steps, linear.warmup) == (pytest.approx(0.4), 25, 2)
    root = scaling.scaled(given, 16, "sqrt")
    assert root.lr == pytest.approx(0.2) and root.eps == pytest.approx(given.eps / 2)
    assert 1 - root.beta2 == pytest.approx(4 * (1 - given.beta2))
    assert scaling.scaled(given, 16, "none") == given == scaling.scaled(given, 64, "sqrt")


def test_linear_scaling_warms_up_where_nothing_did() -> None:
    given = TrainingOptions(batch_size=64, lr=0.1, optimizer="sgd", epochs=100)
    assert scaling.scaled(given, 16, "linear", steps_per_epoch=7).warmup == 35
