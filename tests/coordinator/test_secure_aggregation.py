"""Secure aggregation in simulations: the engine gets the mean and nothing of single clients; what does not go with it is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments import experiment
from coordinator.experiments.privacy import secure_aggregation
from coordinator.fleets.secure.fleet import SecureFleet
from coordinator.fleets.secure.groups import UNKNOWN_NORM, split
from coordinator.rounds.fleet import Answer, BlockSum, Measured, Result
from coordinator.rounds.plan import RunPlan
from coordinator.scheduling.deployments import SecureSums
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies import presets
from strategies.strategy import ClipNorm
from strategies.update import GroupMean, Update
from tests.support import runs
from tests.support.federation import PARAMS, run_plan
from tests.support.memory_fleet import MemoryClient, MemoryFleet, Script, honest

ON = ("privacy.secure_aggregation=true", "privacy.clip_norm=1.0")
SUMS = SecureSums(seed=7, clip_norm=0.4, group_size=5, threshold=0.67, value_bits=20)


def silent(task: TaskMessage, update: Update) -> list[tuple[float, bytes]]:
    return []


def fleet_of(*scripts: Script) -> MemoryFleet:
    clients = {
        f"client-{i:02}": MemoryClient(1 + 0.1 * i, (-1.0) ** i * i / 4, 5 + 7 * i, script)
        for i, script in enumerate(scripts)
    }
    return MemoryFleet(clients)


class Watched(SecureFleet):
    """Keeps what the engine gets."""

    def __init__(self, fleet: MemoryFleet, sums: SecureSums = SUMS) -> None:
        super().__init__(fleet, sums)
        self.seen: list[Result] = []

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        for result in super().results(excluded):
            self.seen.append(result)
            yield result


def clipping(script: Script) -> Script:
    """The same client, clipping its update in the open."""
    clip = ClipNorm(SUMS.clip_norm)
    return lambda task, update: script(task, clip.apply(update, {})[0])


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_model_is_that_of_the_clipped_updates_in_the_open(weighting: str) -> None:
    strategy = presets.get("fedavg", weighting=weighting)
    plan = replace(
        run_plan(rounds=2, clients_per_round=11, outlier_factor=0.0, weight_cap=2.0),
        strategy=strategy,
    )
    scripts = [honest(1.0 + i) for i in range(11)]
    scripts[4] = silent
    open_run, _ = runs.run(plan, fleet_of(*map(clipping, scripts)))
    secure_run, _ = runs.run(plan, Watched(fleet_of(*scripts)))
    assert not np.array_equal(secure_run.params["w"], PARAMS["w"])
    # 2 rounds of 10 clients, each rounded to steps of 0.4 / 2^19.
    np.testing.assert_allclose(secure_run.params["w"], open_run.params["w"], rtol=0, atol=2e-5)


def test_the_engine_sees_one_sum_and_no_update() -> None:
    plan = run_plan(rounds=1, clients_per_round=11, outlier_factor=0.0)
    fleet = Watched(fleet_of(*[honest(1.0 + i) for i in range(11)]))
    runs.run(plan, fleet)
    answers = [each for each in fleet.seen if isinstance(each, Answer)]
    assert len(answers) == 11
    for each in answers:
        assert isinstance(each.verdict, Measured) and each.verdict.norm == UNKNOWN_NORM
    (total,) = [each for each in fleet.seen if isinstance(each, BlockSum)]
    assert total.partial.num_updates == 11
    assert total.partial.weight == total.partial.num_examples == sum(5 + 7 * i for i in range(11))


def test_the_training_loss_is_the_mean_of_the_clients() -> None:
    plan = run_plan(rounds=1, clients_per_round=6, outlier_factor=0.0)
    scripts = [honest(1.0)] * 6
    _, plain = runs.run(plan, fleet_of(*scripts))
    _, secure = runs.run(plan, Watched(fleet_of(*scripts)))
    expected, found = plain.records[0].train_loss, secure.records[0].train_loss
    assert expected is not None and found == pytest.approx(expected, abs=100 / 2**19 * 3)


def test_below_the_threshold_the_model_stays_and_the_clients_are_told_why() -> None:
    plan = run_plan(rounds=1, clients_per_round=6, outlier_factor=0.0)
    scripts = [honest(1.0)] * 3 + [silent] * 3
    last, seen = runs.run(plan, Watched(fleet_of(*scripts)))
    np.testing.assert_array_equal(last.params["w"], PARAMS["w"])
    assert seen.records[0].accepted == 0
    events = seen.events
    reasons = [each["reason"] for each in events if each["event"] == "client_silent"]
    assert len([each for each in reasons if each.startswith("its group has no sum: ")]) == 3
    assert any(each["event"] == "quorum_missed" for each in events)


def test_a_group_without_a_sum_leaves_those_of_the_others() -> None:
    plan = run_plan(rounds=1, clients_per_round=10, outlier_factor=0.0)
    order = split(SUMS, 10, 1)
    assert sorted(map(len, order)) == [5, 5]
    scripts = [silent if position in order[0][:3] else honest(1.0) for position in range(10)]
    _, seen = runs.run(plan, Watched(fleet_of(*scripts)))
    assert seen.records[0].accepted == 5


def robust_plan(clients: int, malicious: int) -> RunPlan:
    strategy = secure_aggregation.with_groups(
        presets.get("median", malicious=malicious), experiment.load(None, ON).privacy
    )
    return replace(run_plan(rounds=1, clients_per_round=clients, outlier_factor=0.0), strategy=strategy)


def test_a_robust_rule_gets_the_means_of_groups() -> None:
    scripts = [honest(1.0 + i) for i in range(17)]
    scripts[4] = silent
    fleet = Watched(fleet_of(*scripts))
    last, seen = runs.run(robust_plan(17, 1), fleet)
    groups = [each for each in fleet.seen if isinstance(each, GroupMean)]
    assert not [each for each in fleet.seen if isinstance(each, BlockSum)]
    assert sorted(position for each in groups for position in each.updates) == [*range(4), *range(5, 17)]
    # each alone, clipped in the open: its update is the step of the model
    alone = {}
    for position in range(17):
        only = [silent] * 17
        only[position] = clipping(scripts[position])
        plain, _ = runs.run(run_plan(rounds=1, clients_per_round=17, outlier_factor=0.0), fleet_of(*only))
        alone[position] = np.asarray(plain.params["w"]) - PARAMS["w"]
    means = [np.mean([alone[position] for position in each.updates], axis=0) for each in groups]
    expected = PARAMS["w"] + np.median(means, axis=0)
    np.testing.assert_allclose(last.params["w"], expected, rtol=0, atol=1e-5)
    assert seen.records[0].accepted == 16


def test_too_few_groups_with_a_sum_leave_the_model_and_say_so() -> None:
    first = split(SUMS, 15, 1)[0]
    scripts = [silent if position in first else honest(1.0) for position in range(15)]
    last, seen = runs.run(robust_plan(15, 1), Watched(fleet_of(*scripts)))
    np.testing.assert_array_equal(last.params["w"], PARAMS["w"])
    (event,) = [each for each in seen.events if each["event"] == "groups_incomplete"]
    assert event["words"].startswith("2 groups have a mean; expected 3 or more")


def test_a_cohort_of_two_has_no_sum() -> None:
    plan = run_plan(rounds=1, clients_per_round=2, outlier_factor=0.0)
    last, _ = runs.run(plan, Watched(fleet_of(honest(1.0), honest(1.0))))
    np.testing.assert_array_equal(last.params["w"], PARAMS["w"])


def test_bytes_are_those_of_the_protocol() -> None:
    plan = run_plan(rounds=1, clients_per_round=5, outlier_factor=0.0)
    fleet = Watched(fleet_of(*[honest(1.0)] * 5))
    _, store = runs.run(plan, fleet)
    (record,) = store.records
    got = sum(each.received_bytes for each in fleet.seen if isinstance(each, Answer))
    model = record.bytes_down - got
    # Keys of all five, the shares of four others, and signatures.
    assert got > 5 * (5 * 2 * 32 + 4 * 82 + 4 * 64) and model % 5 == 0 and model >= 5 * 4 * PARAMS["w"].size
    for each in fleet.seen:
        if isinstance(each, Answer):
            assert each.payload_bytes > 5 * 21 + 4 * 82  # headers and sealed shares
            assert each.payload_bytes != len(
                encode_result(each.task.message, Update({"w": PARAMS["w"]}, 5, 2, 0.1))
            )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("privacy.secure_aggregation=true",), "privacy.clip_norm is missing"),
        (("privacy.group_size=8",), "privacy.group_size = 8 is about secure aggregation"),
        ((*ON, "privacy.threshold=0.5"), "privacy.threshold = 0.5"),
        ((*ON, "privacy.group_size=2"), "privacy.group_size = 2"),
        ((*ON, "federation.clients_per_round=2"), "clients_per_round = 2 is too few"),
        (
            (*ON, "strategy.name=median", "strategy.malicious=2", "privacy.group_size=3"),
            "needs 5 or more groups of secure aggregation in a round, since it compares their means, but privacy.group_size = 3 makes 3",
        ),
        ((*ON, "strategy.name=fednova"), "'fednova': it makes its model of single updates"),
        ((*ON, "strategy.name=qfedavg"), "'qfedavg': it makes its model of single updates"),
        ((*ON, "strategy.name=scaffold"), "'scaffold': its clients send or keep more than an update"),
        ((*ON, "strategy.clip_norm=1.0"), "would have to clip single updates"),
        ((*ON, "strategy.name=mine:Own"), "a strategy of your own gets every update"),
        ((*ON, "strategy.name=fedbuff"), 'federation.mode = "async"'),
        ((*ON, "federation.relays=2"), "relays add plain updates"),
        ((*ON, "federation.outlier_factor=50"), "federation.outlier_factor = 50 compares the norms"),
        (
            (*ON, "privacy.mechanism=central", "privacy.noise_multiplier=1"),
            "does not go with privacy.mechanism = 'central'",
        ),
        ((*ON, "uplink.code=qsgd"), "uplink.code = 'qsgd'"),
        ((*ON, "simulation.faults.nan=1"), "simulation.faults = {'nan': 1}"),
        ((*ON, "simulation.attack.name=sign_flip", "simulation.attack.clients=2"), "changes plain updates"),
    ],
)
def test_what_secure_aggregation_cannot_do_is_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as refused:
        experiment.load(None, settings)
    assert words in str(refused.value)


def test_devices_can_take_part() -> None:
    document = experiment.read_document(None, ON, "devices")
    assert experiment.resolve(document, "experiment", "devices").privacy.secure_aggregation


def test_devices_of_different_width_cannot() -> None:
    document = experiment.read_document(None, (*ON, "strategy.name=heterofl"), "devices")
    with pytest.raises(UserError, match="'heterofl': it makes its model of single updates"):
        experiment.resolve(document, "experiment", "devices")


def test_the_defaults_are_in_the_resolved_experiment() -> None:
    resolved = experiment.load(None, ON)
    table = resolved.privacy
    assert (table.group_size, table.threshold, table.value_bits) == (16, 0.67, 16)
    assert resolved.federation.outlier_factor == 0
    again = experiment.resolve(resolved.model_dump(mode="json", exclude_none=True), "again")
    assert again == resolved


@pytest.mark.parametrize(("cohort", "sizes"), [(10, [10]), (31, [31]), (32, [16]), (50, [16, 17])])
def test_the_report_names_the_sizes_of_groups(cohort: int, sizes: list[int]) -> None:
    described = secure_aggregation.describe(experiment.load(None, ON).privacy, cohort, presets.get("fedavg"))
    assert described["group_sizes"] == sizes
    assert secure_aggregation.describe(experiment.load(None).privacy, cohort, presets.get("fedavg")) == {}


@pytest.mark.slow
def test_two_runs_of_a_seed_end_in_the_same_model(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "data": {"partition": "iid"},
        "model": {"name": "logreg"},
        "federation": {"clients": 9, "clients_per_round": 8, "rounds": 3, "runtimes": {"torch": 1}},
        "local": {"epochs": 2, "lr": 0.5},
        "simulation": {
            "dropout": 0.1,
            "local_baseline": "off",
            "stragglers": {"share": 0.2, "partial": "drop"},
        },
        "privacy": {"secure_aggregation": True, "clip_norm": 2.0, "group_size": 4},
    }
    reports = [fedloop.simulate(document, out=tmp_path / name).report for name in ("one", "two")]
    first, second = (report["final"] for report in reports)
    assert first["model_sha256"] == second["model_sha256"]
    assert first["test_accuracy"] > 0.5
    assert (
        "the sum of each group of 4 clients, less those that drop out"
        in reports[0]["secure_aggregation"]["in_words"]
    )
    events = [json.loads(line) for line in (tmp_path / "one" / "events.jsonl").read_text().splitlines()]
    assert {each["reason"] for each in events if each["event"] == "client_silent"} >= {
        "not done by the deadline"
    }
