"""A user's Keras model becomes the artifact that any model becomes: it trains as Keras does, or is refused with the reason.

Steps are compared with TensorFlow's own gradients of the model as it was written, from the same start, as for PyTorch in
`tests.parity.test_litert_training`.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.data.examples import Examples
from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import manifest
from edge_client.wire.manifest import Manifest
from models import zoo
from models.compress.quantization import recipes
from models.conversion import convert
from models.conversion.request import ExportRequest
from models.conversion.trace import NotConvertible
from models.zoo.tensorflow.keras import (
    KerasSpec,
    KerasUnfit,
    from_file,
)
from strategies.client_rules import Proximal
from tests.support.artifacts import cache_dir, lived_in
from tests.support.keras_nets import NETS
from tests.support.lazy_tensorflow import keras, layers, tf, trainer
from tests.support.long import extended
from tests.support.releases import constrained_python

pytestmark = pytest.mark.slow

BATCH = 8

SELF_TESTS = """
import sys
from pathlib import Path
from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.wire import manifest

for tflite, described in zip(sys.argv[1::2], sys.argv[2::2]):
    LiteRTRuntime(Path(tflite), manifest.from_json(Path(described).read_bytes(), described)).self_test()
"""


@functools.cache
def exported(name: str) -> tuple[Path, Path, Manifest]:
    """The artifact of one of `NETS`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(convert, "_spec", lambda request: NETS[name])
        answer = convert.convert(request_of(NETS[name]), cache_dir())
    described = Path(answer["manifest"])
    return Path(answer["tflite"]), described, manifest.from_json(described.read_bytes())


def request_of(spec: KerasSpec) -> ExportRequest:
    return ExportRequest(spec.name, {}, spec.input_shape, spec.classes, spec.input_dtype, spec.task, BATCH)


def examples(spec: KerasSpec, count: int) -> Examples:
    rng = np.random.default_rng(4)
    labels = (count, *spec.input_shape) if spec.task == "next_token" else (count,)
    y = rng.integers(0, spec.classes, labels).astype(np.int32)
    if spec.input_dtype == "int32":
        return Examples(rng.integers(0, spec.tokens, (count, *spec.input_shape)).astype(np.int32), y)
    return Examples(rng.random((count, *spec.input_shape), np.float32), y)


@pytest.mark.parametrize("name", ["varied", *extended("mlp", "cnn", "text", "next_token")])
def test_a_client_task_gives_the_update_that_keras_gives(name: str) -> None:
    """Three steps, the last on a short batch; one rule that adds to the step."""
    tflite, _, described = exported(name)
    model = NETS[name].build(seed=3)
    params = lived_in(model.params(), seed=9)
    data = examples(NETS[name], 2 * BATCH + 3)
    task = TrainTask(seed=5, batch_size=BATCH, lr=0.1, epochs=1, rule=Proximal(mu=0.7))

    litert = Trainer(LiteRTRuntime(tflite, described))
    plain = Trainer(trainer.TensorFlowRuntime(model, trainable=model.trainable))
    got, expected = litert.train(params, task, data), plain.train(params, task, data)

    assert described.trainable == model.trainable
    assert {t.name: t.shape for t in described.tensors} == {n: v.shape for n, v in params.items()}
    assert got.update.train_loss == pytest.approx(expected.update.train_loss, abs=1e-5)
    assert got.update.delta.keys() == expected.update.delta.keys() == set(model.trainable)
    for tensor, value in expected.update.delta.items():
        np.testing.assert_allclose(got.update.delta[tensor], value, rtol=0, atol=1e-5, err_msg=tensor)
    assert max(np.abs(value).max() for value in expected.update.delta.values()) > 1e-3
    np.testing.assert_array_equal(litert.evaluate(params, data).correct, plain.evaluate(params, data).correct)


@pytest.mark.parametrize("names", [["varied"], *extended(list(NETS))], ids=["some", "all"])
def test_artifacts_pass_their_golden_answers_on_the_constrained_runtime(names: list[str]) -> None:
    files = [path for name in names for path in exported(name)[:2]]

    done = subprocess.run(
        [constrained_python(), "-c", SELF_TESTS, *files], capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr


def test_a_file_with_a_wrong_gradient_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from models.conversion.keras_gradients import OVERRIDES  # imports TensorFlow

    @tf.RegisterGradient("TestTwiceTheReluGradient")
    def twice(op: Any, dy: Any) -> Any:
        return 2 * dy * tf.cast(op.outputs[0] > 0, dy.dtype)

    monkeypatch.setitem(OVERRIDES, "Relu", "TestTwiceTheReluGradient")
    monkeypatch.setattr(convert, "_spec", lambda request: NETS["mlp"])

    with pytest.raises(
        NotConvertible, match=r"does not compute what TensorFlow does .*train gave change of dense\."
    ):
        convert.convert(request_of(NETS["mlp"]), tmp_path)

    assert not list(tmp_path.glob("**/*.tflite"))


def test_the_same_seed_gives_the_same_params_under_the_same_names() -> None:
    first, again, other = (NETS["cnn"].build(seed).params() for seed in (1, 1, 2))

    assert list(first) == list(again) == list(other)
    assert list(first)[:2] == ["conv2d.kernel", "conv2d.bias"]
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
    assert np.abs(first["dense.kernel"] - other["dense.kernel"]).max() > 0.01


def test_weights_of_one_name_in_a_layer_are_distinguished_also_in_a_file(tmp_path: Path) -> None:
    given = keras.Input((8, 8))
    h = layers.MultiHeadAttention(2, 4, name="attention")(given, given)
    h = layers.Bidirectional(layers.LSTM(4), name="both")(h)
    made = keras.Model(given, layers.Dense(3, name="out")(h))
    made.save(tmp_path / "net.keras")
    spec = zoo.find(str(tmp_path / "net.keras"), input_shape=(8, 8), classes=3)
    names = spec.build(0).names
    assert {"attention.query.kernel", "attention.attention_output.bias", "out.kernel"} <= set(names)
    assert len(names) == len(made.weights) == len(set(names))
    assert names == spec.build(1).names


@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_a_model_with_loops_is_refused_for_static_int8_with_what_to_take(layer: str) -> None:
    from models.release.keras_inference import to_tflite  # imports TensorFlow

    def made() -> Any:
        given = keras.Input((4, 2))
        return keras.Model(given, layers.Dense(3)(getattr(layers, layer)(2)(given)))

    model = KerasSpec("loop", made, (4, 2), 3).build(0)
    float32 = to_tflite(model, model.params())
    with pytest.raises(recipes.NotCalibrated, match=r"loops .*LSTM and GRU.*--precision dynamic-int8"):
        recipes.calibrate(float32, np.zeros((2, 4, 2), np.float32))


def test_a_keras_file_is_the_model_with_its_weights(tmp_path: Path) -> None:
    model = NETS["varied"].build(seed=1)
    model.model.save(tmp_path / "net.keras")

    spec = zoo.find(str(tmp_path / "net.keras"), input_shape=(9, 9, 1), classes=10)

    assert isinstance(spec, KerasSpec)
    found = spec.require_trainable()
    assert found.trainable == model.trainable
    for name, value in found.params().items():
        np.testing.assert_array_equal(value, model.params()[name])


def followed_by(*more: Any) -> Callable[[], Any]:
    return lambda: keras.Sequential([keras.Input((8, 8)), *(each() for each in more)])


def flat(*more: Any) -> Callable[[], Any]:
    return followed_by(flatten, *more, lambda: layers.Dense(10))


def images(*more: Any) -> Callable[[], Any]:
    return flat(lambda: layers.Reshape((8, 8, 1)), *more, flatten)


def flatten() -> Any:
    return layers.Flatten()


def subclass() -> Any:
    class Own(keras.Model):  # type: ignore[misc, name-defined]
        def call(self, x: Any) -> Any:
            return x

    return Own()


def two_outputs() -> Any:
    x = keras.Input((8, 8))
    return keras.Model(x, [layers.Dense(10)(layers.Flatten()(x)), x])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown layer": (
        followed_by(lambda: layers.LSTM(4), lambda: layers.Dense(10)),
        r"layer 'lstm' is a LSTM, .* layers that can be: .*GroupNormalization",
    ),
    "batch statistics": (flat(lambda: layers.BatchNormalization()), r"freeze it \(trainable = False\), or take Group"),
    "dropout": (flat(lambda: layers.Dropout(0.2)), r"'dropout' is random, .* leave dropout out \(rate=0\)"),
    "activation": (flat(lambda: layers.Dense(4, activation="selu")), r"activation selu, .*take one of: .*relu6"),
    "probabilities before a reshape": (
        followed_by(flatten, lambda: layers.Dense(10, "softmax"), flatten),
        r"answers with probabilities, expected logits",
    ),
    "probabilities": (
        followed_by(flatten, lambda: layers.Dense(10, activation="softmax")),
        r"last layer 'dense' gives probabilities, expected logits; leave its activation out",
    ),
    "groups": (images(lambda: layers.Conv2D(4, 3), lambda: layers.Conv2D(4, 3, groups=2)), r"groups = 2"),
    "dilation": (images(lambda: layers.Conv2D(4, 3, dilation_rate=2)), r"dilation_rate = \(2, 2\); take"),
    "regularizer": (flat(lambda: layers.Dense(4, kernel_regularizer="l2")), r"adds to the loss"),
    "constraint": (flat(lambda: layers.Dense(4, kernel_constraint="max_norm")), r"a constraint on kernel"),
    "half precision": (flat(lambda: layers.Dense(4, dtype="mixed_float16")), r"computes in float16"),
    "half weights": (flat(lambda: layers.Dense(4, dtype="float16")), r"dense/kernel is float16; params are"),
    "subclass": (subclass, r"subclass of keras.Model with code of its own; make it of layers"),
    "two outputs": (two_outputs, r"1 inputs and 2 outputs, expected one of each"),
    "another shape": (lambda: keras.Sequential([keras.Input((64,)), layers.Dense(10)]), r"takes .*\(64,\), the data has \(8, 8\)"),
    "classes": (followed_by(flatten, lambda: layers.Dense(9)), r"\[batch, 9\] .* expected \[batch, 10\]"),
    "nothing to train": (followed_by(flatten, lambda: layers.Dense(10, trainable=False)), r"no trainable"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_cannot_be_trained_everywhere_are_refused_by_name(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(KerasUnfit, match=reason):
        KerasSpec("nets:own", make, (8, 8), 10).require_trainable()


def test_a_file_with_code_in_it_or_none_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "code.keras"
    followed_by(flatten, lambda: layers.Lambda(lambda x: x), lambda: layers.Dense(10))().save(path)
    (tmp_path / "torn.keras").write_bytes(path.read_bytes()[:200])

    for name in ("code.keras", "torn.keras"):
        spec = from_file(str(tmp_path / name), (8, 8), 10, "float32", "classification")
        with pytest.raises(KerasUnfit, match="cannot be read without running code from it"):
            spec.build(0)
    with pytest.raises(zoo.ModelNotFound, match=r"'none\.keras': there is no such file"):
        zoo.find("none.keras", input_shape=(8, 8), classes=10)
    with pytest.raises(zoo.ModelNotFound, match="is a file and has no options, got width"):
        zoo.find(str(path), input_shape=(8, 8), classes=10, width=3)


def test_commands_that_need_torch_refuse_a_keras_model(tmp_path: Path) -> None:
    with pytest.raises(zoo.ModelNotFound, match=r"is a Keras model, .* this needs a torch\.nn\.Module"):
        path = tmp_path / "net.keras"
        NETS["mlp"].build(0).model.save(path)
        zoo.get(str(path), input_shape=(8, 8), classes=10)
