"""From a model's name in an experiment file to its ModelSpec."""

from __future__ import annotations

import difflib
import importlib
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from models import adaptation, user_code
from models.zoo import keras
from models.zoo.keras import KerasSpec, KerasUnfit
from models.zoo.spec import InputDtype, ModelSpec, TaskKind

GROUP = "fedloop.models"
PRETRAINED = ("gpt", "moe", "bert", "lstm", "resnet")
"""Modules here that are models for the datacenter alone, found without an installation's metadata."""


class ModelNotFound(ValueError):
    """No model of that name, or it cannot be built with these shapes and options; the message says why."""


def get(
    name: str,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    input_dtype: InputDtype = "float32",
    task: TaskKind = "classification",
    **options: Any,
) -> ModelSpec:
    """The spec of a model of torch, as `find` gives it.

    Raises:
        ModelNotFound: as `find`; or it is a Keras model.
    """
    spec = find(name, input_shape=input_shape, classes=classes, input_dtype=input_dtype, task=task, **options)
    if isinstance(spec, KerasSpec):
        raise ModelNotFound(
            f"model {name!r} is a Keras model, which federated runs train on LiteRT and TensorFlow clients and "
            "`fedloop export` releases; this needs a torch.nn.Module"
        )
    return spec


def find(
    name: str,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    input_dtype: InputDtype = "float32",
    task: TaskKind = "classification",
    **options: Any,
) -> ModelSpec | KerasSpec:
    """The spec of a model: one of ours, one of the entry-point group `fedloop.models`, `package.module:build`, or a `.keras` file.

    A builder is called with `input_shape`, `classes` and the options. It returns a ModelSpec, or simply a
    `torch.nn.Module` or a `keras.Model`, which is then trained with masked cross-entropy on data of `input_dtype` and `task`.

    Raises:
        ModelNotFound: unknown name, or the builder refused; `UserCodeError` when a user's module cannot be imported.
    """
    if name == adaptation.MODEL:
        return _adapted(input_shape, classes, input_dtype, task, **options)
    if name.endswith(user_code.KERAS_FILE):
        if options:
            raise ModelNotFound(f"model {name!r} is a file and has no options, got {', '.join(options)}")
        return _of_file(name, input_shape, classes, input_dtype, task)
    builder = user_code.load(name) if user_code.is_reference(name) else _installed(name)
    try:
        built = builder(input_shape=input_shape, classes=classes, **options)
    except (TypeError, ValueError) as error:
        raise ModelNotFound(
            f"model {name!r} cannot be built for examples of shape {input_shape}: {error}"
        ) from error
    except Exception as error:
        if ":" not in name:
            raise
        # whatever a user's code raises is the user's to read
        raise ModelNotFound(f"model {name!r} failed while built: {type(error).__name__}: {error}") from error
    if isinstance(built, nn.Module):
        return _wrapped(name, builder, input_shape, classes, input_dtype, task, options)
    if "keras" in sys.modules and isinstance(built, sys.modules["keras"].Model):
        return KerasSpec(
            name,
            lambda: builder(input_shape=input_shape, classes=classes, **options),
            input_shape, classes, input_dtype, task, options,
        )  # fmt: skip
    if getattr(built, "module", None) is None:
        raise ModelNotFound(
            f"model {name!r} must return a torch.nn.Module, a keras.Model or a ModelSpec, got {type(built).__name__}"
        )
    spec: ModelSpec = built
    return replace(spec, name=name, options={**options, **spec.options})  # what finds it again


def _adapted(
    input_shape: tuple[int, ...],
    classes: int,
    input_dtype: InputDtype,
    task: TaskKind,
    base: str,
    base_options: dict[str, Any],
    adapt: str,
    backbone: str,
) -> ModelSpec:
    from models.zoo import adapted

    whole = get(
        base, input_shape=input_shape, classes=classes, input_dtype=input_dtype, task=task, **base_options
    )
    try:
        return adapted.spec(whole, adapt, backbone)
    except (adaptation.AdaptationError, OSError) as error:
        raise ModelNotFound(f"model {base!r} cannot be adapted by {adapt}: {error}") from error


def _of_file(name: str, *shape: Any) -> KerasSpec:
    try:
        return keras.of_file(name, *shape)
    except KerasUnfit as error:
        raise ModelNotFound(str(error)) from None


def _installed(name: str) -> Any:
    if name in PRETRAINED:
        return importlib.import_module(f"models.zoo.{name}").spec
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in installed:
        return installed[name].load()
    known = {*installed, *PRETRAINED}
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    raise ModelNotFound(
        f"model {name!r} is unknown{hint}; known: {', '.join(sorted(known))}; your own is given as package.module:build"
    )


def _wrapped(
    name: str,
    builder: Any,
    input_shape: tuple[int, ...],
    classes: int,
    input_dtype: InputDtype,
    task: TaskKind,
    options: dict[str, Any],
) -> ModelSpec:
    def module() -> nn.Module:
        built: nn.Module = builder(input_shape=input_shape, classes=classes, **options)
        return built

    return ModelSpec(name, module, input_shape, classes, input_dtype, task, options=options)
