"""The trainer against a plain compiled loop of the same model, on a GPU: GPT-2 124M by default (Radford 2019).

    python -m tests.bench.gpu_pretrain [--device cuda] [--steps 200] [--out FILE.json]

Needs this checkout, torch, numpy and safetensors. The loop is what one would write by hand: fused attention, the whole
model compiled (and, to see what that is worth, block by block as the trainer does), bfloat16 autocast, fused AdamW,
batches that lie on the GPU already. "torchtitan's recipe" is what torchtitan does with a model on one GPU: every block compiled and wrapped by
`fully_shard` with bfloat16 params and float32 reduction, a compiled loss, fused AdamW; torchtitan itself is not installed. The trainer reads its batches ahead from pinned memory, computes the learning
rate, counts labels, keeps losses. All train from the same params on the same tokens, in turns of a few steps, so that
what slows the machine slows all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from models.pretrain import forward_backward, profiling, trainer, world
from models.pretrain import plan as plans
from models.pretrain.data import prefetch
from models.pretrain.data.batches import Arrays, Batches
from models.pretrain.training import TrainingOptions
from models.zoo import ModelSpec, gpt

PEAK_FLOPS = 989e12
"""Of an H100 or H200, dense bfloat16 without sparsity; other devices are measured by a matrix product."""

RECIPE = "torchtitan's recipe"
OVERHEAD, MFU = 0.02, 0.5
"""What is aimed at."""


@dataclass(frozen=True)
class Sizes:
    vocab: int = 50304
    width: int = 768
    layers: int = 12
    heads: int = 12
    length: int = 1024
    batch_size: int = 32
    steps: int = 200
    warmup: int = 10
    turn: int = 10
    rows: int = 2048
    compiled: bool = True
    tie: bool = True
    precision: str = "bf16"


TINY = Sizes(
    vocab=64, width=32, layers=2, heads=2, length=16, batch_size=4, steps=4, warmup=1, turn=2, rows=16,
    compiled=False,
)  # fmt: skip


def run() -> dict[str, Any]:
    """On the GPU there is; without one the bench says so and measures nothing."""
    if not torch.cuda.is_available():
        sys.stdout.write("no GPU here: nothing measured\n")
        return {"skipped": "no GPU"}
    return compare(Sizes(), "cuda")


def compare(sizes: Sizes, device: str) -> dict[str, Any]:
    """Median seconds of a step of both, what the trainer takes more, and its share of the device's peak."""
    torch.set_float32_matmul_precision("high")
    spec = gpt.spec(
        (sizes.length,), sizes.vocab, width=sizes.width, layers=sizes.layers, heads=sizes.heads, tie=sizes.tie
    )
    tokens = random_tokens(sizes)
    plan = plans.parse(f"precision={sizes.precision},compile={str(sizes.compiled).lower()}")
    with world.join(plan) as here:
        if here.device.type != device:
            raise SystemExit(f"processes compute on {here.device.type} here, {device} was asked for")
        ways = {
            "plain loop": plain(spec, tokens, sizes, here, by_block=False),
            "plain loop by block": plain(spec, tokens, sizes, here, by_block=True),
            RECIPE: titan(spec, tokens, sizes, here),
            "trainer": ours(spec, tokens, sizes, here),
        }
        seconds, losses = timed(ways, sizes, device)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        seconds_ours = medians["trainer"]
        flops = profiling.flops_of_row(spec)[0] * sizes.batch_size
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        known = any(model in name for model in ("H100", "H200"))
        peak = PEAK_FLOPS if known else profiling.measured_peak(here)
        found = {
            "device": name,
            "torch": torch.__version__,
            "sizes": asdict(sizes),
            "parameters": sum(p.numel() for p in spec.build(0).parameters()),
            "step_seconds": medians,
            "overhead": seconds_ours / medians["plain loop"] - 1,
            "overhead_by_block": seconds_ours / medians["plain loop by block"] - 1,
            "overhead_titan": seconds_ours / medians[RECIPE] - 1,
            "overhead_aim": OVERHEAD,
            "tokens_per_second": sizes.batch_size * sizes.length / seconds_ours,
            "flops_per_step": flops,
            "peak_flops": peak,
            "peak_from": "data sheet, dense bfloat16" if known else "a matrix product on this device",
            "mfu": flops / seconds_ours / peak,
            "mfu_aim": MFU,
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "losses": losses,
        }
    print_found(found)
    return found


def random_tokens(sizes: Sizes) -> Arrays:
    """Sequences of random tokens and, as labels, what follows each; the last of each has none that counts."""
    x = np.random.default_rng(0).integers(sizes.vocab, size=(sizes.rows, sizes.length), dtype=np.int32)
    y = np.full_like(x, -1)
    y[:, :-1] = x[:, 1:]
    return Arrays(x, y)


Step = Callable[[], torch.Tensor | None]


def ours(spec: ModelSpec, tokens: Arrays, sizes: Sizes, here: world.World) -> Step:
    """A step of the trainer; what `losses` would do at a report is left to the end, as in a training."""
    options = TrainingOptions(steps=sizes.steps, batch_size=sizes.batch_size, lr=3e-4, eps=1e-6)
    training = trainer.build(spec, tokens, options, here, seed=1)
    training.batches = prefetch.Loader(training.batches, 2, pinned=here.device.type == "cuda")

    def step() -> torch.Tensor:
        training.train_step()
        return training._losses[-1]

    return step


def plain(spec: ModelSpec, tokens: Arrays, sizes: Sizes, here: world.World, *, by_block: bool) -> Step:
    """A step as one would write it for this model alone, on the batches that the trainer draws."""
    module: nn.Module = spec.build(1).to(here.device)
    if sizes.compiled:
        assert isinstance(module, gpt.GPT)
        for part in module.layers.values() if by_block else [module]:
            part.compile()
    return _loop(module, tokens, sizes, here, _loss, autocast=sizes.precision == "bf16")


def titan(spec: ModelSpec, tokens: Arrays, sizes: Sizes, here: world.World) -> Step:
    """A step by torchtitan's recipe, on the same batches."""
    module: nn.Module = spec.build(1).to(here.device)
    assert isinstance(module, gpt.GPT)
    mesh = init_device_mesh(here.device.type, (1,))
    is_half = sizes.precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if is_half else None, reduce_dtype=torch.float32 if is_half else None
    )
    for block in module.layers.values():
        if sizes.compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    loss = torch.compile(_loss) if sizes.compiled else _loss
    return _loop(module, tokens, sizes, here, loss, autocast=False)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), ignore_index=-1)


def _loop(
    module: nn.Module, tokens: Arrays, sizes: Sizes, here: world.World, loss_of: Loss, *, autocast: bool
) -> Step:
    cuda = here.device.type == "cuda"
    optimizer = torch.optim.AdamW(module.parameters(), 3e-4, eps=1e-6, weight_decay=0.01, fused=cuda or None)
    batches = Batches(tokens, sizes.batch_size, 1, forward_backward.share_of(here, sizes.batch_size))
    ready = [batches[step] for step in range(sizes.steps)]
    inputs = [(batch.x.to(here.device), batch.y.to(here.device)) for batch in ready]
    turn = iter(inputs)

    def step() -> torch.Tensor:
        x, y = next(turn)
        optimizer.zero_grad()
        with torch.autocast(here.device.type, torch.bfloat16, enabled=autocast):
            logits = module(x)
        loss = loss_of(logits, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def timed(
    ways: dict[str, Step], sizes: Sizes, device: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Mean seconds of a step in every turn of every way, in turns; and the losses of the steps that began each."""
    for way in ways.values():
        for _ in range(sizes.warmup):
            way()
    left = sizes.steps - sizes.warmup
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(left // sizes.turn):
        order = list(ways.items())
        for name, way in order[number % len(order) :] + order[: number % len(order)]:
            wait(device)
            began = time.perf_counter()
            last = None
            for _ in range(sizes.turn):
                last = way()
            wait(device)
            seconds[name].append((time.perf_counter() - began) / sizes.turn)
            losses[name].append(float(last) if last is not None else float("nan"))
    return seconds, losses


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def print_found(found: dict[str, Any]) -> None:
    memory = f", {found['peak_bytes'] / 2**30:.1f} GiB for all four" if found["peak_bytes"] else ""
    sys.stdout.write(
        f"{found['device']}: {found['parameters']:,} parameters, plain loop "
        f"{1e3 * found['step_seconds']['plain loop']:.2f} ms a step, trainer "
        f"{1e3 * found['step_seconds']['trainer']:.2f} ms, {RECIPE} {1e3 * found['step_seconds'][RECIPE]:.2f} ms, overhead {found['overhead']:.1%} (aim {OVERHEAD:.0%}; over the same blocks compiled "
        f"{found['overhead_by_block']:.1%})\n"
        f"{found['tokens_per_second']:,.0f} tokens/s, MFU {found['mfu']:.1%} of "
        f"{found['peak_flops'] / 1e12:.3g} TFLOP/s, {found['peak_from']} (aim {MFU:.0%} on a GPU){memory}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_pretrain", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    for name, default in asdict(Sizes()).items():
        if type(default) is int:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        found = run()
    else:
        base = asdict(TINY if given.tiny else Sizes())
        sizes = Sizes(
            **{k: v if getattr(given, k, None) is None else getattr(given, k) for k, v in base.items()}
        )
        found = compare(sizes, given.device)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
