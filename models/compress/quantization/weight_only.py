"""Weight-only quantization to 8 or 4 bits: GPTQ, or rounding to nearest. Activations stay float32.

Each layer is quantized on the inputs that it gets once the layers before it are (`models.compress.quantization.layer_inputs`, `.gptq`).
Only Linear layers are. Convolutions, recurrent layers, embeddings and matrices that are also an embedding stay float; `float` in the facts
lists them with the reason. Pruned weights stay zero.

The module has the rounded weights in float32, for later steps and comparisons; `models.compress.quantization.packed` is the small form.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from edge_client.train.evaluation import score
from models import adaptation
from models.compress import report
from models.compress.pruning.structure import Convolution
from models.compress.quantization import layer_inputs, packed
from models.compress.quantization.gptq import NotInvertible, gptq, nearest, output_error
from models.compress.quantization.packed import Bits, PackedMatrix
from models.compress.quantization.quantize import require_accuracy
from models.compress.step import Context, Data, Precision, StepModel, StepRefused
from models.compress.tuning import is_within, named_layers
from models.options import bounded
from models.zoo.calls import called_layers

PRECISIONS: dict[Bits, Precision] = {8: "weight-int8", 4: "weight-int4"}
_COMPARED = 16


@dataclass(frozen=True)
class GPTQOptions:
    """Options of weight-only quantization.

    Attributes:
        bits: of a weight, 4 or 8.
        group: neighbouring columns of a row that share a scale; 0: all.
        method: `gptq`, or `nearest`, which needs no calibration.
        damping: share of the mean of H's diagonal that is added to it.
        calibration_rows: at most so many rows of `x_train`.
        keep: layers that stay float: names separated by commas.
        max_accuracy_drop: how far the accuracy on test rows may fall below the float model's, as a fraction.
    """

    bits: Bits = 4
    group: int = bounded(128, 0, 1_000_000)
    method: Literal["gptq", "nearest"] = "gptq"
    damping: float = bounded(0.01, 1e-6, 1.0)
    calibration_rows: int = bounded(256, 1, 100_000)
    keep: str = ""
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


def step(model: StepModel, data: Data, options: GPTQOptions, context: Context) -> StepModel:
    """`model` with rounded weights, and their packed form.

    Raises:
        StepRefused: there is no layer to quantize, or the result loses too much accuracy.
    """
    module = copy.deepcopy(model.module).eval()
    names, floats = layers(model, options.keep)
    if options.method == "gptq":
        matrices, errors = _calibrated(module, model, names, data, options, context)
    else:
        matrices, errors = (
            {name: nearest(_weight(module, name), options.bits, options.group) for name in names},
            {},
        )
    with torch.no_grad():
        for name, matrix in matrices.items():
            _weight(module, name).copy_(matrix.values())
    content = packed.save(module, matrices)
    _require_same(content, module, model, data)
    facts = _accuracies(model.module, module, data, options)
    return StepModel(
        model.spec,
        module,
        precision=PRECISIONS[options.bits],
        packed=content,
        facts={**facts, **_sizes(matrices, errors, model.module, facts.get("agreement")), "float": floats},
    )


def layers(model: StepModel, keep: str = "") -> tuple[list[str], dict[str, str]]:
    """Names of the layers to quantize, and the other matrices by the reason why they stay float.

    Raises:
        StepRefused: there is nothing to quantize, or `keep` names no layer.
    """
    module = model.module
    if model.spec.name == adaptation.MODEL:
        raise StepRefused(
            "this model is adapted: its frozen matrices are not among its params; quantize the merged model of the finished run"
        )
    kept = named_layers(module, keep, "keep")
    called = set(called_layers(module, model.spec))
    uses: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        uses.setdefault(id(tensor), []).append(name)
    names, floats = [], {}
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2:
            continue
        layer_name, _, kind = name.rpartition(".")
        layer = module.get_submodule(layer_name)
        if type(layer) is not nn.Linear or kind != "weight":
            floats[name] = (
                "a convolution"
                if isinstance(layer, Convolution)
                else f"of {type(layer).__name__}, not Linear"
            )
        elif len(uses[id(parameter)]) > 1:
            floats[name] = (
                f"also used as {', '.join(other for other in uses[id(parameter)] if other != name)}"
            )
        elif is_within(layer_name, kept):
            floats[name] = "kept"
        elif layer_name not in called:
            floats[name] = "not called as a layer"
        else:
            names.append(layer_name)
    if not names:
        listed = ", ".join(f"{name} ({why})" for name, why in floats.items())
        raise StepRefused(
            f"gptq finds no matrix to quantize in model {model.spec.name!r}: it takes weights of Linear layers; others are "
            f"{listed[:300] or 'none'}; `quantize` makes a .tflite of any model that devices run"
        )
    return names, floats


def _calibrated(
    module: nn.Module,
    model: StepModel,
    names: Sequence[str],
    data: Data,
    options: GPTQOptions,
    context: Context,
) -> tuple[dict[str, PackedMatrix], dict[str, dict[str, float]]]:
    """The matrix of every layer, and the relative errors of its outputs; rounds the weights of `module` in place."""
    chosen = context.rng().permutation(len(data.x_train))[: options.calibration_rows]
    matrices: dict[str, PackedMatrix] = {}
    errors: dict[str, dict[str, float]] = {}

    def change(together: Sequence[str], squares: torch.Tensor) -> None:
        for name in together:
            weight = _weight(module, name)
            try:
                matrix = gptq(weight, squares, options.bits, options.group, options.damping)
            except NotInvertible as error:
                raise StepRefused(
                    f"layer {name!r} on {len(chosen)} calibration rows: {error}; raise damping, or check the model for infinite activations"
                ) from error
            errors[name] = {
                "output_error": output_error(weight, matrix.values(), squares),
                "nearest_output_error": output_error(
                    weight, nearest(weight, options.bits, options.group).values(), squares
                ),
            }
            matrices[name] = matrix
            weight.copy_(matrix.values())
            context.on_progress({"step": "gptq", "layer": name, "number": len(matrices), "of": len(names)})

    layer_inputs.visit(module, model.spec, data.x_train[chosen], names, change)
    return {name: matrices[name] for name in names}, errors


def _weight(module: nn.Module, layer: str) -> torch.Tensor:
    return module.get_parameter(f"{layer}.weight").detach()


def _require_same(content: bytes, module: nn.Module, model: StepModel, data: Data) -> None:
    """Requires that the packed model answers as the float one: a layer may be used in a way that packing does not know."""
    rows = data.x_test[:_COMPARED]
    loaded = packed.load(content, model.spec, "packed.safetensors")
    expected, actual = report.logits(module, rows), report.logits(loaded, rows)
    difference = float(abs(expected - actual).max())
    if not difference <= 1e-5 * max(1.0, float(abs(expected).max())):
        raise StepRefused(f"the packed model differs from the float one by {difference:.3g} in a logit")


def _accuracies(before: nn.Module, after: nn.Module, data: Data, options: GPTQOptions) -> dict[str, Any]:
    """Quality on test rows before and after. Raises: StepRefused: it fell too far."""
    logits = [report.logits(module, data.x_test) for module in (before, after)]
    full, reduced = (score(each, data.y_test) for each in logits)
    name = full.quality_name
    require_accuracy(
        full.quality, reduced.quality, options.max_accuracy_drop, f"{options.method} int{options.bits}", name
    )
    classes = {"agreement": float((logits[0].argmax(-1) == logits[1].argmax(-1)).mean())}
    return {name: reduced.quality, f"float32_{name}": full.quality, **(classes if name == "accuracy" else {})}


def _sizes(
    matrices: dict[str, PackedMatrix],
    errors: dict[str, dict[str, float]],
    module: nn.Module,
    agreement: float | None,
) -> dict[str, Any]:
    """Bytes of the quantized matrices, `saved` for people, and for each layer its shape and errors."""
    weights = {name: module.get_parameter(f"{name}.weight") for name in matrices}
    before, after = sum(w.numel() * 4 for w in weights.values()), sum(m.bytes for m in matrices.values())
    share = before / 4 / report.parameters(module)
    changed = "" if agreement is None else f"; {1 - agreement:.2%} of the answers changed"
    return {
        "matrix_bytes": {"float32": before, "packed": after},
        "times_smaller": before / after,
        "share_of_parameters": share,
        "saved": f"gptq: {len(matrices)} matrices, {share:.0%} of the parameters, are {before / after:.1f} times smaller than in float32{changed}",
        "layers": {name: {"shape": list(weights[name].shape), **errors.get(name, {})} for name in matrices},
    }
