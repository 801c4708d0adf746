"""The Flower fleet: which nodes are its clients, and what becomes of replies that are no updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from coordinator.errors import UserError
from coordinator.fleets import flower_messages as messages
from coordinator.fleets.flower import Clock, Federation, FlowerFleet
from coordinator.fleets.flower_messages import Description, TrainRequest
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.rounds import intake, plan
from coordinator.rounds.closing import Closing
from coordinator.rounds.fleet import Answer, Silence, Terms
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import LocalWork, RunPlan
from edge_client.wire import arrays
from strategies import presets
from strategies.update import Update
from tests.support.federation import PARAMS
from tests.support.flower import take_identity
from tests.support.flower_grid import Node, NodeGrid, quadratic_node

NAMES = ("west", "east")
CLIENTS = [SimulatedClient(name, index, 8, "torch") for index, name in enumerate(NAMES)]
FEDERATION = Federation(CLIENTS, "data", None, {}, {}, quorum=1, patience_seconds=60)


def west(partitions: int = 2) -> Node:
    return quadratic_node(0, partitions, a=1.0, c=2.0)


def east() -> Node:
    return quadratic_node(1, 2, a=2.0, c=1.0)


def fleet_of(grid: NodeGrid, folder: Path, notes: list[str] | None = None) -> FlowerFleet:
    clock = Clock(grid.time.monotonic, grid.time.sleep)
    return FlowerFleet(grid, FEDERATION, folder, note=(notes or []).append, clock=clock)


def one_round(fleet: FlowerFleet, deadline_seconds: float = 100.0) -> list[Answer | Silence]:
    model = fleet.model(PARAMS, {})
    run_plan = RunPlan(7, 1, presets.get("fedavg"), LocalWork(4, 0.1, None, 1), ("w",), Closing(2))
    tasks = plan.make_tasks(NAMES, 1, model.base, run_plan)
    expected = intake.make_expected({"w": PARAMS["w"]}, {})
    fleet.submit(tasks, model, Terms(expected, Closing(2, deadline_seconds), 2))
    return list(fleet.results())


def describing(description: Description, train: Node) -> Node:
    """A node that describes itself so."""

    def answer(message: Message) -> Message:
        if message.metadata.message_type == messages.DESCRIBE:
            return messages.describe(description, message)
        return train(message)

    return answer


def training(train: Node) -> Node:
    """The node `west`, which answers to a task so."""
    node = west()
    return lambda message: train(message) if message.metadata.message_type == "train" else node(message)


def test_clients_are_named_by_their_part_of_the_data_in_the_order_of_the_parts(tmp_path: Path) -> None:
    fleet = fleet_of(NodeGrid({3: east(), 9: west()}), tmp_path)
    assert fleet.clients(2) == ["west", "east"]
    assert fleet.declared_examples(["east"]) == {"east": 8}


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        (west(partitions=5), "part 0 of 5, but the experiment deals its rows out to 2"),
        (describing(Description(7, 2, 8, "data"), west()), "part 7 of 2"),
        (describing(Description(0, 2, 8, "other"), west()), "node 9 has other data than the server"),
        (lambda message: messages.refuse("no such file", message), "node 9 cannot take part: no such file"),
        (lambda message: Message(RecordDict({}), reply_to=message), "node 9 cannot take part: .*partition"),
    ],
    ids=["too many parts", "no such part", "other data", "refusal", "nothing"],
)
def test_a_node_that_is_no_client_of_the_experiment_ends_the_run(
    tmp_path: Path, node: Node, problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        fleet_of(NodeGrid({3: east(), 9: node}), tmp_path).clients(2)


def test_a_round_waits_for_nodes_and_begins_without_them_when_patience_ends(tmp_path: Path) -> None:
    grid = NodeGrid({3: east()})
    notes: list[str] = []
    fleet = FlowerFleet(
        grid, FEDERATION, tmp_path, note=notes.append, clock=Clock(grid.time.monotonic, grid.time.sleep)
    )
    assert fleet.clients(2) == ["east"]
    assert 60 <= grid.time.now < 61
    assert fleet.clients(2) == ["east"]
    assert grid.time.now < 61  # not waited for again
    assert "1 of 2 clients" in notes[-1]
    grid.nodes[4] = west()
    fleet.clients(2)
    assert fleet.clients(2) == ["west", "east"]


def test_a_client_goes_on_with_the_node_that_takes_its_place(tmp_path: Path) -> None:
    grid = NodeGrid({3: east(), 9: west()})
    fleet = fleet_of(grid, tmp_path)
    first = one_round(fleet)
    del grid.nodes[9]
    grid.nodes[11] = west()
    assert fleet.clients(2) == ["west", "east"]
    again = one_round(fleet)
    assert [each.task for each in again] == [each.task for each in first]
    assert all(isinstance(each, Answer) and isinstance(each.verdict, Update) for each in again)
    assert [each.metadata.dst_node_id for each in grid.sent[-2:]] == [11, 3]


def test_a_client_without_a_node_is_silent(tmp_path: Path) -> None:
    grid = NodeGrid({3: east(), 9: west()})
    fleet = fleet_of(grid, tmp_path)
    fleet.clients(2)
    del grid.nodes[9]
    fleet.clients(1)
    silent, answer = one_round(fleet)
    assert isinstance(silent, Silence) and silent.reason == "its node is gone"
    assert isinstance(answer, Answer) and answer.task.message.client == "east"


def test_a_node_that_flower_could_not_reach_is_queried_again(tmp_path: Path) -> None:
    failures = iter([True])

    def fails_once(message: Message) -> Message:
        return failing(message) if next(failures, False) else west()(message)

    grid = NodeGrid({3: east(), 9: fails_once})
    assert fleet_of(grid, tmp_path).clients(2) == ["west", "east"]
    assert 30 <= grid.time.now < 31


def failing(message: Message) -> Message:
    return Message(Error(3, "out of memory"), reply_to=message)


def refusing(message: Message) -> Message:
    return messages.refuse("no local examples to train on", message)


def saying_nothing(message: Message) -> Message:
    return Message(RecordDict({"mine": ConfigRecord({"a": 1})}), reply_to=message)


def sending_no_state(message: Message) -> Message:
    return messages.upload(b"", b"no safetensors", message)


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (failing, "out of memory"),
        (refusing, "no local examples to train on"),
        (saying_nothing, "its reply holds no upload"),
        (sending_no_state, ""),
    ],
)
def test_a_reply_without_an_update_is_silence_with_its_reason(
    tmp_path: Path, train: Node, reason: str
) -> None:
    reported = one_round(fleet_of(NodeGrid({3: east(), 9: training(train)}), tmp_path))
    (silent,) = [each for each in reported if isinstance(each, Silence)]
    assert silent.task.message.client == "west"
    assert reason in silent.reason
    assert [type(each.verdict) for each in reported if isinstance(each, Answer)] == [Update]


def sent(change: Callable[[TrainRequest], bytes]) -> Node:
    return lambda message: messages.upload(change(TrainRequest.of(message)), arrays.encode({}), message)


def encoded(request: TrainRequest, delta: Mapping[str, np.ndarray], base: str | None = None) -> bytes:
    task = replace(request.task, base=base or request.task.base)
    return arrays.encode_result(task, Update(dict(delta), num_examples=8, num_steps=1, train_loss=1.0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda request: b"no safetensors", "malformed"),
        (lambda request: encoded(request, {"w": np.full_like(PARAMS["w"], np.nan)}), "non_finite"),
        (lambda request: encoded(request, {"w": PARAMS["w"].astype(np.float64)}), "wrong_dtype"),
        (lambda request: encoded(request, {"w": PARAMS["w"]}, base="0" * 64), "stale_base"),
    ],
)
def test_an_update_passes_the_intake_as_any_other(
    tmp_path: Path, change: Callable[[TrainRequest], bytes], reason: str
) -> None:
    reported = one_round(fleet_of(NodeGrid({3: east(), 9: training(sent(change))}), tmp_path))
    (rejected,) = [
        each.verdict for each in reported if isinstance(each, Answer) and isinstance(each.verdict, Rejection)
    ]
    assert (rejected.client, rejected.reason) == ("west", reason)


def test_results_of_a_node_arrive_bit_for_bit(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 5
    take_identity()
    requested = messages.question(1, None, 10.0)
    assert messages.read_upload(messages.upload(payload, b"", requested)) == (payload, b"")
