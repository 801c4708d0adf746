"""A mixture of experts: one grouped product for all experts beside a loop over them, and how evenly a balancing loss
makes a router use them, on Shakespeare (`--data-dir` or FEDLOOP_DATA_DIR)."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from models import zoo
from models.zoo import moe
from tests.bench.interleaved import medians
from tests.support.require import data_dir

LENGTH, ROWS, STEPS, TEST_ROWS = 64, 16, 600, 200


def run() -> dict[str, Any]:
    """Prints and returns median seconds of forward and backward, of the processor on a CPU, and for coefficients the busiest expert's share of
    tokens, the largest of all layers, with the test loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    products = {
        f"{experts} experts, {str(dtype).removeprefix('torch.')}": _products(experts, dtype, device)
        for experts in (8, 64)
        for dtype in (torch.float32, torch.bfloat16)
    }
    for name, each in products.items():
        print(
            f"{name}: grouped {1e3 * each['grouped']:.2f} ms, loop {1e3 * each['loop']:.2f} ms, "
            f"loop / grouped {each['speedup']:.2f}"
        )
    used = {str(balance): _use(balance) for balance in (0.0, 0.01)}
    for balance, found in used.items():
        print(f"balance {balance}: busiest {found['busiest_share']:.0%}, test loss {found['test_loss']:.3f}")
    return {"device": device, "products": products, "balance": used}


def _products(experts: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    tokens, width = (8192, 768) if device == "cuda" else (2048, 128)
    layer = moe.Experts(width, experts).to(device, dtype)
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    counts = torch.randint(experts, (tokens,), device=device).bincount(minlength=experts)
    inputs = [x, *layer.parameters()]

    def loop() -> torch.Tensor:
        parts = zip(torch.split(x, counts.tolist()), layer.up, layer.down, strict=True)
        return torch.cat([F.gelu(part @ up, approximate="tanh") @ down for part, up, down in parts])

    def timed(output: torch.Tensor) -> None:
        torch.autograd.grad(output, inputs, torch.ones_like(output))
        if device == "cuda":
            torch.cuda.synchronize()

    ways = {"grouped": lambda: timed(layer(x, counts)), "loop": lambda: timed(loop())}
    # processor seconds are those that other programs change least
    seconds = medians(ways, 20, time.perf_counter if device == "cuda" else time.process_time)
    return {**seconds, "speedup": seconds["loop"] / seconds["grouped"]}


def _use(balance: float) -> dict[str, float]:
    text = (data_dir("tinyshakespeare.txt") / "tinyshakespeare.txt").read_text("utf-8")
    ids = {character: index for index, character in enumerate(sorted(set(text)))}
    data = torch.tensor([ids[character] for character in text])
    options: dict[str, Any] = {"width": 64, "layers": 2, "heads": 4, "experts": 8, "balance": balance}
    module = zoo.get("moe", input_shape=(LENGTH,), classes=len(ids), **options).build(7)
    optimizer = torch.optim.AdamW(module.parameters(), 2e-3)
    generator = torch.Generator().manual_seed(0)
    held_out = len(data) - TEST_ROWS * LENGTH - 1
    for _ in range(STEPS):
        optimizer.zero_grad()
        starts = torch.randint(held_out - LENGTH, (ROWS,), generator=generator)
        torch.autograd.backward(_loss(module, data, starts))
        optimizer.step()
    shares: list[float] = []

    def record(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        shares.append(float(inputs[1].max() / inputs[1].sum()))

    for part in module.eval().modules():
        if isinstance(part, moe.Experts):
            part.register_forward_pre_hook(record)
    with torch.no_grad():
        loss = float(_loss(module, data, held_out + LENGTH * torch.arange(TEST_ROWS)))
    return {"busiest_share": max(shares), "test_loss": loss}


def _loss(module: nn.Module, data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    rows = data[starts[:, None] + torch.arange(LENGTH + 1)]
    return F.cross_entropy(module(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
