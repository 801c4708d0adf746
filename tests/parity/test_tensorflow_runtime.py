"""What a TensorFlow client keeps to beside the numbers: its promises to its device and to the Trainer."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from edge_client.train.trainer import Trainer, TrainTask
from models.zoo import cnn, mlp
from strategies.client_rules import ControlVariates, PlainSGD, Proximal
from tests.support.lazy_tensorflow import tf
from tests.support.lazy_tensorflow import trainer as tensorflow_trainer
from tests.support.local_data import examples, first_params, noise_like

pytestmark = pytest.mark.slow

SPEC = mlp.spec((6,), 3, hidden=[8])


class CountingTwin:
    """A twin that counts how often its forward pass is traced; a traced graph does not call it again."""

    def __init__(self, twin) -> None:
        self._twin = twin
        self.names = twin.names
        self.to_tensorflow = twin.to_tensorflow
        self.from_tensorflow = twin.from_tensorflow
        self.calls = 0

    def logits(self, weights, x):
        self.calls += 1
        return self._twin.logits(weights, x)


def test_one_graph_serves_every_batch_size_and_every_rule() -> None:
    twin = CountingTwin(SPEC.tensorflow_twin())
    trainer = Trainer(tensorflow_trainer.TensorFlowRuntime(twin))
    params = first_params(SPEC)
    streams = {"control": noise_like(params, seed=1)}
    for rule in (PlainSGD(), Proximal(mu=0.1), ControlVariates()):
        for count in (1, 7, 20):
            task = TrainTask(seed=count, batch_size=8, lr=0.1, epochs=2, rule=rule, broadcast=streams)
            trainer.train(params, task, examples((6,), 3, count, seed=count))
    assert twin.calls == 1


def test_the_same_task_gives_the_same_bits() -> None:
    spec = cnn.spec((8, 8), 10)
    params, data = first_params(spec), examples((8, 8), 10, 30, seed=2)
    task = TrainTask(seed=3, batch_size=8, lr=0.1, epochs=2)
    first = Trainer(tensorflow_trainer.TensorFlowRuntime(spec.tensorflow_twin()))
    second = Trainer(tensorflow_trainer.TensorFlowRuntime(spec.tensorflow_twin()))
    first.train(params, task, examples((8, 8), 10, 9, seed=9))  # a run before leaves nothing behind
    deltas = [trainer.train(params, task, data).update.delta for trainer in (first, second)]
    assert all(deltas[0][name].tobytes() == deltas[1][name].tobytes() for name in params)


def test_given_params_are_never_written_into_and_may_be_read_only() -> None:
    params = first_params(SPEC)
    before = {name: value.copy() for name, value in params.items()}
    for value in params.values():
        value.setflags(write=False)
    trainer = Trainer(tensorflow_trainer.TensorFlowRuntime(SPEC.tensorflow_twin()))
    result = trainer.train(
        params, TrainTask(seed=0, batch_size=4, lr=0.5, steps=3), examples((6,), 3, 9, seed=1)
    )
    assert all((params[name] == value).all() for name, value in before.items())
    for value in result.update.delta.values():
        value += 1  # the result is the caller's own, and shares nothing with TensorFlow
    again = trainer.train(
        params, TrainTask(seed=0, batch_size=4, lr=0.5, steps=3), examples((6,), 3, 9, seed=1)
    )
    assert all((again.update.delta[name] + 1 == value).all() for name, value in result.update.delta.items())


def test_tensors_not_trainable_stay_as_they_are() -> None:
    params, data = first_params(SPEC), examples((6,), 3, 9, seed=1)
    task = TrainTask(seed=0, batch_size=4, lr=0.5, steps=2)
    head = ("fc.weight", "fc.bias")
    partial = Trainer(tensorflow_trainer.TensorFlowRuntime(SPEC.tensorflow_twin(), trainable=head)).train(
        params, task, data
    )
    full = Trainer(tensorflow_trainer.TensorFlowRuntime(SPEC.tensorflow_twin())).train(
        params, TrainTask(seed=0, batch_size=4, lr=0.5, steps=1), data
    )
    assert set(partial.update.delta) == set(head)
    assert set(full.update.delta) == set(params)
    assert all(np.abs(value).max() > 0 for value in partial.update.delta.values())


def test_padding_counts_for_nothing() -> None:
    logits = tf.constant([[[1.0, 2.0], [5.0, -1.0]], [[0.5, 0.5], [9.0, 9.0]]])
    masked = tensorflow_trainer.masked_cross_entropy(logits, tf.constant([[0, -1], [1, -1]]))
    expected = (np.log1p(np.e) + np.log(2.0)) / 2
    np.testing.assert_allclose(float(masked), expected, rtol=1e-6)


def test_import_and_training_are_quiet_single_threaded_and_without_architectures() -> None:
    script = """
import sys
from edge_client.train import tensorflow_trainer
tensorflow_trainer.use_one_cpu_thread()
import tensorflow as tf
assert float(tf.reduce_sum(tf.ones([2, 2]))) == 4
threads = tf.config.threading
assert (threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads()) == (1, 1)
assert not tf.config.get_visible_devices("GPU")
tensorflow_trainer.use_one_cpu_thread()
assert not {"torch", "models", "sklearn", "matplotlib", "jax"} & set(sys.modules)
import matplotlib
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.extended
def test_a_running_tensorflow_is_left_as_it_was_set() -> None:
    script = """
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(2)
tf.ones([1])
from edge_client.train.tensorflow_trainer import use_one_cpu_thread
use_one_cpu_thread()
assert tf.config.threading.get_intra_op_parallelism_threads() == 2
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
