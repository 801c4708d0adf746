"""Small models that generate, and what they answer without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from models.serving.generation import Engine, Event, Options, Request, Sampling
from models.zoo import ModelSpec, charlm, gpt, moe

LENGTH, VOCAB = 64, 50
LLAMA: dict[str, Any] = {
    "bias": "qkv",
    "norm": "rms",
    "activation": "swiglu",
    "hidden": 48,
    "kv_heads": 2,
    "positions": "rope",
}
SPECS: dict[str, ModelSpec] = {
    "gpt": gpt.spec((LENGTH,), VOCAB, width=32, layers=2, heads=4),
    "tied gpt": gpt.spec((LENGTH,), VOCAB, width=32, layers=2, heads=4, tie=True),
    "sparse gpt": gpt.spec(
        (LENGTH,),
        VOCAB,
        width=32,
        layers=2,
        heads=4,
        attention="block_sparse",
        attention_block=4,
        attention_local=1,
        attention_stride=3,
    ),
    "llama": gpt.spec((LENGTH,), VOCAB, width=32, layers=2, heads=4, **LLAMA),
    "charlm": charlm.spec((LENGTH,), VOCAB),
    "moe": moe.spec((LENGTH,), VOCAB, width=32, layers=2, heads=4, experts=4, chosen=2),
}
GREEDY = Sampling(temperature=0.0)


def built(spec: ModelSpec, seed: int = 3) -> nn.Module:
    """A module whose weights are so large that every token changes what follows."""
    module = spec.build(seed).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return module


def prompts(*sizes: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, VOCAB, (size,), generator=generator).tolist()) for size in sizes]


@torch.inference_mode()
def uncached(
    module: nn.Module, prompt: Sequence[int], count: int, length: int
) -> tuple[list[int], list[float]]:
    """The `count` most probable next tokens, each after the previous ones, and their log-probabilities.

    The model sees sequences of `length` tokens, as all models take them; those behind the last change nothing.
    """
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        row = torch.zeros(1, length, dtype=torch.int32)
        row[0, : len(tokens)] = torch.tensor(tokens)
        odds = module(row)[0, len(tokens) - 1].log_softmax(-1)
        logprobs.append(float(odds.max()))
        tokens.append(int(odds.argmax()))
    return tokens[len(prompt) :], logprobs


def run(engine: Engine, *requests: Request) -> dict[str, list[Event]]:
    """The events of each request, all of which are added at once."""
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.id, []).append(event)
    return events


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events)


def engine_of(spec: ModelSpec, options: Options | None = None, module: nn.Module | None = None) -> Engine:
    """An engine whose tokens are letters."""
    return Engine(module or built(spec), spec, options or Options(block_tokens=4, max_batch=4), letters)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)
