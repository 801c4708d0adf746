"""A TensorFlow client and a PyTorch client that start alike and see the same batches stay alike.

Tolerance 1e-5: both compute in float32 and differ in the order of the sums inside a matrix product or a
convolution, some 1e-7 relative a step; a few steps and gradients of order one leave two digits to spare.
Longer runs are not compared: a ReLU that flips at the last bit takes them apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_client.data.examples import Examples
from edge_client.train.trainer import Trainer, TrainTask
from models.zoo import cnn, logreg, mlp
from models.zoo.spec import ModelSpec
from strategies.client_rules import ClientRule, ControlVariates, PlainSGD, Proximal
from strategies.personalisation import HeadThenBody
from tests.support.local_data import examples, first_params, noise_like, torch_runtime
from tests.support.long import extended

TOLERANCE = 1e-5

SPECS = {
    "logreg": logreg.spec((12,), 3),
    "logreg on images": logreg.spec((4, 5), 3),
    "mlp one hidden layer": mlp.spec((12,), 4, hidden=[32]),
    "mlp two hidden layers": mlp.spec((12,), 4, hidden=[32, 16]),
    "cnn": cnn.spec((8, 8), 10),
    "cnn with a hidden layer": cnn.spec((8, 8), 10, hidden=24),
    "cnn odd size": cnn.spec((7, 5), 4, channels=(3, 6), hidden=8),
    "cnn colour": cnn.spec((3, 9, 6), 5, channels=(4, 6)),
    "cnn colour with a hidden layer": cnn.spec((3, 8, 11), 5, channels=(4, 6), hidden=12),
}
RULES: list[ClientRule] = [PlainSGD(), Proximal(mu=0.5), ControlVariates(), HeadThenBody(("fc.weight",), 1)]

any_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
any_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def trainers(spec: ModelSpec) -> tuple[Trainer, Trainer]:
    from edge_client.train.tensorflow_trainer import TensorFlowRuntime  # takes seconds

    return Trainer(torch_runtime(spec)), Trainer(TensorFlowRuntime(spec.tensorflow_twin()))


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].shape == value.shape
        assert actual[name].dtype == np.float32 and actual[name].flags.c_contiguous
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=TOLERANCE, err_msg=name)


@any_spec
@any_rule
@pytest.mark.parametrize("steps", [3, *extended(1)])
@pytest.mark.slow
def test_a_few_steps_agree_with_pytorch(spec: ModelSpec, rule: ClientRule, steps: int) -> None:
    # 20 examples in batches of 8: the third batch is shorter.
    data = examples(spec.input_shape, spec.classes, 20, seed=1, padded=2)
    params = first_params(spec)
    broadcast = {"control": noise_like(params, seed=2)}
    kept = {"control": noise_like(params, seed=3)}
    task = TrainTask(seed=5, batch_size=8, lr=0.1, steps=steps, rule=rule, broadcast=broadcast)

    torch_result, tensorflow_result = (trainer.train(params, task, data, kept) for trainer in trainers(spec))

    assert any(np.abs(value).max() > 100 * TOLERANCE for value in torch_result.update.delta.values())
    assert_close(tensorflow_result.update.delta, torch_result.update.delta)
    assert tensorflow_result.update.train_loss == pytest.approx(torch_result.update.train_loss, abs=TOLERANCE)
    assert tensorflow_result.update.num_steps == torch_result.update.num_steps == steps
    assert tensorflow_result.update.extras.keys() == torch_result.update.extras.keys()
    # A control variate is the delta over steps · lr, so its error is that much larger.
    scale = max(1.0, 1 / (steps * task.lr))
    for stream, tensors in torch_result.update.extras.items():
        for name, value in tensors.items():
            actual = tensorflow_result.update.extras[stream][name]
            np.testing.assert_allclose(actual, value, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.slow
def test_momentum_and_clipping_agree_with_pytorch() -> None:
    spec = SPECS["cnn odd size"]
    data, params = examples(spec.input_shape, spec.classes, 20, seed=1, padded=2), first_params(spec)
    plain = TrainTask(seed=5, batch_size=8, lr=0.1, steps=3, rule=Proximal(mu=0.5))
    pytorch, tensorflow = trainers(spec)

    for options in ({"momentum": 0.9}, {}, {"momentum": 0.5, "clip_grad_norm": 0.2}, {"clip_grad_norm": 0.2}):
        task = replace(plain, **options)
        expected, found = (trainer.train(params, task, data).update for trainer in (pytorch, tensorflow))
        assert_close(found.delta, expected.delta)


@any_spec
@pytest.mark.slow
def test_logits_loss_and_accuracy_agree_with_pytorch(spec: ModelSpec) -> None:
    data = examples(spec.input_shape, spec.classes, 300, seed=4, padded=3)
    params = noise_like(first_params(spec), seed=6, scale=0.5)
    torch_trainer, tensorflow_trainer = trainers(spec)

    expected, actual = torch_trainer.evaluate(params, data), tensorflow_trainer.evaluate(params, data)

    logits = torch_trainer.runtime.logits(params, data.x)
    np.testing.assert_allclose(
        tensorflow_trainer.runtime.logits(params, data.x),
        logits,
        rtol=0,
        atol=TOLERANCE * np.abs(logits).max(),
    )
    assert actual.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert actual.correct.tolist() == expected.correct.tolist()
    assert actual.labels.tolist() == expected.labels.tolist() == [0] * 3 + [1] * 297


@pytest.mark.slow
def test_a_quantity_is_learned_as_in_pytorch() -> None:
    spec = mlp.spec((12,), 1, hidden=[16]).of_quantity()
    rng = np.random.default_rng(1)
    data = Examples(rng.normal(size=(20, 12)).astype(np.float32), rng.normal(size=20).astype(np.float32))
    params, task = first_params(spec), TrainTask(seed=5, batch_size=8, lr=0.1, steps=3)
    torch_trainer, tensorflow_trainer = trainers(spec)
    expected, actual = (each.train(params, task, data).update for each in (torch_trainer, tensorflow_trainer))
    assert any(np.abs(value).max() > 100 * TOLERANCE for value in expected.delta.values())
    assert_close(actual.delta, expected.delta)
    assert actual.train_loss == pytest.approx(expected.train_loss, abs=TOLERANCE)
    scored, same = (each.evaluate(params, data) for each in (torch_trainer, tensorflow_trainer))
    assert same.loss == pytest.approx(scored.loss, rel=TOLERANCE)


@any_spec
@pytest.mark.slow
def test_both_runtimes_name_the_same_tensors_in_the_same_order(spec: ModelSpec) -> None:
    torch_trainer, tensorflow_trainer = trainers(spec)
    assert tensorflow_trainer.runtime.trainable == torch_trainer.runtime.trainable
