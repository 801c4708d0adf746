"""Recognises models that are a chain of convolutions, pooling and dense layers, whatever their class, from the graph of their module.

A module is recognised by what it computes (`torch.fx`), so a user's own `nn.Sequential` or class is as good as the catalog's; everything
else is refused with the reason. `chain_steps` trains such models, and `stacked` those that have dense layers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from models.zoo import ModelSpec


class NotStackable(ValueError):
    """The model is no chain of layers that can be trained so; the message says what it has instead."""


class Kind(IntEnum):
    """What a layer does; `cpp/chain_steps.cpp` has the same numbers."""

    CONVOLUTION = 0
    ACTIVATION = 1
    MAX_POOLING = 2
    FLATTENING = 3
    DENSE = 4


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


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        sizes: outputs, kernel height and width, stride and padding of a convolution; height and width of a pooling's windows;
            inputs and outputs of a dense layer.
        weight, bias: names of its params, if it has them.
        activation: what this layer, or a dense layer after its product, computes; empty: nothing.
    """

    kind: Kind
    sizes: tuple[int, ...] = ()
    weight: str = ""
    bias: str = ""
    activation: str = ""


@dataclass(frozen=True)
class LayerChain:
    """Layers, each fed by the one before it, that end in a linear one.

    Attributes:
        shape: of an image, [channels, height, width]; 1, 1 and the number of features if the chain has dense layers only.
        channels_last: rows of the data have the channels behind.
        regression: trained with squared error instead of cross-entropy.
    """

    shape: tuple[int, int, int]
    channels_last: bool
    layers: tuple[Layer, ...]
    regression: bool

    @property
    def names(self) -> list[str]:
        """Weight and bias of each layer that has them; an empty name where there is no bias."""
        return [name for layer in self.layers if layer.weight for name in (layer.weight, layer.bias)]


def find_chain(spec: ModelSpec, module: nn.Module) -> LayerChain:
    """The chain that `module`, built from `spec`, computes.

    Raises:
        NotStackable: it computes anything else, is trained with another loss, or has frozen params.
    """
    regression = _find_loss(spec)
    if spec.input_dtype != "float32":
        raise NotStackable(f"it takes {spec.input_dtype} inputs")
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception as error:  # any error of a user's code
        raise NotStackable(
            f"its forward cannot be traced as a fixed chain of layers ({type(error).__name__}: {error})"
        ) from None
    chain = _Builder(module, tuple(spec.input_shape), regression).follow(graph)
    _require_all_params(module, [name for name in chain.names if name])
    return chain


def _find_loss(spec: ModelSpec) -> bool:
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


@dataclass
class _Builder:
    """Follows a graph. `shape`: of what the last layer gives for an example."""

    module: nn.Module
    shape: tuple[int, ...]
    regression: bool
    layers: list[Layer] = field(default_factory=list)
    first: tuple[int, ...] = ()
    channels_last: bool = False

    def follow(self, graph: fx.Graph) -> LayerChain:
        previous: fx.Node | None = None
        for node in graph.nodes:
            if node.op == "output":
                if node.args != (previous,):
                    raise NotStackable("it returns something else than the output of its last layer")
                break
            if node.op != "placeholder" and node.all_input_nodes != [previous]:
                raise NotStackable(
                    f"its layers are no chain: {_describe(node, self.module)} has other inputs"
                )
            if node.op == "placeholder" and previous is not None:
                raise NotStackable(f"its forward takes a second argument, {node.target}")
            if node.op != "placeholder":
                self._add(node)
            previous = node
        if not self.layers or self.layers[-1].kind != Kind.DENSE:
            raise NotStackable("it does not end in a linear layer")
        channels, height, width = self.first
        return LayerChain((channels, height, width), self.channels_last, tuple(self.layers), self.regression)

    def _add(self, node: fx.Node) -> None:
        part = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if type(part) is nn.Identity or is_idle_dropout(part):
            return
        if not self.layers and self._arranges(node):
            return
        if isinstance(part, nn.Conv2d):
            self._convolve(str(node.target), part)
        elif type(part) is nn.Linear:
            self._connect(str(node.target), part)
        elif (size := _pooling(node, part)) is not None:
            self._pool(*size)
        elif _flattens(node, part) or self._views_flat(node):
            self._flatten()
        elif node.op != "get_attr" and (name := ACTIVATIONS.get(node.target if part is None else type(part))):
            self._activate(name)
        else:
            raise NotStackable(f"it has {_describe(node, self.module)}")

    def _arranges(self, node: fx.Node) -> bool:
        """Whether a node before the first layer only arranges the rows of the data as images."""
        if node.op not in ("call_method", "call_function"):
            return False
        numbers = _numbers(node)
        if node.target in ("permute", torch.permute) and numbers == (0, 3, 1, 2) and len(self.shape) == 3:
            self.channels_last, self.shape = True, (self.shape[2], *self.shape[:2])
            return True
        if node.target in ("unsqueeze", torch.unsqueeze) and numbers == (1,) and len(self.shape) == 2:
            self.shape = (1, *self.shape)
            return True
        if node.target not in ("reshape", "view", torch.reshape) or self.channels_last or len(numbers) != 4:
            return False
        if numbers[0] == -1 and math.prod(numbers[1:]) == math.prod(self.shape):
            self.shape = numbers[1:]
            return True
        return False

    def _views_flat(self, node: fx.Node) -> bool:
        is_view = node.target in ("reshape", "view", torch.reshape)
        return is_view and _numbers(node) in ((-1, math.prod(self.shape)),)

    def _flatten(self) -> None:
        if self.channels_last and not self.layers:
            raise NotStackable("it flattens rows in another order")
        if len(self.shape) > 1 and self.layers:
            self.layers.append(Layer(Kind.FLATTENING))
        self.shape = (math.prod(self.shape),)

    def _convolve(self, path: str, layer: nn.Conv2d) -> None:
        if len(self.shape) != 3 or type(layer) is not nn.Conv2d or layer.in_channels != self.shape[0]:
            raise NotStackable(f"its convolution {path!r} does not see images")
        self.first = self.first or self.shape
        strides, paddings = (
            set(layer.stride),
            {layer.padding} if isinstance(layer.padding, str) else set(layer.padding),
        )
        plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
        (stride, *others), (padding, *more) = strides, paddings
        if not plain or others or more or not isinstance(padding, int):
            raise NotStackable(f"its convolution {path!r} has groups, dilation or another padding")
        kernel = layer.kernel_size
        height, width = (
            (size + 2 * padding - each) // stride + 1
            for size, each in zip(self.shape[1:], kernel, strict=True)
        )
        self.shape = (layer.out_channels, height, width)
        sizes = (layer.out_channels, *kernel, stride, padding)
        self.layers.append(_with_params(Layer(Kind.CONVOLUTION, sizes), path, layer))

    def _connect(self, path: str, layer: nn.Linear) -> None:
        if self.shape != (layer.in_features,):
            raise NotStackable(
                f"its linear layer {path!r} does not see flat examples; put nn.Flatten() before it"
            )
        self.first = self.first or (1, 1, *self.shape)
        self.shape = (layer.out_features,)
        self.layers.append(
            _with_params(Layer(Kind.DENSE, (layer.in_features, layer.out_features)), path, layer)
        )

    def _pool(self, height: int, width: int) -> None:
        if len(self.shape) != 3 or not self.layers or self.shape[1] < height or self.shape[2] < width:
            raise NotStackable("its pooling does not see images")
        self.shape = (self.shape[0], self.shape[1] // height, self.shape[2] // width)
        pooling = Layer(Kind.MAX_POOLING, (height, width))
        if self.layers[-1] == Layer(Kind.ACTIVATION, activation="relu"):
            # The maximum of what relu gives is relu of the maximum, which is fewer numbers.
            self.layers[-1:] = [pooling, self.layers[-1]]
        else:
            self.layers.append(pooling)

    def _activate(self, name: str) -> None:
        if self.layers and self.layers[-1].kind == Kind.DENSE and not self.layers[-1].activation:
            self.layers[-1] = replace(self.layers[-1], activation=name)
        elif self.layers and len(self.shape) == 3:
            self.layers.append(Layer(Kind.ACTIVATION, activation=name))
        else:
            raise NotStackable(f"its {name} does not follow a layer")


def _with_params(layer: Layer, path: str, part: nn.Conv2d | nn.Linear) -> Layer:
    return replace(layer, weight=f"{path}.weight", bias=f"{path}.bias" if part.bias is not None else "")


def _pooling(node: fx.Node, part: nn.Module | None) -> tuple[int, int] | None:
    """Height and width of a maximum over windows that do not overlap; None: it is something else."""
    if type(part) is nn.MaxPool2d:
        given: Sequence[Any] = (part.kernel_size, part.stride, part.padding, part.dilation, part.ceil_mode)
        given = (*given, part.return_indices)
    elif node.target is F.max_pool2d or node.target is torch.max_pool2d:
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
        defaults = (None, None, 0, 1, False, False)
        positional = node.args[1:]
        given = [
            positional[i] if i < len(positional) else node.kwargs.get(name, defaults[i])
            for i, name in enumerate(names)
        ]
    else:
        return None
    size, stride, padding, dilation, ceil_mode, indices = given
    pair = _pair(size)
    if _pair(size if stride in (None, [], ()) else stride) != pair or ceil_mode or indices:
        return None
    return pair if _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) else None


def _pair(value: Any) -> tuple[int, int]:
    first, second = value if isinstance(value, tuple | list) else (value, value)
    return first, second


def _numbers(node: fx.Node) -> tuple[int, ...]:
    """The arguments of a node behind its input, if they are numbers."""
    given = node.args[1:]
    if len(given) == 1 and isinstance(given[0], tuple | list):
        given = tuple(given[0])
    if node.kwargs or not all(isinstance(each, int) for each in given):
        return ()
    return tuple(int(str(each)) for each in given)


def is_idle_dropout(part: nn.Module | None) -> bool:
    """Whether a layer is a dropout that drops nothing."""
    return isinstance(part, nn.Dropout) and not part.p


def _flattens(node: fx.Node, part: nn.Module | None) -> bool:
    """Whether a node makes [B, …] into [B, features]."""
    if part is not None:
        return isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1)
    if node.target not in ("flatten", torch.flatten):
        return False
    dims = [*node.args[1:], *([None] * 2)][:2]
    start = node.kwargs.get("start_dim", dims[0])
    end = node.kwargs.get("end_dim", dims[1])
    return (start, end) in ((1, None), (1, -1))


def _require_all_params(module: nn.Module, used: Sequence[str]) -> None:
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
            raise NotStackable(f"its param {name} belongs to no layer of the chain")
        if param.dtype != torch.float32:
            raise NotStackable(f"its param {name} is {str(param.dtype).removeprefix('torch.')}")


def _describe(node: fx.Node, module: nn.Module) -> str:
    """A node of the module's graph, for messages."""
    if node.op == "call_module":
        return name_of(module.get_submodule(str(node.target)), str(node.target))
    if node.op == "get_attr":
        return f"the tensor {node.target}"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"the operation {name}"


def name_of(part: nn.Module, path: str) -> str:
    """A layer, for messages."""
    return f"{type(part).__name__} {path!r}"
