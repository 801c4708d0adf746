"""Local training in PyTorch by a compiled step, with convolutions in channels-last memory format.

`torch.compile`'s backend turns loss and gradient of a full batch into one function, with a C++ compiler of this machine.
Only full batches have the shape it is made for; a short one, which may be the last of an epoch, takes the ordinary
step, so nothing is compiled twice. Before it is used, the function is compared with the ordinary step.

What is compiled stays in a folder of the user's, as source and libraries. The caches of PyTorch that hold pickles are off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

from coordinator.workers.kernels.native import CannotCompile
from coordinator.workers.kernels.same_step import require_same
from edge_client.train.torch_trainer import TorchRuntime, train_mode

if TYPE_CHECKING:
    from models.zoo import ModelSpec

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)

_Step = Callable[..., Sequence[torch.Tensor]]
"""x, y and the weights -> the loss and the gradient by each weight."""


class CompiledRuntime(TorchRuntime):
    """As `TorchRuntime`, to float32 rounding.

    Args:
        batch_size: of the batches that take the compiled step.
        cache: folder for what is compiled, which only this user may write.

    Raises:
        CannotCompile: the step cannot be compiled here.
    """

    def __init__(self, spec: ModelSpec, batch_size: int, cache: Path) -> None:
        module = spec.build(0)
        self._memory_format = torch.contiguous_format
        if len(spec.input_shape) == 3 and (channels := input_channels(module)):
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            # A module that takes rows [height, width, channels] has them in this order already.
            if spec.input_shape[0] == channels:
                self._memory_format = torch.channels_last
        super().__init__(module, spec.loss)
        self._batch_size = batch_size
        self._step: _Step | None = None
        x, y = spec.example_batch(batch_size)
        train_mode(module)
        compiled = self._compile(spec, x, y, cache)
        loss, *gradients = compiled(self._arranged(x), y, *self._weights.values())
        require_same(self._differentiate(x, y), (float(loss), gradients))
        self._step = compiled

    def _differentiate(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
        x = self._arranged(x)
        if self._step is None or len(x) != self._batch_size:
            return super()._differentiate(x, y)
        with torch.no_grad():
            loss, *gradients = self._step(x, y, *self._weights.values())
        return float(loss), gradients

    def _arranged(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous(memory_format=self._memory_format)

    def _compile(self, spec: ModelSpec, x: torch.Tensor, y: torch.Tensor, cache: Path) -> _Step:
        module, loss, names = self.module, spec.loss, self.trainable

        def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(functional_call(module, weights, (x,)), y)

        def step(x: torch.Tensor, y: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
            gradients, loss = grad_and_value(loss_of)(dict(zip(names, weights, strict=True)), x, y)
            return (loss, *(gradients[name] for name in names))

        arguments: list[Any] = [self._arranged(x), y, *(weight.detach() for weight in self._weights.values())]
        try:
            _require_compiler(cache)
            with torch.no_grad():
                # Not `torch.compile`, whose guards look at every param of the module again at every step.
                graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
                compiled: _Step = torch._inductor.compile(graph, arguments)
                return compiled
        except CannotCompile:
            raise
        except Exception as error:  # of a compiler, or of what it cannot trace
            raise CannotCompile(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def input_channels(module: nn.Module) -> int:
    """Channels of the images that the module's first convolution takes; 0 if it has none."""
    return next((part.in_channels for part in module.modules() if isinstance(part, _CONVOLUTIONS)), 0)


def _require_compiler(cache: Path) -> None:
    """Points PyTorch's compiler to the cache, and to this process only.

    Raises:
        CannotCompile: there is no C++ compiler.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor import cpp_builder, exc

    torch._inductor.config.compile_threads = 1  # it would start processes
    torch._inductor.config.cpp.threads = 1
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise CannotCompile("no C++ compiler was found here; install g++ or clang++") from None
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
