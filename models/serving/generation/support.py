"""Which models can generate with cached keys and values."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from models.serving.generation.batch import Part, assemble
from models.serving.generation.cached_model import CachedModel
from models.zoo.layout import Layout, matching
from models.zoo.spec import ModelSpec


class CannotGenerate(ValueError):
    """A model that cannot generate with a cache; the message says why."""


def require_layout(spec: ModelSpec, module: nn.Module, deterministic: bool) -> Layout:
    """The layout of a model that can generate, by what its spec says.

    Raises:
        CannotGenerate: it predicts no next token, or its layout does not name its attention.
    """
    name = f"model {spec.name!r} cannot generate"
    if spec.masked:
        raise CannotGenerate(f"{name}: it predicts masked tokens from both sides, not the next token")
    if spec.task != "next_token" or len(spec.input_shape) != 1:
        raise CannotGenerate(f"{name}: its task is {spec.task!r}, expected 'next_token' of token sequences")
    layout = spec.layout
    if layout is None or not any(matching(module, layout.attention)):
        raise CannotGenerate(
            f"{name} with cached keys and values: its layout names no attention, (query, key, value) -> mixed values"
        )
    if deterministic and layout.experts:
        raise CannotGenerate(
            f"{name} with deterministic = true: how many tokens an expert multiplies at once depends on the other "
            "requests; use deterministic = false"
        )
    return layout


VERIFIED_TOKENS = 256
TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits, relative to the largest logit, that rounding explains."""


def verify(spec: ModelSpec, module: nn.Module, layout: Layout) -> None:
    """Checks that the model answers with a cache as it does without, on a sequence of up to `VERIFIED_TOKENS` tokens.

    It would not where attention is another than softmax of scaled products over all earlier tokens, where positions
    come in at a module that the layout does not name, or where a token sees later ones.

    Raises:
        CannotGenerate: the logits differ.
    """
    tokens, expected = _uncached(spec, module)
    count, block_tokens = len(tokens), 16
    blocks = list(range(1, -(-count // block_tokens) + 1))
    cached = CachedModel(module, layout, len(blocks), block_tokens)
    # two pieces of several tokens, and single ones
    cuts = sorted({0, count // 2, max(count // 2, count - 2), max(count // 2, count - 1), count})
    for start, end in pairwise(cuts):
        part = Part(tokens[start:end], start, blocks, wanted=True, pad_to=end - start)
        batch, _ = assemble([part], block_tokens, spec.input_shape[0], together=cached.together)
        logits = cached.run(batch)[0].float()
        difference = float((logits - expected[end - 1]).abs().max())
        bound = TOLERANCES.get(expected.dtype, 1e-1) * float(expected.abs().max())
        if not difference <= bound:
            raise CannotGenerate(
                f"model {spec.name!r} cannot generate with cached keys and values: after {end} tokens its logits differ "
                f"by {difference:.2g} from those without a cache, rounding explains {bound:.2g}; its layout must name "
                "every module of attention, which sees all earlier tokens, and every one of learned positions"
            )


@torch.inference_mode()
def _uncached(spec: ModelSpec, module: nn.Module) -> tuple[list[int], torch.Tensor]:
    """Tokens of a sequence and their logits [T, V]; models that take only whole sequences get one."""
    training = {part: part.training for part in module.modules()}
    device = next(module.parameters()).device
    length = spec.input_shape[0]
    row = torch.from_numpy(np.random.default_rng(0).integers(spec.tokens, size=(1, length))).to(device)
    module.eval()
    try:
        count = min(length, VERIFIED_TOKENS)
        try:
            logits = module(row[:, :count])
        except RuntimeError:
            logits = module(row)
    finally:
        for part, was_training in training.items():
            part.training = was_training
    return row[0, :count].tolist(), logits[0, :count]
