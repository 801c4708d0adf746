"""Imports the weights of an ONNX file as the params of a model of the catalog, matched by name and shape.

Initializers must have the names of the model's params (`conv1.weight`), as PyTorch writes them. Names and shapes alone
do not say how the weights are used, so the file's logits are also compared with the model's, row by row.
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
from models.onnx.files import BadOnnx, OnnxFile, describe
from models.onnx.parity import LogitsDiffer, require_same_logits
from models.pretrain import params as stored
from models.zoo import ModelSpec

_MAX_OTHERS = 20
_INPUTS: dict[str, Literal["float32", "int32"]] = {"float32": "float32", "int32": "int32", "int64": "int32"}


def import_params(opened: OnnxFile, name: str, options: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Writes the params of the model to `path`, and describes both as in `model.json`.

    The file's input and output determine the size of rows and the number of classes.

    Raises:
        BadOnnx: naming every param that is missing, or of another shape or dtype; or the file's logits differ.
        ModelNotFound: the model cannot be built for such rows.
    """
    spec = _spec(describe(opened.model), name, options)
    module = spec.build(0)
    stored.fill(module, _params(opened, module, name), "the ONNX file")
    module.eval()
    try:
        difference = require_same_logits(opened.path, module, spec)
    except LogitsDiffer as error:
        raise BadOnnx(
            f"has the params of {name} by name and shape, but its logits differ from those of {name}: {error}"
        ) from None
    result = stored.save(module, path)
    return {
        "model": spec.described(),
        "params_sha256": result["model_sha256"],
        "largest_difference": difference,
    }


def _spec(about: Mapping[str, Any], name: str, options: Mapping[str, Any]) -> ModelSpec:
    if len(about["inputs"]) != 1:
        names = ", ".join(value["name"] for value in about["inputs"])
        raise BadOnnx(f"takes {len(about['inputs'])} inputs ({names[:200]}); {name} takes one")
    rows, logits = about["inputs"][0], about["outputs"][0]
    if rows["dtype"] not in _INPUTS:
        raise BadOnnx(f"takes {rows['dtype'] or 'no tensor'}; {name} takes float32 features or token ids")
    for what, value in (("input", rows), ("output", logits)):
        variable = [size for size in value["shape"][1:] if not isinstance(size, int) or size < 1]
        if variable or len(value["shape"]) < 2:
            raise BadOnnx(
                f"its {what} {value['name'][:100]!r} has the shape {value['shape']}; expected rows first, then fixed sizes"
            )
    return zoo.get(
        name,
        input_shape=tuple(rows["shape"][1:]),
        classes=logits["shape"][-1],
        input_dtype=_INPUTS[rows["dtype"]],
        task="next_token" if len(logits["shape"]) == 3 else "classification",
        **options,
    )


def _params(opened: OnnxFile, module: nn.Module, name: str) -> dict[str, npt.NDArray[np.float32]]:
    tensors = stored.named_tensors(module)
    expected = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()}
    initializers = _initializers(opened, module, expected)
    params: dict[str, npt.NDArray[np.float32]] = {}
    problems = []
    for key, tensor in expected.items():
        if key not in initializers:
            problems.append(f"{key} {tuple(tensor.shape)} is missing")
        elif (kind := TensorProto.DataType.Name(initializers[key].data_type)) != "FLOAT":
            problems.append(f"{key} is {kind}, expected FLOAT")
        elif tuple(initializers[key].dims) != tuple(tensor.shape):
            problems.append(f"{key} is {tuple(initializers[key].dims)}, {name} has {tuple(tensor.shape)}")
        else:
            try:
                params[key] = _array(initializers[key], opened.path.parent)
            except ValueError:
                problems.append(f"{key} has more or less bytes than its shape says")
                continue
            if not np.isfinite(params[key]).all():
                problems.append(f"{key} holds NaN or infinite values")
    if problems:
        others = [
            f"{key[:100]} {tuple(tensor.dims)}" for key, tensor in initializers.items() if key not in expected
        ]
        more = f"\n  the file also has: {', '.join(others[:_MAX_OTHERS])}" if others else ""
        more += f" and {len(others) - _MAX_OTHERS} more" if len(others) > _MAX_OTHERS else ""
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise BadOnnx(
            f"does not have the params of {name} with these options ({len(problems)} of {len(expected)}):{listed}{more}"
        )
    return params


def _initializers(
    opened: OnnxFile, module: nn.Module, expected: Mapping[str, torch.Tensor]
) -> dict[str, TensorProto]:
    """The file's weights, by the names of `expected`; the file may use any name of a tied param."""
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
