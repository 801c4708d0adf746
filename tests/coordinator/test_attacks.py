"""Attacks of simulated clients: what they send, what they do to their rows, and what a run reports."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.fleets.attacked import AttackedFleet, UpdateAttack, alie_scale
from coordinator.rounds.fleet import Answer, Fleet, Measured, Silence
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import Task
from coordinator.workers import attacks
from coordinator.workers.workspace_arrays import open_workspace
from edge_client.wire.device import TaskMessage
from strategies.update import Update

HONEST = np.array([[1.0, -2.0], [3.0, -2.0], [2.0, 1.0]], np.float32)
OWN = np.array([4.0, 0.5], np.float32)


def task(position: int) -> Task:
    return Task(position, TaskMessage(1, f"c{position}", "0" * 64, 0, 8, 0.1, 1, None, {"name": "plain"}))


def update(values: np.ndarray) -> Update:
    return Update({"w": values}, 10, 1, 0.5)


class Honest:
    """A fleet of two clients that will be malicious, three honest ones, and one whose update is rejected."""

    def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence]:
        yield Answer(task(0), update(OWN), 100, 1.0)
        for index, row in enumerate(HONEST, start=1):
            yield Answer(task(index), update(row), 100, 1.0)
        yield Answer(task(4), Rejection("c4", "not_finite", "NaN"), 100, 1.0)
        yield Silence(task(5), "dropped out", 9.0)


def forged(name: str, scale: float | None = None) -> list[Answer | Silence]:
    """What the fleet answers of which `c0` and `c5`, the silent one, are malicious."""
    attack = UpdateAttack(name, frozenset({"c0", "c5"}), seed=7, scale=scale)
    answers = AttackedFleet(cast(Fleet, Honest()), attack).results()
    return [each for each in answers if isinstance(each, Answer | Silence)]


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("sign_flip", None, -5 * OWN),
        ("scaling", 3.0, 3 * OWN),
        ("ipm", 2.0, -2 * HONEST.mean(axis=0)),
        ("alie", 1.5, HONEST.mean(axis=0) - 1.5 * HONEST.std(axis=0)),
        ("alie", None, HONEST.mean(axis=0) - alie_scale(4, 1) * HONEST.std(axis=0)),
    ],
)
def test_a_malicious_client_sends_the_forged_update_after_all_others(
    name: str, scale: float | None, expected: np.ndarray
) -> None:
    answers = forged(name, scale)
    assert [each.task.position for each in answers] == [1, 2, 3, 4, 5, 0]
    for each, row in zip(answers, HONEST, strict=False):
        assert isinstance(each, Answer) and isinstance(each.verdict, Update)
        np.testing.assert_array_equal(each.verdict.delta["w"], row)
    last = answers[-1]
    assert isinstance(last, Answer) and isinstance(last.verdict, Update)
    assert not isinstance(last.verdict, Measured) and last.verdict.num_examples == 10
    assert last.verdict.delta["w"].dtype == np.float32
    np.testing.assert_allclose(last.verdict.delta["w"], expected, rtol=1e-6)


def test_noise_is_the_same_again_and_another_in_another_place() -> None:
    first, second = (forged("gaussian", 2.0)[-1] for _ in range(2))
    assert isinstance(first, Answer) and isinstance(second, Answer)
    assert isinstance(first.verdict, Update) and isinstance(second.verdict, Update)
    np.testing.assert_array_equal(first.verdict.delta["w"], second.verdict.delta["w"])
    assert not np.array_equal(first.verdict.delta["w"], OWN)


def test_the_deviation_of_alie_is_that_of_the_paper() -> None:
    # Baruch 2019, section 4.1: of 50 workers 24 corrupted, two supporters are needed: 24 of 26 honest ones are nearer.
    assert alie_scale(50, 24) == pytest.approx(1.43, abs=0.01)
    assert alie_scale(1, 1) == 0.0


def make_workspace(folder: Path) -> Path:
    """Two clients of four rows each, and two held-out rows."""
    arrays = {
        "x": np.linspace(0, 1, 10 * 40, dtype=np.float32).reshape(10, 40),
        "y": np.array([0, 1, 2, 3, 0, 1, 2, 3, 1, 2], np.int32),
        "test_rows": np.array([8, 9]),
        "owners": np.zeros(2, np.int32),
        "parts": np.arange(8),
        "ends": np.array([4, 8]),
        "sites": np.zeros(0, np.int32),
    }
    folder.mkdir()
    for name, value in arrays.items():
        np.save(folder / f"{name}.npy", value)
    return folder


def poisoned(folder: Path, **attack: Any) -> Any:
    request = {"folder": str(folder), "seed": 7, "classes": 4, "parts": [1], "attack": attack}
    attacks.poison(request)
    attacks.poison(request)  # as when the process died before it could go on
    return open_workspace(folder)


def test_labels_of_a_malicious_client_are_flipped_once(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "w")
    labels = np.load(folder / "y.npy")
    labels[7] = -1  # a row without a label
    np.save(folder / "y.npy", labels)
    data = poisoned(folder, name="label_flip")
    assert data.y.tolist() == [0, 1, 2, 3, 3, 2, 1, -1, 1, 2]
    x, wanted = attacks.attacked_rows(data, {"name": "label_flip"}, 4)
    assert wanted.tolist() == [2, 1]
    np.testing.assert_array_equal(x, data.x[8:])


def test_a_backdoor_marks_a_share_of_the_rows_of_a_malicious_client(tmp_path: Path) -> None:
    before = open_workspace(make_workspace(tmp_path / "clean")).x
    data = poisoned(make_workspace(tmp_path / "w"), name="backdoor", target=3, share=0.5)
    changed = np.flatnonzero((data.x != before).any(axis=1))
    assert len(changed) <= 2 and set(changed) <= {4, 5, 6, 7}
    assert (data.y == 3).sum() in (3, 4) and (data.y[:4] == [0, 1, 2, 3]).all()
    brightest = before[:8].max()
    assert (data.x[changed][:, -2:] == brightest).all()
    np.testing.assert_array_equal(data.x[:, :-2], before[:, :-2])
    x, wanted = attacks.attacked_rows(data, {"name": "backdoor", "target": 1}, 4)
    assert (
        wanted.tolist() == [1] and (x[:, -2:] == brightest).all()
    )  # a row that has the class already does not count


def test_the_trigger_of_an_image_is_in_its_last_corner() -> None:
    marked = attacks.add_trigger(np.zeros((2, 8, 8, 3), np.float32), 1.0)
    assert marked[:, 6:, 6:].min() == 1.0 and marked.sum() == 2 * 2 * 2 * 3


def simulate(
    out: Path,
    attack: dict[str, Any] | None,
    strategy: dict[str, Any],
    local_baseline: str = "off",
    **federation: Any,
) -> Any:
    document = {
        "data": {"dataset": "digits", "partition": "iid"},
        "model": {"name": "mlp", "hidden": [16]},
        "federation": {
            "clients": 8,
            "clients_per_round": 8,
            "rounds": 6,
            "runtimes": {"torch": 1},
            **federation,
        },
        "local": {"epochs": 4, "lr": 0.1},
        "simulation": {
            "workers": 2,
            "local_baseline": local_baseline,
            **({"attack": attack} if attack else {}),
        },
        "strategy": strategy,
    }
    return fedloop.simulate(document, out=out).report


@pytest.mark.slow
def test_a_robust_rule_learns_where_the_mean_does_not(tmp_path: Path) -> None:
    attack = {"name": "sign_flip", "clients": 2}
    mean = simulate(tmp_path / "mean", attack, {"name": "fedavg"})
    robust = simulate(tmp_path / "robust", attack, {"name": "multi_krum", "malicious": 2})
    assert mean["final"]["test_accuracy"] < 0.3 < 0.8 < robust["final"]["test_accuracy"]
    assert robust["attack"]["name"] == "sign_flip" and len(robust["attack"]["clients"]) == 2
    assert robust["attack"]["success"] is None
    events = [json.loads(line) for line in (tmp_path / "robust" / "events.jsonl").read_text().splitlines()]
    first = [each["client"] for each in events if each["event"] == "update_accepted"][:8]
    assert sorted(first[-2:]) == sorted(robust["attack"]["clients"])


@pytest.mark.slow
def test_a_backdoor_gets_into_the_mean_and_its_success_is_reported(tmp_path: Path) -> None:
    attack = {"name": "backdoor", "clients": 2, "target": 3, "scale": 3.0}
    mean = simulate(tmp_path / "mean", attack, {"name": "fedavg"})["attack"]
    robust = simulate(tmp_path / "robust", attack, {"name": "median", "malicious": 2})["attack"]
    assert mean["success"] > 0.5 > 0.2 > robust["success"]
    assert mean["rows"] == robust["rows"] > 300
    beside_baseline = simulate(tmp_path / "baseline", attack, {"name": "fedavg"}, local_baseline="on")
    assert beside_baseline["attack"] == mean


@pytest.mark.parametrize(
    ("attack", "others", "message"),
    [
        ({"name": "sign_flip", "clients": 8}, {}, "simulation.attack.clients = 8 of federation.clients = 8"),
        ({"name": "ipm", "clients": 2, "target": 1}, {}, "simulation.attack.target is for a backdoor"),
        ({"name": "label_flip", "clients": 2, "scale": 2.0}, {}, "simulation.attack.scale is for attacks that change"),
        ({"name": "alie", "clients": 2}, {"mode": "async"}, "simulation.attack does not go with federation.mode = 'async'"),
        ({"name": "nonsense", "clients": 2}, {}, "simulation.attack.name = 'nonsense'"),
    ],
)  # fmt: skip
def test_an_attack_that_cannot_be_is_refused(
    tmp_path: Path, attack: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        simulate(tmp_path / "run", attack, {"name": "fedavg"}, **others)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_target_that_is_no_class_is_refused_once_the_data_is_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="target = 12 is no class of the data; expected 0 to 9"):
        simulate(tmp_path / "run", {"name": "backdoor", "clients": 2, "target": 12}, {"name": "fedavg"})


@pytest.mark.slow
def test_a_round_of_few_sites_is_refused_for_a_robust_rule_once_the_data_is_known(tmp_path: Path) -> None:
    rows = ["a,b,label,site", *(f"{n},{n % 7},{n % 2},{'north' if n % 3 else 'south'}" for n in range(60))]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    data = {"path": str(tmp_path / "rows.csv"), "dataset": "csv", "label": "label", "site": "site"}
    document = {"data": data, "model": {"name": "logreg"}, "strategy": {"name": "median", "malicious": 1}}
    with pytest.raises(
        UserError, match=r"needs 3 or more updates in a round, but federation.clients_per_round = 2"
    ):
        fedloop.simulate({**document, "federation": {"runtimes": {"torch": 1}}}, out=tmp_path / "run")
