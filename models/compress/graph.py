"""Optimisation of the graph: the same function in fewer operations.

A BatchNorm in evaluation multiplies and adds constants; right after a convolution or a Linear that nobody else reads, they go into its
weights (Jacob 2018, section 3.2), and an Identity is left in its place. Dropout does nothing in evaluation and goes, too. What
depends on no input is computed once by the converter and stored, and what nothing reads is not exported; activations move into the
operation before them. The converter folds for a float32 file by itself; folded here, the steps that come after (quantization, training on
devices) see the weights that devices have. Facts show all of it: operations of the module as `torch.export` records them, and of the exported file.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import fusion

from models.compress import stored
from models.compress.quantize import converted
from models.compress.step import Context, Data, Model, StepRefused
from models.zoo.spec import ModelSpec

TOLERANCE = 1e-5
"""Largest difference from the logits before, in units of the largest; folding only rounds otherwise."""

_ATEN = torch.ops.aten
_CONVOLUTIONS = {
    getattr(getattr(_ATEN, f"conv{axes}d"), overload)
    for axes in (1, 2, 3)
    for overload in ("default", "padding")
}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Options:
    """What to show.

    Attributes:
        show_operators: convert the model before and after, and list the operations of both files.
    """

    show_operators: bool = True


def fold(model: Model, data: Data, options: Options, context: Context) -> Model:
    """`model` without the BatchNorms that can be folded and without dropout; its answers stay.

    Raises:
        StepRefused: the module cannot be traced, or answers otherwise.
    """
    before = traced(model.module, model.spec)
    module = copy.deepcopy(model.module).eval()
    folded = []
    for norm, layer in foldable(before, module):
        module.set_submodule(layer, _fused(module.get_submodule(layer), module.get_submodule(norm)))
        module.set_submodule(norm, nn.Identity())
        folded.append({"norm": norm, "into": layer})
    dropouts = [name for name, part in module.named_modules() if isinstance(part, _DROPOUTS)]
    for name in dropouts:
        module.set_submodule(name, nn.Identity())
    after = traced(module, model.spec)
    facts: dict[str, Any] = {
        "folded": folded,
        "batch_norms_left": [
            name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
        ],
        "dropouts_removed": dropouts,
        "never_read": never_read(before),
        "largest_difference": _difference(model, module, data),
        "torch": {"before": torch_operators(before), "after": torch_operators(after)},
    }
    if options.show_operators:
        context.tell({"stage": "fold", "step": "convert"})
        files = {
            "before": converted(model.module, model.spec),
            "after": converted(module, model.spec),
        }
        facts["tflite"] = {when: stored.operators(content) for when, content in files.items()}
        facts["fused_activations"] = {when: fused_activations(content) for when, content in files.items()}
        facts["of_constants"] = {
            "torch": len(of_constants(before)),
            "tflite": constant_operators(files["after"]),
        }
        facts["bytes"] = {when: len(content) for when, content in files.items()}
    return Model(model.spec, module, facts=facts)


def traced(module: nn.Module, spec: ModelSpec) -> torch.export.ExportedProgram:
    """The operations on one row, in evaluation; parameters and buffers keep their names.

    Raises:
        StepRefused: what the forward pass does depends on values, so it is no one graph.
    """
    try:
        return torch.export.export(copy.deepcopy(module).eval(), (spec.example_batch(1)[0],))
    except Exception as error:  # tracing runs code of the module's own
        reason = str(error).strip().partition("\n")[0]
        raise StepRefused(
            f"fold cannot trace {spec.name!r}: {reason}; a model for devices does the same for every input"
        ) from error


def foldable(program: torch.export.ExportedProgram, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of each BatchNorm and of the layer whose output it reads, where nothing else reads that output.

    A layer that is called twice, or whose weights another one shares, is not among them.
    """
    names = {
        **program.graph_signature.inputs_to_parameters,
        **program.graph_signature.inputs_to_buffers,
    }
    for node in program.graph.nodes:
        if node.target is not _ATEN.batch_norm.default:
            continue
        source, mean = node.args[0], node.args[3]
        # of a Linear only rows of features: with more axes BatchNorm's channels are not its outputs
        layered = source.target in _CONVOLUTIONS or (
            source.target is _ATEN.linear.default and source.meta["val"].ndim == 2
        )
        if not layered or mean is None or len(source.users) > 1 or len(mean.users) > 1:
            continue
        weight, norm = source.args[1], names[mean.name].rpartition(".")[0]
        layer = names.get(weight.name, "").rpartition(".")[0]
        if (
            layer
            and len(weight.users) == 1
            and isinstance(module.get_submodule(layer), nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        ):
            yield norm, layer


def _fused(layer: nn.Module, norm: nn.Module) -> nn.Module:
    fused: nn.Module = (
        fusion.fuse_linear_bn_eval(layer, norm)  # type: ignore[arg-type]
        if isinstance(layer, nn.Linear)
        else fusion.fuse_conv_bn_eval(layer, norm)  # type: ignore[arg-type, type-var]
    )
    return fused


def never_read(program: torch.export.ExportedProgram) -> list[str]:
    """Layers with parameters of which the answer does not depend on any: dead code, which no file has."""
    names = program.graph_signature.inputs_to_parameters
    read: dict[str, bool] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            layer = names[node.name].rpartition(".")[0]
            read[layer] = read.get(layer, False) or bool(node.users)
    return [layer for layer, used in read.items() if not used]


def of_constants(program: torch.export.ExportedProgram) -> list[str]:
    """Operations that no input reaches: the same every time, so computed once."""
    inputs = set(program.graph_signature.user_inputs)
    reached: set[fx.Node] = set()
    constant = []
    for node in program.graph.nodes:
        if node.name in inputs or any(source in reached for source in node.all_input_nodes):
            reached.add(node)
        elif node.op == "call_function" and node.users:
            constant.append(_name(node))
    return constant


def torch_operators(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Operation -> how often, as in PyTorch's own set."""
    nodes = (node for node in program.graph.nodes if node.op == "call_function" and node.users)
    return dict(sorted(Counter(map(_name, nodes)).items()))


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _difference(model: Model, module: nn.Module, data: Data) -> float:
    x = torch.from_numpy(data.x_train[:64])
    with torch.no_grad():
        wanted, given = model.module.eval()(x), module(x)
    difference = float((wanted - given).abs().max())
    allowed = TOLERANCE * max(1.0, float(wanted.abs().max()))
    if not difference <= allowed:
        raise StepRefused(
            f"{model.spec.name!r} differs by {difference:.3g} in a logit once folded, expected at most {allowed:.3g}; "
            "a BatchNorm with a variance near zero amplifies rounding"
        )
    return difference


def constant_operators(tflite: bytes) -> list[str]:
    """Operations of the file whose inputs are all stored in it."""
    return [
        operation.kind
        for operation in stored.operations(tflite)
        if operation.inputs and all(tensor.constant for tensor in operation.inputs)
    ]


def fused_activations(tflite: bytes) -> dict[str, int]:
    """Activation -> how many operations it is part of."""
    from ai_edge_litert import schema_py_generated as schema

    names = {
        code: name for name, code in vars(schema.ActivationFunctionType).items() if isinstance(code, int)
    }
    fused = Counter(
        names[getattr(operator.builtinOptions, "fusedActivationFunction", 0)]
        for graph in stored.read(tflite).subgraphs
        for operator in graph.operators
    )
    return {name: count for name, count in sorted(fused.items()) if name != "NONE"}
