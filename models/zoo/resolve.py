"""Resolves a model's name in an experiment file to its ModelSpec."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from models import adaptation, user_code, widths
from models.tasks import TaskKind
from models.zoo.spec import InputDtype, ModelSpec
from models.zoo.tensorflow import keras
from models.zoo.tensorflow.keras import KerasSpec, KerasUnfit
from models.zoo.trial import vocabulary
from strategies.suggestions import suggest

GROUP = "fedloop.models"
PRETRAINED = ("gpt", "moe", "bert", "lstm", "resnet")
"""Our models for the datacenter only, found without an installation's metadata."""


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
    """The spec of a torch model, as `find` returns it.

    Raises:
        ModelNotFound: as for `find`; or it is a Keras model.
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
    """The spec of a model: a built-in one, one of the entry-point group `fedloop.models`, `package.module:build`, or a `.keras` file.

    A builder is called with `input_shape`, `classes` and the options. It returns a ModelSpec, or just a `torch.nn.Module`
    or a `keras.Model`, which is then trained with masked cross-entropy on data of `input_dtype` and `task`.

    Raises:
        ModelNotFound: unknown name, or the builder failed; `UserCodeError` when a user's module cannot be imported.
    """
    if name == adaptation.MODEL:
        return _adapted(input_shape, classes, input_dtype, task, **options)
    if name == widths.MODEL:
        return _narrower(input_shape, classes, input_dtype, task, **options)
    if task == "regression":
        return _regression(name, input_shape, classes, input_dtype, options)
    if name.endswith(user_code.KERAS_FILE):
        if options:
            raise ModelNotFound(f"model {name!r} is a file and has no options, got {', '.join(options)}")
        return _from_file(name, input_shape, classes, input_dtype, task)
    builder = user_code.load(name) if user_code.is_reference(name) else _installed(name)
    make = functools.partial(builder, input_shape=input_shape, classes=classes, **options)
    try:
        built = make()
    except (TypeError, ValueError) as error:
        raise ModelNotFound(
            f"model {name!r} cannot be built for examples of shape {input_shape}{_place(name, error, builder)}: {error}"
        ) from error
    except Exception as error:
        if ":" not in name:
            raise
        # any error of a user's code is shown to the user
        raise ModelNotFound(
            f"model {name!r} failed while built{_place(name, error, builder)}: {type(error).__name__}: {error}"
        ) from error
    if isinstance(built, nn.Module):
        spec = ModelSpec(name, make, input_shape, classes, input_dtype, task, options)
        ids = input_dtype == "int32"
        return replace(spec, vocab=vocabulary(spec.build(0), input_shape)) if ids else spec
    if "keras" in sys.modules and isinstance(built, sys.modules["keras"].Model):
        return KerasSpec(name, make, input_shape, classes, input_dtype, task, options)
    if getattr(built, "module", None) is None:
        raise ModelNotFound(
            f"model {name!r}{user_code.definition_location(builder)} must return a torch.nn.Module, a keras.Model or a ModelSpec, got {type(built).__name__}"
        )
    found: ModelSpec = built
    return replace(found, name=name, options={**options, **found.options})  # so that it can be found again


def _regression(
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    input_dtype: InputDtype,
    options: Mapping[str, Any],
) -> ModelSpec | KerasSpec:
    """The spec of a model that predicts a quantity: its single output, trained with squared error."""
    spec = find(name, input_shape=input_shape, classes=classes, input_dtype=input_dtype, **options)
    if isinstance(spec, KerasSpec):
        return replace(spec, task="regression")
    if spec.task != "classification":
        raise ModelNotFound(f"model {name!r} predicts tokens, and the labels are quantities")
    return spec.of_quantity()


def _place(name: str, error: Exception, builder: Any) -> str:
    """Where a user's own code failed; empty for a built-in model."""
    if not user_code.is_reference(name):
        return ""
    return user_code.error_location(error, builder) or user_code.definition_location(builder)


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

    base_spec = get(
        base, input_shape=input_shape, classes=classes, input_dtype=input_dtype, task=task, **base_options
    )
    try:
        return adapted.spec(base_spec, adapt, backbone)
    except (adaptation.AdaptationError, OSError) as error:
        raise ModelNotFound(f"model {base!r} cannot be adapted by {adapt}: {error}") from error


def _narrower(
    input_shape: tuple[int, ...],
    classes: int,
    input_dtype: InputDtype,
    task: TaskKind,
    base: str,
    base_options: dict[str, Any],
    width: float,
) -> ModelSpec:
    from models.zoo import submodel

    try:
        scaled = widths.scale_options(base, base_options, width)
    except widths.NoNarrowerModel as error:
        raise ModelNotFound(f"model {error}") from error
    shape: dict[str, Any] = {"input_shape": input_shape, "classes": classes, "input_dtype": input_dtype}
    return submodel.spec(get(base, **shape, task=task, **scaled), base_options, width)


def _from_file(name: str, *shape: Any) -> KerasSpec:
    try:
        return keras.from_file(name, *shape)
    except KerasUnfit as error:
        raise ModelNotFound(str(error)) from None


def _installed(name: str) -> Any:
    if name in PRETRAINED:
        return importlib.import_module(f"models.zoo.{name}").spec
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in installed:
        return installed[name].load()
    known = {*installed, *PRETRAINED}
    raise ModelNotFound(
        f"model {name!r} is unknown{suggest(name, known)}; known: {', '.join(sorted(known))}; your own is given as package.module:build"
    )
