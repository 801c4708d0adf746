"""Matrix products in 8-bit floating point, with scales measured on every tensor in every pass (Micikevicius 2022).

    output          = x · wᵀ    both in e4m3
    gradient of x   = g · w     g in e5m2, which has the wider range that gradients need
    gradient of w   = gᵀ · x

A tensor is divided by its largest value so that it fills the range of its type; products are summed in float32. Params,
their gradients and the optimizer stay float32, and everything else is computed as with `bf16`.

The linear layers that a layout splits (`columns` and `rows`) take part if both their sizes are multiples of 16, as the
hardware requires; the embedding, the head, norms, routers and experts do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from models.pretrain.plan import PlanError
from models.zoo.layout import Layout, matching

CAPABILITY = (8, 9)
"""Of the first GPUs that multiply 8-bit floats: Ada; Hopper and Blackwell are later."""

_MULTIPLE = 16
_SMALLEST = 1e-12


def require_support(device: torch.device) -> None:
    """Checks that `device` has 8-bit products.

    Raises:
        PlanError: it has none; says why.
    """
    needed = f"a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or later (Ada, Hopper)"
    if device.type != "cuda":
        raise PlanError(f"plan: precision=fp8 needs {needed}; here processes compute on the CPU: use bf16")
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        name = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        raise PlanError(f"plan: precision=fp8 needs {needed}; {name}: use bf16")


def convert(module: nn.Module, layout: Layout) -> int:
    """Lets the linear layers of `module` multiply in 8 bits, in place; returns how many."""
    count = 0
    for name, linear in list(matching(module, (*layout.columns, *layout.rows))):
        if (
            type(linear) is nn.Linear
            and not linear.in_features % _MULTIPLE
            and not linear.out_features % _MULTIPLE
        ):
            module.set_submodule(name, Linear(linear))
            count += 1
    return count


class Linear(nn.Module):
    """A linear layer with the params of another, under the same names."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(x.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """x [M, K], w [N, K] -> bfloat16 [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return _multiply(_scaled(x, torch.float8_e4m3fn), _scaled(w, torch.float8_e4m3fn))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, w = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _multiply(_scaled(g, torch.float8_e5m2), _scaled(w.t(), torch.float8_e4m3fn)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            # sums over rows, of which there must be a multiple of 16
            more = -len(x) % _MULTIPLE
            g, x = (F.pad(each, (0, 0, 0, more)) if more else each for each in (g, x))
            dw = _multiply(_scaled(g.t(), torch.float8_e5m2), _scaled(x.t(), torch.float8_e4m3fn)).to(w.dtype)
        return dx, dw


Scaled = tuple[torch.Tensor, torch.Tensor]
"""Values in 8 bits, row by row in memory, and what to multiply them by, float32."""


def _scaled(values: torch.Tensor, dtype: torch.dtype) -> Scaled:
    most = torch.finfo(dtype).max
    scale = values.abs().amax().float().clamp(min=_SMALLEST) / most
    return (values.float() / scale).clamp(-most, most).to(dtype).contiguous(), scale


def _multiply(a: Scaled, b: Scaled) -> torch.Tensor:
    """[M, K] and [N, K] -> [M, N], as the hardware takes them: the second by columns."""
    product: torch.Tensor = torch._scaled_mm(
        a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16
    )
    return product
