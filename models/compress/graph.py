"""Optimisation of the graph: the same function in fewer operations.

A BatchNorm in evaluation multiplies and adds constants. After a convolution or a Linear whose output has no other reader, they are
folded into its weights (Jacob 2018, section 3.2), and an Identity replaces the BatchNorm. Dropout does nothing in evaluation and is
removed. The converter stores the results of operations without inputs, drops unused operations, and fuses activations into the
operation before them. It also folds BatchNorm for a float32 file; folding here lets later steps (quantization, training on
devices) see the weights that devices have. The facts list the operations of the module (from `torch.export`) and of the exported file.
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

from models.compress.quantization.quantize import to_tflite
from models.compress.step import Context, Data, StepModel, StepRefused
from models.conversion import flatbuffer
from models.zoo.spec import ModelSpec

TOLERANCE = 1e-5
"""Largest difference from the logits before, in units of the largest; folding changes only the rounding."""

_ATEN = torch.ops.aten
_CONVOLUTIONS = {
    getattr(getattr(_ATEN, f"conv{axes}d"), overload)
    for axes in (1, 2, 3)
    for overload in ("default", "padding")
}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class FoldOptions:
    """Options of `fold`.

    Attributes:
        show_operators: convert the model before and after, and list the operations of both files.
    """

    show_operators: bool = True


def fold(model: StepModel, data: Data, options: FoldOptions, context: Context) -> StepModel:
    """`model` without dropout and the BatchNorms that can be folded; its logits stay the same.

    Raises:
        StepRefused: the module cannot be traced, or its logits change.
    """
    before = trace(model.module, model.spec)
    module = copy.deepcopy(model.module).eval()
    folded = []
    for norm, layer in foldable(before, module):
        before_norm = module.get_submodule(layer)
        linear = isinstance(before_norm, nn.Linear)
        fuse: Any = fusion.fuse_linear_bn_eval if linear else fusion.fuse_conv_bn_eval
        module.set_submodule(layer, fuse(before_norm, module.get_submodule(norm)))
        module.set_submodule(norm, nn.Identity())
        folded.append({"norm": norm, "into": layer})
    dropouts = [name for name, part in module.named_modules() if isinstance(part, _DROPOUTS)]
    for name in dropouts:
        module.set_submodule(name, nn.Identity())
    after = trace(module, model.spec)
    facts: dict[str, Any] = {
        "folded": folded,
        "batch_norms_left": [
            name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
        ],
        "dropouts_removed": dropouts,
        "never_read": unused_layers(before),
        "largest_difference": _difference(model, module, data),
        "torch": {"before": torch_operators(before), "after": torch_operators(after)},
    }
    if options.show_operators:
        context.on_progress({"stage": "fold", "step": "convert"})
        files = {
            "before": to_tflite(model.module, model.spec),
            "after": to_tflite(module, model.spec),
        }
        facts["tflite"] = {when: flatbuffer.operators(content) for when, content in files.items()}
        facts["fused_activations"] = {when: fused_activations(content) for when, content in files.items()}
        facts["of_constants"] = {
            "torch": len(constant_operations(before)),
            "tflite": constant_operators(files["after"]),
        }
        facts["bytes"] = {when: len(content) for when, content in files.items()}
    return StepModel(model.spec, module, facts=facts)


def trace(module: nn.Module, spec: ModelSpec) -> torch.export.ExportedProgram:
    """The graph for one row, in evaluation; parameters and buffers keep their names.

    Raises:
        StepRefused: the forward pass depends on values, so it is not one graph.
    """
    try:
        return torch.export.export(copy.deepcopy(module).eval(), (spec.example_batch(1)[0],))
    except Exception as error:  # tracing runs the module's own code
        reason = str(error).strip().partition("\n")[0]
        raise StepRefused(
            f"fold cannot trace {spec.name!r}: {reason}; a model for devices must do the same for every input"
        ) from error


def foldable(program: torch.export.ExportedProgram, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of each BatchNorm and of the layer whose output only it reads.

    Excludes layers that are called twice or share their weights.
    """
    names = {
        **program.graph_signature.inputs_to_parameters,
        **program.graph_signature.inputs_to_buffers,
    }
    for node in program.graph.nodes:
        if node.target is not _ATEN.batch_norm.default:
            continue
        source, mean = node.args[0], node.args[3]
        # for a Linear only 2-D outputs: with more axes BatchNorm's channels are not its features
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


def unused_layers(program: torch.export.ExportedProgram) -> list[str]:
    """Layers whose parameters do not affect the output: dead code, which files omit."""
    names = program.graph_signature.inputs_to_parameters
    read: dict[str, bool] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            layer = names[node.name].rpartition(".")[0]
            read[layer] = read.get(layer, False) or bool(node.users)
    return [layer for layer, used in read.items() if not used]


def constant_operations(program: torch.export.ExportedProgram) -> list[str]:
    """Operations that do not depend on an input, so their result is constant."""
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
    """Operation -> count, by PyTorch's names."""
    nodes = (node for node in program.graph.nodes if node.op == "call_function" and node.users)
    return dict(sorted(Counter(map(_name, nodes)).items()))


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _difference(model: StepModel, module: nn.Module, data: Data) -> float:
    x = torch.from_numpy(data.x_train[:64])
    with torch.no_grad():
        expected, actual = model.module.eval()(x), module(x)
    difference = float((expected - actual).abs().max())
    allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
    if not difference <= allowed:
        raise StepRefused(
            f"{model.spec.name!r} differs by {difference:.3g} in a logit once folded, expected at most {allowed:.3g}; "
            "a BatchNorm with a variance near zero amplifies rounding"
        )
    return difference


def constant_operators(tflite: bytes) -> list[str]:
    """Operations of the file whose inputs are all constants."""
    return [
        operation.kind
        for operation in flatbuffer.operations(tflite)
        if operation.inputs and all(tensor.constant for tensor in operation.inputs)
    ]


def fused_activations(tflite: bytes) -> dict[str, int]:
    """Activation -> number of operations it is fused into."""
    from ai_edge_litert import schema_py_generated as schema

    names = {
        code: name for name, code in vars(schema.ActivationFunctionType).items() if isinstance(code, int)
    }
    fused = Counter(
        names[getattr(operator.builtinOptions, "fusedActivationFunction", 0)]
        for graph in flatbuffer.read(tflite).subgraphs
        for operator in graph.operators
    )
    return {name: count for name, count in sorted(fused.items()) if name != "NONE"}
