"""Keras models as users write them: small, of odd sizes, and between them every layer that trains everywhere."""

from __future__ import annotations

from typing import Any

from models.zoo.tensorflow.keras import KerasSpec
from tests.support.lazy_tensorflow import keras, layers


def mlp() -> Any:
    return keras.Sequential([layers.Flatten(), layers.Dense(16, activation="relu"), layers.Dense(10)])


def cnn() -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(6, (3, 2), strides=2, padding="same"),
            layers.ReLU(6.0),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def varied() -> Any:
    """Strides, overlaps and both paddings; all normalisations; branches; a model within the model."""
    x = given = keras.Input((9, 9, 1))
    x = layers.Rescaling(2.0, -1.0)(x)
    x = layers.Conv2D(8, 3, strides=2, padding="same")(layers.ZeroPadding2D(1)(layers.Cropping2D(1)(x)))
    x = layers.Activation("silu")(layers.GroupNormalization(2)(x))
    y = layers.LayerNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
    z = layers.LeakyReLU()(layers.DepthwiseConv2D(3, strides=2, depth_multiplier=2)(x))
    x = layers.Concatenate()([x, layers.Multiply()([x, y]), layers.Subtract()([x, y])])
    x = layers.MaxPooling2D(3, strides=1, padding="same")(layers.AveragePooling2D(2, padding="same")(x))
    x = layers.SeparableConv2D(16, 2, activation="tanh")(x)
    x = layers.Add()([x, layers.Permute((2, 1, 3))(z)])
    frozen = layers.BatchNormalization()
    frozen.trainable = False
    x = layers.GlobalAveragePooling2D()(layers.ELU()(layers.Dropout(0.0)(frozen(x))))
    inner = keras.Sequential(
        [keras.Input((16,)), layers.Dense(12, activation="hard_silu"), layers.Dense(12, activation="softmax")]
    )
    x = layers.Average()([layers.Identity()(inner(x)), layers.Dense(12, activation="exponential")(x)])
    return keras.Model(given, layers.Dense(10)(layers.Activation("hard_sigmoid")(x)))


def text() -> Any:
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(30, 8),
            layers.Conv1D(8, 3, padding="same", activation="relu6"),
            layers.Dense(8, activation="sigmoid"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3),
        ]
    )


def next_token() -> Any:
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(30, 8),
            layers.LayerNormalization(),
            layers.Dense(30),
        ]
    )


NETS: dict[str, KerasSpec] = {
    "mlp": KerasSpec("nets:mlp", mlp, (8, 8), 10),
    "cnn": KerasSpec("nets:cnn", cnn, (8, 8), 10),
    "varied": KerasSpec("nets:varied", varied, (9, 9, 1), 10),
    "text": KerasSpec("nets:text", text, (7,), 3, "int32"),
    "next_token": KerasSpec("nets:next_token", next_token, (7,), 30, "int32", "next_token"),
}
