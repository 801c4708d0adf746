"""Recognises models that are a chain of dense layers, whatever their class, from the graph of their module.

Such a model is all that `coordinator.workers.kernels.stacked` can train. A module is recognised by what it computes
(`torch.fx`), so a user's own `nn.Sequential` or class is as good as the catalog's; everything else is refused with
the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from models.zoo import ModelSpec


class NotStackable(ValueError):
    """Clients of this model cannot train as one computation; the message says what it has instead of a chain of dense layers."""


@dataclass(frozen=True)
class Dense:
    """y = activation(x Wᵀ + b). `weight`, `bias`: names of its params; without an activation the name is empty."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    activation: str = ""


@dataclass(frozen=True)
class DenseChain:
    """Dense layers, each fed by the one before it; `regression`: trained with squared error instead of cross-entropy."""

    layers: tuple[Dense, ...]
    regression: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all params, in the order of the layers."""
        return tuple(name for layer in self.layers for name in (layer.weight, layer.bias) if name)


ACTIVATIONS: Mapping[Any, str] = {
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    torch.relu: "relu",
    torch.relu_: "relu",
    F.relu: "relu",
    F.relu_: "relu",
    torch.tanh: "tanh",
    F.tanh: "tanh",
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    "relu": "relu",
    "relu_": "relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}
"""Module classes, functions and methods -> activation."""

_EXPECTED = "expected only linear layers with relu, tanh or sigmoid between them"


def find_chain(spec: ModelSpec, module: nn.Module) -> DenseChain:
    """The dense chain that `module`, built from `spec`, computes.

    Raises:
        NotStackable: it computes anything else, is trained with another loss, or has frozen params.
    """
    regression = find_loss(spec)
    if spec.input_dtype != "float32":
        raise NotStackable(f"it takes {spec.input_dtype} inputs")
    _require_known_layers(module)
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception as error:  # any error of a user's code
        raise NotStackable(
            f"its forward cannot be traced as a fixed chain of layers ({type(error).__name__}: {error})"
        ) from None
    layers = _follow(graph, module, flat=len(spec.input_shape) == 1)
    chain = DenseChain(layers, regression)
    require_all_params(module, chain.names)
    return chain


def find_loss(spec: ModelSpec) -> bool:
    """Whether the model is trained with squared error; else it is with cross-entropy.

    Raises:
        NotStackable: it is trained with another loss.
    """
    from models.zoo.spec import masked_cross_entropy, squared_error

    if spec.task == "regression" and spec.loss is squared_error:
        return True
    if spec.task == "classification" and spec.loss is masked_cross_entropy:
        return False
    if spec.task == "next_token":
        raise NotStackable("it predicts tokens")
    raise NotStackable("it has a loss of its own")


def _require_known_layers(module: nn.Module) -> None:
    """Names a layer that no dense chain has; what the layers are used for is seen in the graph."""
    for path, part in module.named_modules():
        is_layer = type(part).__module__.startswith("torch.nn.") and "container" not in type(part).__module__
        known = type(part) in (
            nn.Module,
            nn.Linear,
            nn.Flatten,
            nn.Identity,
            *ACTIVATIONS,
        ) or is_idle_dropout(part)
        if is_layer and not known:
            raise NotStackable(f"it has {_name(part, path)}; {_EXPECTED}")


def is_idle_dropout(part: nn.Module | None) -> bool:
    """Whether a layer is a dropout that drops nothing."""
    return isinstance(part, nn.Dropout) and not part.p


def _follow(graph: fx.Graph, module: nn.Module, flat: bool) -> tuple[Dense, ...]:
    layers: list[Dense] = []
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "output":
            if node.args != (previous,):
                raise NotStackable("it returns something else than the output of its last layer")
            break
        if node.op == "placeholder":
            if previous is not None:
                raise NotStackable(f"its forward takes a second argument, {node.target}")
            previous = node
            continue
        if node.all_input_nodes != [previous]:
            raise NotStackable(f"its layers are no chain: {describe(node, module)} has other inputs")
        flat = _add(node, module, layers, flat) or flat
        previous = node
    if not layers:
        raise NotStackable("it has no linear layer")
    return tuple(layers)


def _add(node: fx.Node, module: nn.Module, layers: list[Dense], flat: bool) -> bool:
    """Adds what a node computes to the layers; whether it flattens the examples."""
    part = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    if type(part) is nn.Identity or is_idle_dropout(part):
        return False
    if flattens(node, part):
        if layers:
            raise NotStackable("it flattens the output of a layer")
        return True
    if type(part) is nn.Linear:
        if not flat:
            raise NotStackable("its first linear layer does not see flat examples; begin with nn.Flatten()")
        layers.append(_dense(str(node.target), part))
        return False
    key = type(part) if part is not None else node.target
    activation = ACTIVATIONS.get(key) if node.op != "get_attr" else None
    if activation is None:
        raise NotStackable(f"it has {describe(node, module)}; {_EXPECTED}")
    if not layers or layers[-1].activation:
        raise NotStackable(f"its {activation} does not follow a linear layer")
    layers[-1] = replace(layers[-1], activation=activation)
    return False


def flattens(node: fx.Node, part: nn.Module | None) -> bool:
    """Whether a node makes [B, …] into [B, features]."""
    if part is not None:
        return isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1)
    if node.target not in ("flatten", torch.flatten):
        return False
    dims = [*node.args[1:], *([None] * 2)][:2]
    start = node.kwargs.get("start_dim", dims[0])
    end = node.kwargs.get("end_dim", dims[1])
    return (start, end) in ((1, None), (1, -1))


def _dense(path: str, layer: nn.Linear) -> Dense:
    bias = f"{path}.bias" if layer.bias is not None else None
    return Dense(f"{path}.weight", bias, layer.in_features, layer.out_features)


def require_all_params(module: nn.Module, used: Sequence[str]) -> None:
    """Checks that the layers' params, by their names, are all params of the module, each once.

    Raises:
        NotStackable: they are not.
    """
    own = dict(module.named_parameters())
    if len(set(used)) < len(used) or any(name not in own for name in used):
        raise NotStackable("two of its layers share their weights")
    for name, param in own.items():
        if not param.requires_grad:
            raise NotStackable(f"its param {name} is frozen")
        if name not in used:
            raise NotStackable(f"its param {name} belongs to no linear layer")
        if param.dtype != torch.float32:
            raise NotStackable(f"its param {name} is {str(param.dtype).removeprefix('torch.')}")


def describe(node: fx.Node, module: nn.Module) -> str:
    """A node of the module's graph, for messages."""
    if node.op == "call_module":
        return _name(module.get_submodule(str(node.target)), str(node.target))
    if node.op == "get_attr":
        return f"the tensor {node.target}"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"the operation {name}"


def _name(part: nn.Module, path: str) -> str:
    return f"{type(part).__name__} {path!r}"
