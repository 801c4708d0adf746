"""Adapts the learning rate and its warm-up to a larger global batch.

linear   lr · k for k times the batch, for SGD, with a warm-up over the first epochs (Goyal 2017, sections 2.1 and 2.2)
sqrt     lr · √k, for Adam and its kind (Krizhevsky 2014, section 5; Malladi 2022, definition 5.2), which also has
         1 - beta and 1 / eps² grow by k and √k
Beyond the gradient noise scale a larger batch saves next to no steps (McCandlish 2018, equations 2.11 and 2.12).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from models.pretrain.training import TrainingOptions

Rule = Literal["none", "linear", "sqrt"]
WARMUP_EPOCHS = 5
"""Goyal 2017, section 2.2."""


def scaled(
    options: TrainingOptions, base_batch_size: int, rule: Rule, steps_per_epoch: int = 0
) -> TrainingOptions:
    """`options`, tuned for batches of `base_batch_size` rows, adapted to batches of `options.batch_size`.

    The number of examples seen is unchanged, so `steps` shrinks as the batch grows. Linear scaling warms up over five
    epochs, of `steps_per_epoch` steps each, or a tenth of all steps if that is less, unless a warm-up is set.
    """
    factor = options.batch_size / base_batch_size
    if rule == "none" or factor == 1:
        return options
    steps = max(1, round(options.steps / factor)) if options.steps else 0
    warmup = min(steps or options.warmup, round(options.warmup / factor))
    if rule == "linear":
        if not options.warmup and factor > 1:
            all_steps = steps or options.epochs * steps_per_epoch
            warmup = min(WARMUP_EPOCHS * steps_per_epoch or all_steps // 10, all_steps // 10)
        return replace(options, lr=options.lr * factor, steps=steps, warmup=warmup)
    betas = (max(0.0, 1 - factor * (1 - beta)) for beta in (options.beta1, options.beta2))
    beta1, beta2 = betas if options.optimizer == "adamw" else (options.beta1, options.beta2)
    return replace(
        options,
        lr=options.lr * math.sqrt(factor),
        eps=options.eps / math.sqrt(factor),
        beta1=beta1,
        beta2=beta2,
        steps=steps,
        warmup=warmup,
    )


def rule_for(optimizer: str) -> Rule:
    """The scaling rule of an optimizer."""
    return "linear" if optimizer == "sgd" else "sqrt"
