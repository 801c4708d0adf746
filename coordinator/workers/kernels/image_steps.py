"""Local training of a chain of convolutions, pooling and dense layers by a step of our own (`image_steps.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coordinator.workers.kernels import native
from coordinator.workers.kernels.image_chain import ImageChain
from coordinator.workers.kernels.same_step import require_same
from edge_client.train.torch_trainer import TorchRuntime, train_mode

if TYPE_CHECKING:
    from models.zoo import ModelSpec

_SOURCE = Path(__file__).with_name("image_steps.cpp")
_NUMBERS = 6  # that describe a layer


class ImageRuntime(TorchRuntime):
    """As `TorchRuntime`, to float32 rounding.

    Args:
        chain: what the module of `spec` computes.
        cache: folder for what is compiled, which only this user may write.

    Raises:
        CannotCompile: the step cannot be compiled here, or the module does more than its layers show.
    """

    def __init__(self, spec: ModelSpec, chain: ImageChain, cache: Path) -> None:
        super().__init__(spec.build(0), spec.loss)
        self._library = native.load(_SOURCE, cache)
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._library.create.restype, self._library.differentiate.restype = address, ctypes.c_double
        self._library.create.argtypes = [address, number, number, number, number, ctypes.c_int32]
        self._library.differentiate.argtypes = [address, address, address, number, address, address]
        self._library.destroy.argtypes = [address]
        self._chain = chain
        weights = [self._weights.get(name) for name in chain.names]
        self._weight_addresses = _addresses(weights)
        # Two sets, in turns: a step with momentum still needs the gradients of the one before.
        self._gradients = [_Gradients(chain.names, self._weights) for _ in range(2)]
        # Buffers have the size of the batch, and the last batch of an epoch may be short.
        self._steps: dict[int, int] = {}
        x, y = spec.example_batch(5)
        train_mode(self.module)
        require_same(super()._differentiate(x, y), self._differentiate(x, y))

    def _differentiate(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
        x, y = x.float().contiguous(), y.int().contiguous()
        gradients = self._gradients[0]
        self._gradients.reverse()
        loss: float = self._library.differentiate(
            self._step(len(x)),
            x.data_ptr(),
            y.data_ptr(),
            len(x),
            self._weight_addresses,
            gradients.addresses,
        )
        return loss, list(gradients.tensors)

    def _step(self, batch_size: int) -> int:
        """The buffers of a batch of this size: of the last two sizes."""
        if batch_size not in self._steps:
            if len(self._steps) > 1:
                self._library.destroy(self._steps.pop(next(reversed(self._steps))))
            self._steps[batch_size] = self._create()
        return self._steps[batch_size]

    def _create(self) -> int:
        rows = [[each.kind, *each.numbers] for each in self._chain.layers]
        numbers = [number for row in rows for number in (*row, *[0] * (_NUMBERS - len(row)))]
        listed = (ctypes.c_int64 * len(numbers))(*numbers)
        made: int = self._library.create(listed, len(rows), *self._chain.shape, self._chain.channels_last)
        return made


class _Gradients:
    """Memory for the gradient of each weight. `tensors`: in the order of the module, `addresses`: of the chain."""

    def __init__(self, names: list[str], weights: dict[str, torch.nn.Parameter]) -> None:
        made = {name: torch.zeros_like(weight, requires_grad=False) for name, weight in weights.items()}
        self.tensors = list(made.values())
        self.addresses = _addresses([made.get(name) for name in names])


def _addresses(tensors: Sequence[torch.Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[None if each is None else each.data_ptr() for each in tensors])
