"""The model of a device's own, after a personalised run: what the daemon keeps for it, and what it predicts of natural rows."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.daemon.executor import FORGET_BLOBS_SECONDS, FORGET_RUN_SECONDS, PERSONAL_RULES
from edge_client.data.examples import Examples
from edge_client.errors import UserError
from edge_client.serving import own_model
from edge_client.serving.predict import accuracy, predict_inputs
from edge_client.serving.rows import read_rows
from edge_client.state import State
from edge_client.train.resolve import runtime_for
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.device import BlobRef, ModelRef, TaskMessage, TaskOffer
from edge_client.wire.schema import ColumnSchema, DataSchema
from strategies.params import flatten
from strategies.personalisation import _RULES, PersonalRule
from tests.support.edge import daemon, enrolled
from tests.support.fake_coordinator import FakeCoordinator

RUN = "11111111-2222-3333-4444-555555555555"
MODEL = ModelRef("mlp", {"hidden": [4]}, (2,), 2, "float32", "classification")
SCHEMA = DataSchema(
    "table",
    (2,),
    "float32",
    ("dry", "wet"),
    (ColumnSchema("heat", mean=20.0, deviation=5.0), ColumnSchema("rain", mean=1.0, deviation=2.0)),
    "state",
    scale="federated",
)
RULES: dict[str, dict[str, Any]] = {
    "fedper": {"name": "local_tensors", "local": ["fc.*"]},
    "fedrep": {"name": "head_then_body", "local": ["fc.*"], "head_epochs": 2},
    "ditto": {"name": "personal_model", "mu": 0.1},
}


def keep(folder: Path, content: bytes) -> BlobRef:
    digest = hashlib.sha256(content).hexdigest()
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "blobs" / digest).write_bytes(content)
    return BlobRef(digest, len(content))


def rows() -> Examples:
    x = np.random.default_rng(2).normal(size=(80, 2)).astype(np.float32)
    return Examples(x, (x[:, 1] > 0).astype(np.int32))


def after_a_run(folder: Path, rule: dict[str, Any]) -> tuple[TaskOffer, Any]:
    """The state folder as a daemon leaves it after a round, and the runtime with the params of its own model."""
    runtime = runtime_for("torch", MODEL, None, None)
    params = {
        name: np.random.default_rng(at).normal(0, 0.4, value.shape).astype(np.float32)
        for at, (name, value) in enumerate(runtime.module.state_dict().items())  # type: ignore[attr-defined]
    }
    received = keep(folder, arrays.encode(params))
    message = TaskMessage(3, "me", received.sha256, 5, 8, 0.3, 5, None, rule)
    result = Trainer(runtime).train(params, TrainTask.of(message, {}), rows(), {})
    newer = {name: value + np.float32(0.01) for name, value in params.items()}
    schema = keep(folder, SCHEMA.to_json().encode())
    offer = TaskOffer(
        task="22222222-2222-3333-4444-555555555555", kind="train", run=RUN, run_name="pumps", round=4, runtime="torch",
        dataset="pumps", message=message.to_json(), model=MODEL, params=keep(folder, arrays.encode(newer)), streams=None,
        artifact=None, manifest=None, lease_seconds=60.0, deadline_seconds=60.0, result_limit_bytes=1, schema=schema,
    )  # fmt: skip
    (folder / "rules").mkdir()
    (folder / "rules" / RUN).write_bytes(arrays.encode(flatten(result.client_state)))
    state = State(folder)
    state.keep_own_model(offer)
    state.close()
    kept = next(iter(result.client_state.values()))
    return offer, (runtime, {**newer, **kept})


def table(folder: Path) -> Path:
    data = rows()
    natural = data.x * np.array([5.0, 2.0]) + np.array([20.0, 1.0])
    lines = [
        f"{heat:.9g},{rain:.9g},{SCHEMA.classes[label]}"
        for (heat, rain), label in zip(natural.tolist(), data.y.tolist(), strict=True)
    ]
    (folder / "rows.csv").write_text("\n".join(["heat,rain,state", *lines]))
    return folder / "rows.csv"


@pytest.mark.parametrize("name", RULES)
def test_natural_rows_are_predicted_with_the_newest_global_params_and_what_the_device_keeps(
    tmp_path: Path, name: str
) -> None:
    _, (runtime, params) = after_a_run(tmp_path, RULES[name])
    loaded = own_model.load(tmp_path, "pumps")
    inputs = read_rows(table(tmp_path), loaded.manifest)
    np.testing.assert_allclose(inputs.x, rows().x, rtol=1e-5, atol=1e-6)
    assert loaded.predict(inputs.x).tobytes() == runtime.logits(params, inputs.x).tobytes()
    predictions = predict_inputs(loaded, inputs)
    assert {each.class_name for each in predictions} == {"dry", "wet"}
    right = runtime.logits(params, rows().x).argmax(1) == rows().y
    assert accuracy(predictions, inputs.y) == right.mean()
    assert own_model.load(tmp_path, RUN[:6]).manifest.version == 4


@pytest.mark.slow
def test_the_command_predicts_with_it(tmp_path: Path) -> None:
    _, (runtime, params) = after_a_run(tmp_path, RULES["fedper"])
    edge = Path(sys.executable).parent / "fedloop-edge"
    command = [edge, "--state-dir", tmp_path, "predict", table(tmp_path), "--own", "pumps"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    expected = runtime.logits(params, rows().x).argmax(1)
    assert (answer["model"], answer["version"]) == ("pumps", 4)
    assert [each["label"] for each in answer["predictions"]] == expected.tolist()
    both = subprocess.run([*command, "--model", "digits"], capture_output=True, text=True, timeout=600)
    assert both.returncode == 2 and "leave --model and --release out" in both.stderr


def test_without_such_a_model_the_reason_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--own pumps: this device has no model of its own of it; .* own: none"
    ):
        own_model.load(tmp_path, "pumps")
    offer, _ = after_a_run(tmp_path, RULES["fedper"])
    with pytest.raises(UserError, match=r"--own other: .* models of its own: pumps \(11111111\)"):
        own_model.load(tmp_path, "other")
    assert offer.params is not None
    (tmp_path / "blobs" / offer.params.sha256).unlink()
    with pytest.raises(UserError, match="a file of pumps is gone"):
        own_model.load(tmp_path, "pumps")
    (tmp_path / "rules" / RUN).unlink()
    with pytest.raises(UserError, match="none of its updates was accepted"):
        own_model.load(tmp_path, "pumps")
    state = State(tmp_path)
    state.keep_own_model(replace(offer, run="33333333-2222-3333-4444-555555555555"))
    state.close()
    with pytest.raises(UserError, match="several runs are called so"):
        own_model.load(tmp_path, "pumps")


def test_the_daemon_knows_the_rules_that_leave_a_model() -> None:
    in_simulations = {"cluster_models"}  # of IFCA
    assert {*PERSONAL_RULES, *in_simulations} == {
        name for name, rule in _RULES.items() if isinstance(rule, type) and issubclass(rule, PersonalRule)
    }


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().running() as fake:
        yield fake


def test_files_of_an_own_model_stay_for_two_weeks_after_its_run(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    enrolled(coordinator, tmp_path)
    edge = daemon(tmp_path)
    other = coordinator.offer(run=RUN.replace("1", "9"), message={"rule": 5})
    offer = coordinator.offer(message={"rule": RULES["fedper"]}, params=coordinator.add_blob(b"own"))
    edge.ticks(lambda: {offer.task, other.task} <= coordinator.accepted.keys())
    edge.clock.wall_error = 0.0
    edge.executor.forget(edge.clock.wall() + FORGET_BLOBS_SECONDS + 1, held=False)
    assert list(edge.executor.state.own_models()) == [RUN]
    assert {path.name for path in (tmp_path / "blobs").iterdir()} == {ref.sha256 for ref in offer.blobs}
    edge.executor.forget(edge.clock.wall() + FORGET_RUN_SECONDS + 1, held=False)
    assert edge.executor.state.own_models() == {} and not any((tmp_path / "blobs").iterdir())
    assert not (tmp_path / "rules" / RUN).exists()
