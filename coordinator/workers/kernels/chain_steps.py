"""Local training of a chain of convolutions, pooling and dense layers by code of our own (`cpp/chain_steps.cpp`), compiled for this machine.

A client whose steps are SGD is trained as a whole by one call; other steps take their gradients from it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from coordinator.workers.kernels import native
from coordinator.workers.kernels.layer_chain import Kind, Layer, LayerChain
from coordinator.workers.kernels.layout import Layout, Work, lay_out
from coordinator.workers.kernels.same_step import require_same
from coordinator.workers.training import ClientTasks, OneByOne, Stack, complete
from coordinator.workers.workspace_arrays import Workspace
from edge_client.train.torch_trainer import TorchRuntime, train_mode
from edge_client.train.trainer import LocalResult
from models.labels import MIN_QUANTITY
from strategies.client_rules import CLIP_EPSILON, Correction
from strategies.params import Params

if TYPE_CHECKING:
    from models.zoo import ModelSpec

_SOURCE = Path(__file__).with_name("cpp") / "chain_steps.cpp"
_NUMBERS = 6  # that describe a layer
_ADDRESS, _INT64 = ctypes.c_void_p, ctypes.c_int64

_Addresses = ctypes.Array[ctypes.c_void_p]


class _Work(ctypes.Structure):
    """As `Work` in `cpp/chain_steps.cpp`."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "y", "rows", "sizes", "order")),
        *((name, _INT64) for name in ("steps", "slots", "width")),
        ("counts", _ADDRESS),
        *((name, ctypes.c_double) for name in ("lr", "mu", "momentum", "clip_grad_norm", "clip_epsilon")),
        ("least", ctypes.c_float),
    )


class ChainSteps:
    """The compiled code for one chain, with its buffers.

    Raises:
        CannotCompile: it cannot be compiled here.
    """

    def __init__(self, chain: LayerChain, shapes: Mapping[str, tuple[int, ...]], cache: Path) -> None:
        self._library = native.load(_SOURCE, cache)
        self._library.create.restype, self._library.differentiate.restype = _ADDRESS, ctypes.c_double
        self._library.create.argtypes = [_ADDRESS, _INT64, _ADDRESS, ctypes.c_int32, ctypes.c_int32]
        self._library.differentiate.argtypes = [
            _ADDRESS,
            _ADDRESS,
            _ADDRESS,
            _INT64,
            ctypes.c_float,
            _ADDRESS,
            _ADDRESS,
        ]
        self._library.train.argtypes = [_ADDRESS] * 6
        self._library.train.restype = None
        self._names, self._shapes = chain.names, shapes
        self._label_type = np.dtype(np.float32 if chain.regression else np.int32)
        self._counts = np.array([int(np.prod(shapes[name])) if name else 0 for name in self._names], np.int64)
        rows = [_encode(each) for each in chain.layers]
        numbers = np.array([[*row, *[0] * (_NUMBERS - len(row))] for row in rows], np.int64)
        shape = np.array(chain.shape, np.int64)
        self._chains = _ADDRESS(
            self._library.create(
                numbers.ctypes.data, len(rows), shape.ctypes.data, chain.channels_last, chain.regression
            )
        )

    def addresses(self, arrays: Mapping[str, int]) -> _Addresses:
        """Addresses by name, in the order of the chain; none where it has no such param."""
        return (_ADDRESS * len(self._names))(*[arrays.get(name) for name in self._names])

    def differentiate(
        self, x: torch.Tensor, y: torch.Tensor, weights: _Addresses, gradients: _Addresses
    ) -> float:
        """The loss of a batch; writes its gradients."""
        x, y = x.float().contiguous(), y.to(_TORCH_TYPES[self._label_type.char]).contiguous()
        loss: float = self._library.differentiate(
            self._chains, x.data_ptr(), y.data_ptr(), len(x), MIN_QUANTITY, weights, gradients
        )
        return loss

    def train(
        self,
        params: Params,
        layout: Layout,
        work: Work,
        offsets: Mapping[str, npt.NDArray[np.float32]],
        data: Workspace,
    ) -> tuple[Params, npt.NDArray[np.float64]]:
        """What each client has learnt [clients, …], and the mean loss of each slot of the layout.

        Args:
            offsets: `Correction.offset` of each client, [clients, …]; empty: none.
        """
        clients = len(layout.order)
        deltas = {name: np.empty((clients, *self._shapes[name]), np.float32) for name in self._names if name}
        losses = np.empty(clients, np.float64)
        x, y = np.ascontiguousarray(data.x, np.float32), np.ascontiguousarray(data.y, self._label_type)
        start = {name: np.ascontiguousarray(params[name], np.float32) for name in deltas}
        laid = [np.ascontiguousarray(each, np.int64) for each in (layout.rows, layout.sizes, layout.order)]
        arrays: list[npt.NDArray[Any]] = [x, y, *laid]
        described = _Work(
            *(each.ctypes.data for each in arrays),
            *layout.rows.shape,
            self._counts.ctypes.data,
            *(work.lr, work.mu, work.momentum, work.clip_grad_norm, CLIP_EPSILON),
            MIN_QUANTITY,
        )
        groups: list[Mapping[str, npt.NDArray[np.float32]]] = [start, offsets, deltas]
        addresses = [
            self.addresses({name: each.ctypes.data for name, each in group.items()}) for group in groups
        ]
        self._library.train(self._chains, ctypes.byref(described), *addresses, losses.ctypes.data)
        return deltas, losses


_ACTIVATIONS = {"": 0, "relu": 1, "tanh": 2, "sigmoid": 3}


def _encode(layer: Layer) -> list[int]:
    """A layer as `cpp/chain_steps.cpp` reads it: its kind, and what the kind needs."""
    activation = _ACTIVATIONS[layer.activation]
    match layer.kind:
        case Kind.ACTIVATION:
            return [layer.kind, activation]
        case Kind.MAX_POOLING:
            return [layer.kind, 0, *layer.sizes]
        case Kind.DENSE:
            return [layer.kind, layer.sizes[1], activation]
    return [layer.kind, *layer.sizes]


_TORCH_TYPES = {np.dtype(np.int32).char: torch.int32, np.dtype(np.float32).char: torch.float32}


class ChainRuntime(TorchRuntime):
    """As `TorchRuntime`, to float32 rounding.

    Args:
        chain: what the module of `spec` computes.
        cache: folder for what is compiled, which only this user may write.

    Raises:
        CannotCompile: the step cannot be compiled here, or the module does more than its layers show.
    """

    def __init__(self, spec: ModelSpec, chain: LayerChain, cache: Path) -> None:
        super().__init__(spec.build(0), spec.loss)
        shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}
        self.steps = ChainSteps(chain, shapes, cache)
        self._addresses = self.steps.addresses(
            {name: each.data_ptr() for name, each in self._weights.items()}
        )
        # Two sets, in turns: a step with momentum still needs the gradients of the one before.
        self._gradients = [{name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(2)]
        self._targets = [
            self.steps.addresses({name: each.data_ptr() for name, each in gradients.items()})
            for gradients in self._gradients
        ]
        x, y = spec.example_batch(5)
        train_mode(self.module)
        require_same(super()._differentiate(x, y), self._differentiate(x, y))

    def _differentiate(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
        self._gradients.reverse()
        self._targets.reverse()
        loss = self.steps.differentiate(x, y, self._addresses, self._targets[0])
        return loss, list(self._gradients[0].values())


class ChainTrainer:
    """A `ClientTrainer` of models that are a chain."""

    def __init__(self, runtime: ChainRuntime) -> None:
        self.runtime = runtime

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterable[LocalResult] | Stack:
        """Results in the order of the clients, which all have the same local work and rule.

        Raises:
            NoExamples: a client has no rows.
        """
        if not clients.task.rule.is_plain_training:
            return OneByOne(self.runtime).train(params, clients, data)
        corrections = clients.begin()
        if corrections[0].adamw is not None or corrections[0].fixed:
            return OneByOne(self.runtime).train(params, clients, data)
        work = Work.of(clients.task, corrections[0])
        layout = lay_out(clients.rows, clients.seeds, work)
        deltas, losses = self.runtime.steps.train(params, layout, work, _offsets(corrections), data)
        slots = np.argsort(layout.order)
        stack = Stack(deltas, layout.steps[slots], losses[slots])
        return complete(stack, clients, corrections) if clients.task.transforms(corrections[0]) else stack


def _offsets(corrections: Sequence[Correction]) -> dict[str, npt.NDArray[Any]]:
    given = [each.offset for each in corrections if each.offset is not None]
    return {
        name: np.stack([each[name] for each in given]).astype(np.float32)
        for name in (given[0] if given else ())
    }
