"""A device adds noise as its task asks, tells nothing else of its rows, and refuses what noise would not hide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.data import open_data
from edge_client.relay.expected import Expected
from edge_client.relay.intake import check_claims
from edge_client.train import client_noise, schedule
from edge_client.train.process import Limits, TrainingFailed, TrainingJob, TrainingProcess
from edge_client.train.resolve import CannotRun
from edge_client.train.torch_trainer import TorchRuntime
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from strategies.params import Params, unflatten
from strategies.privacy.noise.secure import SeededSource
from strategies.update import Update
from tests.support.artifacts import ARCHITECTURES, spec_of
from tests.support.long import extended
from tests.support.training_jobs import MODEL, job, message

LOCAL = {"mechanism": "local", "clip_norm": 0.5, "noise_multiplier": 1.4}
EXAMPLE = {
    "mechanism": "example", "clip_norm": 1.0, "noise_multiplier": 1e-6, "limits": [{"rows": 40, "steps": 4}],
}  # fmt: skip


@pytest.fixture
def training(tmp_path: Path) -> Iterator[TrainingProcess]:
    process = TrainingProcess(
        tmp_path / "log", Limits(memory_bytes=2_000_000_000, cpu_seconds=600, seconds=600)
    )
    yield process
    process.close()


def with_noise(noise: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**message(), "noise": noise, **changes}


def sent(work: TrainingJob) -> tuple[Params, arrays.ResultHeader]:
    """The delta and the claims of a result."""
    content = work.result.read_bytes()
    streams = unflatten(arrays.decode(content))
    assert set(streams) == {"delta"}
    return dict(streams["delta"]), arrays.result_header(arrays.read_header(content).values)


def learnt(work: TrainingJob, **changes: Any) -> Params:
    """What PyTorch learns without noise."""
    spec = spec_of(ARCHITECTURES[MODEL])
    task = replace(TrainTask.of(TaskMessage.from_json({**work.message, "noise": None}), {}), **changes)
    assert work.params is not None
    params = arrays.decode(work.params.read_bytes())
    trainer = Trainer(TorchRuntime(spec.build(0), spec.loss))
    return dict(trainer.train(params, task, open_data(work.data).train()).update.delta)


def flat(params: Params) -> np.ndarray:
    return np.concatenate([params[name].ravel() for name in sorted(params)]).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["litert", "torch", *extended("tensorflow")])
def test_a_local_update_has_its_noise_and_tells_nothing_else(
    tmp_path: Path, training: TrainingProcess, runtime: str
) -> None:
    work = job(tmp_path, runtime=runtime, message=with_noise(LOCAL))
    done = training.run(work, lambda: None)
    first, header = sent(work)
    noise = flat(first) - flat(learnt(work, clip_norm=0.5))
    assert len(noise) > 3000
    assert noise.std() == pytest.approx(0.7, rel=0.05)
    assert abs(noise.mean()) < 5 * 0.7 / math.sqrt(len(noise))
    assert (header.num_examples, header.num_steps, header.train_loss) == (1, 4, 0.0)
    assert check_claims(header, TaskMessage.from_json(work.message), Expected({}, 1)) is None
    assert done.treated == ("clipped to norm 0.5, with noise of standard deviation 0.7 on each value",)
    assert not work.state_out.exists()
    training.run(work, lambda: None)  # the same task, seed and all
    again = flat(sent(work)[0]) - flat(first)
    assert again.std() == pytest.approx(0.7 * math.sqrt(2), rel=0.05)


@pytest.mark.slow
def test_a_step_of_dp_sgd_clips_each_row_and_hides_the_loss(
    tmp_path: Path, training: TrainingProcess
) -> None:
    """Batches of all rows, so that nothing is left to chance but noise that is too small to see."""
    work = job(tmp_path, runtime="torch")
    rows = open_data(work.data).train()
    work = replace(work, message=with_noise(EXAMPLE, batch_size=len(rows), steps=1, lr=1.0))
    done = training.run(work, lambda: None)
    found, header = sent(work)
    assert (header.num_examples, header.num_steps, header.train_loss) == (len(rows), 1, 0.0)
    assert done.treated[0].startswith(
        "trained by DP-SGD: the gradient of each row clipped to norm 1, with noise of"
    )
    spec = spec_of(ARCHITECTURES[MODEL])
    trainer = Trainer(TorchRuntime(spec.build(0), spec.loss))
    assert work.params is not None
    params = arrays.decode(work.params.read_bytes())
    alone = [
        flat(
            dict(
                trainer.train(
                    params, TrainTask(0, 1, 1.0, steps=1), rows.rows(slice(at, at + 1))
                ).update.delta
            )
        )
        for at in range(len(rows))
    ]
    clipped = [each * min(1.0, 1.0 / float(np.linalg.norm(each))) for each in alone]
    assert max(np.linalg.norm(each) for each in alone) > 1.5
    np.testing.assert_allclose(flat(found), sum(clipped) / len(rows), atol=1e-5)


@pytest.mark.slow
def test_the_noise_and_the_rows_of_dp_sgd_follow_from_no_seed(
    tmp_path: Path, training: TrainingProcess
) -> None:
    noisy = {**EXAMPLE, "clip_norm": 1e-3, "noise_multiplier": 1e3}
    work = job(tmp_path, runtime="torch", message=with_noise(noisy, steps=1, lr=1.0))
    training.run(work, lambda: None)
    first = flat(sent(work)[0])
    training.run(work, lambda: None)
    assert first.std() == pytest.approx(1 / 8, rel=0.05)
    assert np.corrcoef(first, flat(sent(work)[0]))[0, 1] < 0.1
    quiet = replace(work, message=with_noise(EXAMPLE, steps=1, lr=1.0))
    steps = []
    for _ in range(2):
        training.run(quiet, lambda: None)
        steps.append(flat(sent(quiet)[0]))
    assert np.linalg.norm(steps[0] - steps[1]) > 1e-3  # other rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "runtime", "code", "words"),
    [
        ({"noise": {**EXAMPLE, "limits": [{"rows": 200, "steps": 9}]}}, "torch", "limits", r"its \d+ rows it would take 4 steps .* it covers 200 or more rows with at most 9 steps"),
        ({"noise": {**EXAMPLE, "limits": []}}, "torch", "limits", "it covers no device"),
        ({"noise": EXAMPLE}, "litert", "wrong_runtime", "DP-SGD in litert, but it needs the gradients of single rows"),
        ({"noise": LOCAL, "code": {"name": "topk"}}, "litert", "failed", "and for the code 'topk', which cannot write the noise"),
        ({"noise": {"mechanism": "none"}}, "litert", "failed", "task.noise"),
    ],
)  # fmt: skip
def test_a_task_that_noise_does_not_hide_is_declined(
    tmp_path: Path, training: TrainingProcess, changes: dict[str, Any], runtime: str, code: str, words: str
) -> None:
    work = job(tmp_path, runtime=runtime, message={**message(), **changes})
    with pytest.raises(TrainingFailed, match=words) as failed:
        training.run(work, lambda: None)
    assert failed.value.decline.code == code
    assert not work.result.exists() and not work.state_out.exists()


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "measured_loss"}, {"name": "full_batch"}, {"name": "control_variates"}, {"name": "dynamic", "alpha": 0.1},
        {"name": "cluster_models", "clusters": 2}, {"name": "personal_model", "mu": 0.1}, {"name": "local_tensors", "local": ["fc.*"]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("noise", [LOCAL, EXAMPLE])
def test_rules_that_do_more_with_rows_than_take_steps_are_refused(
    noise: dict[str, Any], rule: dict[str, Any]
) -> None:
    with pytest.raises(CannotRun, match=f"the client rule '{rule['name']}', which does more with rows"):
        client_noise.read_noise(TaskMessage.from_json(with_noise(noise, rule=rule)), "torch")


def test_noise_inside_and_outside_of_secure_aggregation_is_refused() -> None:
    asked = TaskMessage.from_json(with_noise(LOCAL, secure={"group": 0}))
    with pytest.raises(CannotRun, match="and for secure aggregation; expected one of them"):
        client_noise.read_noise(asked, "torch")


def test_a_device_without_opacus_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TaskMessage.from_json(with_noise(EXAMPLE))
    assert client_noise.read_noise(asked, "torch") is not None
    monkeypatch.setattr(client_noise, "find_spec", lambda name: None)
    with pytest.raises(
        CannotRun, match=r"opacus, which is not installed here: pip install 'fedloop\[privacy\]'"
    ):
        client_noise.read_noise(asked, "torch")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_an_update_that_diverged_leaves_as_noise(value: float) -> None:
    update = Update(
        {"w": np.full(4000, value, np.float32), "b": np.ones(10, np.float32)}, 48, 4, float("nan")
    )
    asked = TaskMessage.from_json(with_noise(LOCAL))
    noise = client_noise.read_noise(asked, "torch")
    assert noise is not None
    hidden = client_noise.hide(update, asked, noise, SeededSource(np.random.default_rng(1)))
    assert np.asarray(hidden.delta["w"]).std() == pytest.approx(0.7, rel=0.05)
    assert (hidden.num_examples, hidden.num_steps, hidden.train_loss, hidden.extras) == (1, 4, 0.0, {})


def test_the_steps_of_a_hidden_update_follow_from_its_task_alone() -> None:
    update = Update({"w": np.ones(4, np.float32)}, 480, 60, 1.5)
    asked = TaskMessage.from_json(with_noise(LOCAL, epochs=2, steps=None))
    noise = client_noise.read_noise(asked, "torch")
    assert noise is not None
    hidden = client_noise.hide(update, asked, noise)
    assert hidden.num_steps == schedule.count(1, asked.batch_size, epochs=2, steps=None) == 2
