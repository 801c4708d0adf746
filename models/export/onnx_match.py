"""Weights of an ONNX file as the params of a model of the catalog: by name and shape, and the same answers.

Initializers must be called as the model's params are (`conv1.weight`), which is how PyTorch writes them. Names and shapes alone
do not say what is computed with them; so the file is also asked, row by row, whether it answers as the model does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from onnx import TensorProto, external_data_helper, numpy_helper
from torch import nn

from models import zoo
from models.export.onnx_answers import OtherAnswers, require_same
from models.export.onnx_files import BadOnnx, Opened, described
from models.pretrain import params as stored
from models.zoo import ModelSpec

_MOST_OTHERS = 20
_INPUTS: dict[str, Literal["float32", "int32"]] = {"float32": "float32", "int32": "int32", "int64": "int32"}


def matched(opened: Opened, name: str, options: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Writes the params of the model to `path`, and tells model and params as `model.json` does.

    Sizes of rows and classes are those of the file's input and output.

    Raises:
        BadOnnx: naming every param that is missing, or of another shape or kind; or the file answers otherwise.
        ModelNotFound: the model cannot be built for such rows.
    """
    spec = _spec(described(opened.model), name, options)
    module = spec.build(0)
    stored.fill(module, _params(opened, module, name), "the ONNX file")
    module.eval()
    try:
        difference = require_same(opened.path, module, spec)
    except OtherAnswers as error:
        raise BadOnnx(
            f"has the params of {name} by name and shape, but does not answer as {name} does: {error}"
        ) from None
    told = stored.save(module, path)
    return {
        "model": {
            "name": spec.name,
            "options": dict(spec.options),
            "input_shape": list(spec.input_shape),
            "classes": spec.classes,
            "input_dtype": spec.input_dtype,
            "task": spec.task,
        },
        "params_sha256": told["model_sha256"],
        "largest_difference": difference,
    }


def _spec(about: Mapping[str, Any], name: str, options: Mapping[str, Any]) -> ModelSpec:
    """The model for rows as the file takes them and logits as it gives them."""
    if len(about["inputs"]) != 1:
        names = ", ".join(value["name"] for value in about["inputs"])
        raise BadOnnx(f"takes {len(about['inputs'])} inputs ({names[:200]}); {name} takes one")
    given, answer = about["inputs"][0], about["outputs"][0]
    if given["dtype"] not in _INPUTS:
        raise BadOnnx(f"takes {given['dtype'] or 'no tensor'}; {name} takes float32 features or token ids")
    for what, value in (("input", given), ("output", answer)):
        loose = [extent for extent in value["shape"][1:] if not isinstance(extent, int) or extent < 1]
        if loose or len(value["shape"]) < 2:
            raise BadOnnx(
                f"its {what} {value['name'][:100]!r} has the shape {value['shape']}; expected rows first, and then numbers"
            )
    return zoo.get(
        name,
        input_shape=tuple(given["shape"][1:]),
        classes=answer["shape"][-1],
        input_dtype=_INPUTS[given["dtype"]],
        task="next_token" if len(answer["shape"]) == 3 else "classification",
        **options,
    )


def _params(opened: Opened, module: nn.Module, name: str) -> dict[str, npt.NDArray[np.float32]]:
    tensors = stored.named_tensors(module)
    expected = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()}
    held = _held(opened, module, expected)
    found: dict[str, npt.NDArray[np.float32]] = {}
    problems = []
    for key, tensor in expected.items():
        if key not in held:
            problems.append(f"{key} {tuple(tensor.shape)} is missing")
        elif (kind := TensorProto.DataType.Name(held[key].data_type)) != "FLOAT":
            problems.append(f"{key} is {kind}, expected FLOAT")
        elif tuple(held[key].dims) != tuple(tensor.shape):
            problems.append(f"{key} is {tuple(held[key].dims)}, {name} has {tuple(tensor.shape)}")
        else:
            try:
                found[key] = _array(held[key], opened.path.parent)
            except ValueError:
                problems.append(f"{key} has more or less bytes than its shape says")
                continue
            if not np.isfinite(found[key]).all():
                problems.append(f"{key} holds NaN or infinite values")
    if problems:
        others = [f"{key[:100]} {tuple(tensor.dims)}" for key, tensor in held.items() if key not in expected]
        more = f"\n  the file also has: {', '.join(others[:_MOST_OTHERS])}" if others else ""
        more += f" and {len(others) - _MOST_OTHERS} more" if len(others) > _MOST_OTHERS else ""
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise BadOnnx(
            f"does not have the params of {name} with these options ({len(problems)} of {len(expected)}):{listed}{more}"
        )
    return found


def _held(opened: Opened, module: nn.Module, expected: Mapping[str, torch.Tensor]) -> dict[str, TensorProto]:
    """The file's weights, by the names of `expected`; of a tied param a file may have any of its names."""
    held: dict[str, TensorProto] = {tensor.name: tensor for tensor in opened.model.graph.initializer}
    first = {id(tensor): key for key, tensor in expected.items()}
    for key, tensor in module.state_dict(keep_vars=True).items():
        if key in held and first.get(id(tensor), key) not in held:
            held[first[id(tensor)]] = held.pop(key)
    return held


def _array(tensor: TensorProto, folder: Path) -> npt.NDArray[np.float32]:
    if tensor.data_location == TensorProto.EXTERNAL:
        external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    return np.array(numpy_helper.to_array(tensor), np.float32)
