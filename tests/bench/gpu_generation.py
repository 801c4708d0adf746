"""Generation on a GPU: a GPT-2 of 124M params in bfloat16, tokens a second beside transformers with the same weights.

Runs only where PyTorch finds a GPU, and is not part of `make bench`: `python -m tests.bench.gpu_generation`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from models.serving.generation import Engine, Options, Request, Sampling
from models.zoo import ModelSpec, gpt
from tests.support import gpt2

LENGTH, VOCAB = 1024, 50_257
PROMPT, ANSWER, STREAMS, REPEATS = 128, 256, (1, 16, 64), 3
GREEDY = Sampling(temperature=0.0)


def run() -> dict[str, Any]:
    """Tokens a second by streams: the engine, and transformers' `generate` on a batch of equally long prompts."""
    if not torch.cuda.is_available():
        print("gpu_generation: PyTorch finds no GPU here; nothing was measured")
        return {}
    spec = gpt.spec((LENGTH,), VOCAB, width=768, layers=12, heads=12, tie=True)
    module = spec.build(0).eval().to("cuda", torch.bfloat16)
    theirs = gpt2.of(spec.build(0).eval(), spec).to("cuda", torch.bfloat16)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "params": sum(each.numel() for each in module.parameters()),
    }
    for streams in STREAMS:
        prompts = np.random.default_rng(0).integers(VOCAB, size=(streams, PROMPT))
        ways: dict[str, Callable[[], None]] = {
            "engine": lambda prompts=prompts: _engine(module, spec, prompts),  # type: ignore[misc]
            "transformers": lambda prompts=prompts: _transformers(theirs, prompts),  # type: ignore[misc]
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for way in ways.values():
            way()
        for _ in range(REPEATS):
            for name, way in ways.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                way()
                torch.cuda.synchronize()
                rates[name].append(streams * ANSWER / (time.perf_counter() - began))
        figures = {name: statistics.median(values) for name, values in rates.items()}
        figures["ratio"] = figures["engine"] / figures["transformers"]
        found[f"{streams} streams"] = figures
        print(
            f"gpu_generation, {found['device']}, {streams} streams: engine {figures['engine']:.0f} tokens/s, "
            f"transformers {figures['transformers']:.0f}: {figures['ratio']:.2f} times",
            flush=True,
        )
    return found


def _engine(module: torch.nn.Module, spec: ModelSpec, prompts: Any) -> None:
    engine = Engine(module, spec, Options(max_batch=len(prompts), prefill_chunk=2048))
    for at, prompt in enumerate(prompts.tolist()):
        engine.add(Request(str(at), tuple(prompt), ANSWER, GREEDY))
    tokens = 0
    while engine.has_work:
        tokens += len(engine.step())
    assert tokens == len(prompts) * ANSWER


def _transformers(theirs: Any, prompts: Any) -> None:
    ids = torch.from_numpy(prompts).to("cuda")
    answer = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0
    )
    assert answer.shape == (len(prompts), PROMPT + ANSWER)


if __name__ == "__main__":
    result = run()
    if len(sys.argv) > 1 and result:
        with open(sys.argv[1], "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(result, file, indent=1)
