"""Traces a ModelSpec into two plain graphs: one training step and the logits.

Both are pure functions: the batch, the learning rate and every float tensor of the model
are inputs, changed tensors are outputs. The artifact has no state, so a device stores the params outside it
and any client rule can be computed around the step.

    train(x, y, lr, *tensors) -> (loss, *trained)        trained = w - lr · ∇f(w), trainable tensors only
    infer(x, *tensors)        -> (logits,)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from edge_client.train.torch_trainer import train_mode
from edge_client.wire.manifest import TensorSpec, signature_name
from models.conversion.convolution import NoGradient
from models.conversion.gradients import REPLACEMENTS
from models.zoo.spec import ModelSpec

RESERVED = ("x", "y", "lr", "loss", "logits")
"""Inputs and outputs of the signatures that are not tensors of the model."""


class NotTraceable(ValueError):
    """The model cannot become a LiteRT graph; the message names the obstacle."""


class NotConvertible(ValueError):
    """The converter refused the graph or converted it wrongly; the message has the details."""


_REASON_LENGTH = 200


def not_convertible(error: Exception) -> NotConvertible:
    """The converter's error in one line, starting with the operation that it names, if any."""
    message = " ".join(str(error).split())
    named = re.search(r"\b((?:aten|stablehlo|tfl)\.\w+)|\btf\.([A-Z]\w+)", message)
    operation = f"operation {named[1] or named[2]}: " if named else ""
    reason = f"{operation}{type(error).__name__}: {message[:_REASON_LENGTH] or 'no reason given'}"
    return NotConvertible(f"LiteRT cannot take this model; {reason}")


@dataclass(frozen=True)
class Traced:
    """Both graphs, and their input tensors in the order of the state dict."""

    train: GraphModule
    infer: GraphModule
    tensors: tuple[TensorSpec, ...]
    values: tuple[torch.Tensor, ...]
    x: torch.Tensor
    y: torch.Tensor

    @property
    def trainable(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.trainable)


def trace(spec: ModelSpec, batch_size: int) -> Traced:
    """Both graphs of `spec` for batches of exactly `batch_size` rows.

    Raises:
        NotTraceable: the model has tensors that LiteRT does not support, is random during training, or fails.
    """
    module = spec.build(seed=0)
    state = module.state_dict(keep_vars=True)
    values = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    tensors = tuple(_describe_tensors(module, values))
    x, y = spec.example_batch(batch_size)
    initial = tuple(value.detach().clone() for value in values.values())
    names = [tensor.name for tensor in tensors]
    trainable = [tensor.name for tensor in tensors if tensor.trainable]

    def train(
        x: torch.Tensor, y: torch.Tensor, lr: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        bound = dict(zip(names, tensors, strict=True))
        frozen = {name: value for name, value in bound.items() if name not in trainable}

        def loss(trained: dict[str, torch.Tensor]) -> torch.Tensor:
            return spec.loss(functional_call(module, {**frozen, **trained}, (x,)), y)

        gradient, value = grad_and_value(loss)({name: bound[name] for name in trainable})
        return value, *(bound[name] - lr * gradient[name] for name in trainable)

    def infer(x: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        return (functional_call(module, dict(zip(names, tensors, strict=True)), (x,)),)

    module.requires_grad_(False)
    train_mode(module)
    train_graph = _graph(train, (x, y, torch.tensor(0.1), *initial))
    module.eval()
    infer_graph = _graph(infer, (x, *initial))
    _require_shape(infer_graph(x, *initial)[0], spec, batch_size)
    return Traced(train_graph, infer_graph, tensors, initial, x, y)


def _describe_tensors(module: nn.Module, values: dict[str, torch.Tensor]) -> list[TensorSpec]:
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise NotTraceable("the model has no trainable parameter")
    described: list[TensorSpec] = []
    owner: dict[int, str] = {}
    taken: dict[str, str] = dict.fromkeys(RESERVED, "an input or output of the signatures")
    for name, value in values.items():
        if value.dtype != torch.float32:
            raise NotTraceable(
                f"tensor {name!r} is {str(value.dtype).removeprefix('torch.')}; params are float32"
            )
        if id(value) in owner:
            raise NotTraceable(
                f"{name!r} and {owner[id(value)]!r} are one tensor; tied weights cannot be averaged by name, "
                "give each its own"
            )
        bound = signature_name(name)
        if bound in taken:
            raise NotTraceable(
                f"tensor {name!r} would be called {bound!r}, which is {taken[bound]}; rename it"
            )
        owner[id(value)] = name
        taken[bound] = f"tensor {name!r}"
        described.append(TensorSpec(name, bound, tuple(value.shape), name in trainable))
    return described


def _graph(function: Callable[..., Any], arguments: tuple[torch.Tensor, ...]) -> GraphModule:
    """The function as a graph of plain operations, without dead code."""
    try:
        with _unfused_attention():
            graph: GraphModule = make_fx(function, decomposition_table=REPLACEMENTS, tracing_mode="real")(
                *arguments
            )
    except NoGradient as error:
        raise NotTraceable(f"no LiteRT gradient for {error}") from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise NotTraceable(f"running it failed: {type(error).__name__}: {reason}") from error
    graph.graph.eliminate_dead_code()
    graph.recompile()
    for node in graph.graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(
            node.target, "tags", ()
        ):
            raise NotTraceable(
                f"{node.target} is random, and a LiteRT step has no random numbers; "
                "remove dropout (p=0) or train this model with torch"
            )
    return graph


@contextmanager
def _unfused_attention() -> Iterator[None]:
    """Computes attention as products and softmax: converters do not support torch's fused kernels, the default, which
    also count as random even without dropout."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _require_shape(logits: torch.Tensor, spec: ModelSpec, batch_size: int) -> None:
    if tuple(logits.shape) != (batch_size, *spec.logits_shape):
        raise NotTraceable(
            f"{spec.task} with {spec.classes} classes and inputs of shape {spec.input_shape} needs logits of "
            f"shape {('B', *spec.logits_shape)}, the model returns {('B', *logits.shape[1:])}"
        )
