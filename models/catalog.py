"""The built-in models: names, options and their schema, without importing a framework.

The coordinator validates experiment files with it, and the console builds forms from it. The architectures are in
`models.zoo`, one module for each entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Runtime = Literal["litert", "torch", "tensorflow"]
Width = Annotated[int, Field(ge=1, le=65536)]
Count = Annotated[int, Field(ge=1, le=1024)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class ModelOptions(BaseModel):
    """Options of a model; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NoOptions(ModelOptions):
    """No options."""


class MLPOptions(ModelOptions):
    hidden: Annotated[list[Width], Field(min_length=1)] = [64]


class CNNOptions(ModelOptions):
    channels: Annotated[list[Width], Field(min_length=2, max_length=2)] = [8, 16]
    hidden: Annotated[int, Field(ge=0, le=65536)] = 0


class ResNet8Options(ModelOptions):
    norm: Literal["group", "batch"] = "group"
    width: Annotated[int, Field(ge=4, le=1024, multiple_of=4)] = 16


class TransformerOptions(ModelOptions):
    width: Annotated[int, Field(ge=4, le=4096)] = 32
    layers: Annotated[int, Field(ge=1, le=64)] = 2
    heads: Annotated[int, Field(ge=1, le=64)] = 4


class LargeOptions(ModelOptions):
    width: Annotated[int, Field(ge=4, le=65536)] = 128
    layers: Count = 4
    heads: Count = 4


class GPTOptions(LargeOptions):
    dropout: Dropout = 0.0
    tie: bool = False
    attention: Literal["full", "block_sparse"] = "full"
    attention_block: Annotated[int, Field(ge=1, le=65536)] = 64
    attention_local: Annotated[int, Field(ge=1, le=65536)] = 2
    attention_stride: Annotated[int, Field(ge=1, le=65536)] = 4
    vocab: Annotated[int, Field(ge=0, le=16_777_216)] = 0
    bias: Literal["none", "qkv", "attention", "all"] = "none"
    norm: Literal["layer", "rms"] = "layer"
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-5
    activation: Literal["gelu_tanh", "gelu", "swiglu"] = "gelu_tanh"
    hidden: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    kv_heads: Annotated[int, Field(ge=0, le=1024)] = 0
    head_width: Annotated[int, Field(ge=0, le=65536)] = 0
    positions: Literal["learned", "rope"] = "learned"
    max_length: Annotated[int, Field(ge=0, le=16_777_216)] = 0
    rope_base: Annotated[float, Field(gt=1)] = 10_000.0
    rope_scaling: Annotated[list[float], Field(max_length=4)] = []


class MoEOptions(LargeOptions):
    experts: Annotated[int, Field(ge=1, le=65536)] = 8
    chosen: Annotated[int, Field(ge=1, le=65536)] = 1
    balance: Annotated[float, Field(ge=0, le=1000)] = 0.01
    router_z: Annotated[float, Field(ge=0, le=1000)] = 0.0


class BERTOptions(LargeOptions):
    vocab: Annotated[int, Field(ge=2, le=16777216)] = 2048
    dropout: Dropout = 0.0
    objective: Literal["classify", "masked"] = "classify"
    tie: bool = True
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-12
    hidden: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_length: Annotated[int, Field(ge=0, le=16_777_216)] = 0
    types: Annotated[int, Field(ge=1, le=1024)] = 2
    mask_token: Annotated[int, Field(ge=0, le=16777216)] = 0
    separator: Annotated[int, Field(ge=0, le=16777216)] = 0
    pool: Literal["first", "mean"] = "first"


class LSTMOptions(ModelOptions):
    width: Width = 128
    layers: Count = 2
    dropout: Dropout = 0.0


class ResNetOptions(ModelOptions):
    blocks: Annotated[list[Count], Field(min_length=1, max_length=8)] = [2, 2, 2, 2]
    width: Annotated[int, Field(ge=4, le=4096, multiple_of=4)] = 64
    norm: Literal["group", "batch"] = "group"


class TextOptions(TransformerOptions):
    vocab: Annotated[int, Field(ge=2, le=65536)] = 2048


@dataclass(frozen=True)
class Entry:
    """A built-in model.

    Attributes:
        options: pydantic model of its options, with defaults.
        runtimes: those that can train it; all can evaluate it.
        inputs: the kind of data it accepts, for errors and forms.
    """

    name: str
    options: type[ModelOptions]
    runtimes: tuple[Runtime, ...]
    inputs: Literal["any", "images", "tokens", "token sequences"]


_ALL: tuple[Runtime, ...] = ("litert", "torch", "tensorflow")
_NO_TWIN: tuple[Runtime, ...] = ("litert", "torch")
_TORCH: tuple[Runtime, ...] = ("torch",)

MODELS: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("logreg", NoOptions, _ALL, "any"),
        Entry("mlp", MLPOptions, _ALL, "any"),
        Entry("cnn", CNNOptions, _ALL, "images"),
        Entry("resnet8", ResNet8Options, _NO_TWIN, "images"),
        Entry("charlm", TransformerOptions, _NO_TWIN, "token sequences"),
        Entry("textcls", TextOptions, _NO_TWIN, "tokens"),
        Entry("gpt", GPTOptions, _TORCH, "token sequences"),
        Entry("moe", MoEOptions, _TORCH, "token sequences"),
        Entry("bert", BERTOptions, _TORCH, "tokens"),
        Entry("lstm", LSTMOptions, _TORCH, "token sequences"),
        Entry("resnet", ResNetOptions, _TORCH, "images"),
    )
}
