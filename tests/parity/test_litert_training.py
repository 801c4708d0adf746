"""LiteRT against PyTorch: the same client task from the same params gives the same update.

Three steps from one start, the last on a short batch. Both compute in float32 and sum in another order;
a step's error is a few units in the last place of a gradient, so after three steps 1e-5 leaves room. Long
trajectories are not compared: a ReLU that flips its sign makes them part.
"""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.data.examples import PADDING, Examples
from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.train.torch_trainer import TorchRuntime, read
from edge_client.train.trainer import Trainer, TrainTask
from strategies.client_rules import ClientRule, ControlVariates, DynamicRegularizer, PlainSGD, Proximal
from strategies.personalisation import HeadThenBody, PersonalModel
from tests.support.artifacts import ARCHITECTURES, BATCH, exported, lived_in, local_examples, spec_of
from tests.support.local_data import noise_like

RULES: dict[str, ClientRule] = {
    "plain": PlainSGD(),
    "proximal": Proximal(mu=0.7),
    "control variates": ControlVariates(),
    "dynamic": DynamicRegularizer(alpha=0.3),
    "head, then body": HeadThenBody(("fc.*",), 1),
    "own model": PersonalModel(0.7),
}
EXTENDED = {"logreg", "mlp", "resnet8-batch", "resnet8-group", "textcls"}
"""Beside others of their kind."""

architectures = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extended if name in EXTENDED else ()) for name in ARCHITECTURES],
)
pytestmark = pytest.mark.slow  # each model is converted


CASES: dict[str, tuple[ClientRule, dict[str, float]]] = {
    **{name: (rule, {}) for name, rule in RULES.items()},
    "dynamic, momentum, clipped": (RULES["dynamic"], {"momentum": 0.9, "clip_grad_norm": 0.5}),
}


@architectures
@pytest.mark.parametrize(("rule", "options"), CASES.values(), ids=CASES)
def test_a_client_task_gives_the_update_that_pytorch_gives(
    name: str, rule: ClientRule, options: dict[str, float]
) -> None:
    litert, torch, params = twins(name)
    data = local_examples(spec_of(ARCHITECTURES[name]), 2 * BATCH + 3, seed=1)
    trainable = {tensor: params[tensor] for tensor in litert.runtime.trainable}
    broadcast = {"control": noise_like(trainable, seed=2)} if rule.name == "control_variates" else {}
    stream = {"control_variates": "control", "dynamic": "gradient", "personal_model": "personal"}.get(
        rule.name
    )
    state = {stream: noise_like(trainable, seed=3)} if stream else {}
    task = TrainTask(seed=5, batch_size=BATCH, lr=0.1, epochs=1, rule=rule, broadcast=broadcast, **options)

    got = litert.train(params, task, data, state)
    expected = torch.train(params, task, data, state)

    assert got.update.num_steps == expected.update.num_steps == 3
    assert got.update.train_loss == pytest.approx(expected.update.train_loss, abs=1e-5)
    assert_close(got.update.delta, expected.update.delta, 1e-5)
    # Divided by steps · lr, and so are its errors.
    for streams, twin in (
        (got.update.extras, expected.update.extras),
        (got.client_state, expected.client_state),
    ):
        assert streams.keys() == twin.keys()
        for stream in streams:
            assert_close(streams[stream], twin[stream], 5e-5)


@architectures
def test_evaluation_gives_the_scores_that_pytorch_gives(name: str) -> None:
    litert, torch, params = twins(name)
    data = local_examples(spec_of(ARCHITECTURES[name]), 2 * BATCH + 3, seed=4)

    got, expected = litert.evaluate(params, data), torch.evaluate(params, data)

    np.testing.assert_array_equal(got.correct, expected.correct)
    np.testing.assert_array_equal(got.labels, expected.labels)
    assert got.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)


@architectures
def test_params_are_named_shaped_and_split_as_the_module_has_them(name: str) -> None:
    _, manifest = exported(name)
    module = spec_of(ARCHITECTURES[name]).build(seed=0)

    assert {t.name: t.shape for t in manifest.tensors} == {n: v.shape for n, v in read(module).items()}
    assert manifest.trainable == tuple(n for n, p in module.named_parameters() if p.requires_grad)


@pytest.mark.extended
def test_running_statistics_come_in_but_are_not_trained() -> None:
    litert, _, params = twins("resnet8-batch")
    data = local_examples(spec_of(ARCHITECTURES["resnet8-batch"]), BATCH, seed=1)
    other = params | {"norm.running_mean": params["norm.running_mean"] + 1}

    assert not any("running" in tensor for tensor in litert.runtime.trainable)
    assert np.abs(litert.runtime.logits(other, data.x) - litert.runtime.logits(params, data.x)).max() > 1e-3


def test_labels_that_are_padding_do_not_move_the_model() -> None:
    litert, torch, params = twins("charlm")
    data = local_examples(spec_of(ARCHITECTURES["charlm"]), BATCH, seed=1)
    data.y[:, 5:] = PADDING
    task = TrainTask(seed=5, batch_size=BATCH, lr=0.1, epochs=1)

    assert_close(
        litert.train(params, task, data).update.delta, torch.train(params, task, data).update.delta, 1e-5
    )


def test_a_short_batch_is_the_step_of_its_own_rows() -> None:
    """Three rows alone, and the same three rows in a full batch whose other labels are padding."""
    litert, _, params = twins("cnn")
    full = local_examples(spec_of(ARCHITECTURES["cnn"]), BATCH, seed=1)
    full.y[3:] = PADDING
    task = TrainTask(seed=5, batch_size=BATCH, lr=0.1, epochs=1)

    alone = litert.train(params, task, Examples(full.x[:3], full.y[:3])).update.delta
    assert_close(alone, litert.train(params, task, full).update.delta, 1e-6)


def test_a_short_batch_of_quantities_is_the_step_of_its_own_rows() -> None:
    litert, torch, params = twins("mlp-quantity")
    data = local_examples(spec_of(ARCHITECTURES["mlp-quantity"]), 3, seed=1)
    data.y[0] = -1.0  # a quantity, though it equals a class that is padding
    task = TrainTask(seed=5, batch_size=BATCH, lr=0.1, epochs=1)
    assert_close(
        litert.train(params, task, data).update.delta, torch.train(params, task, data).update.delta, 1e-5
    )


def twins(name: str) -> tuple[Trainer, Trainer, dict[str, np.ndarray]]:
    """Trainers on both runtimes, and params to start from."""
    found, manifest = exported(name)
    spec = spec_of(ARCHITECTURES[name])
    module = spec.build(seed=0)
    litert = LiteRTRuntime(found.tflite, manifest)
    return Trainer(litert), Trainer(TorchRuntime(module, spec.loss)), lived_in(read(module), seed=9)


def assert_close(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=tolerance, err_msg=name)
    assert any(np.abs(value).max() > 100 * tolerance for value in expected.values()), "nothing was learned"
