"""Unstructured pruning: the least important weights become zero, one by one.

Zeros save neither space in a dense `.tflite` nor time. They save transport, because they compress (`zlib_bytes` in the facts). Pruning
whole channels (`models.compress.pruning.structured`) saves size and time too.

A weight's importance is its magnitude (Han 2015), its magnitude after training under an L1 or a group-lasso penalty, or
|w| · ‖x‖ over calibration rows (Wanda, Sun 2023). Sparsity grows on the cubic schedule of Zhu and Gupta 2017, while the
remaining weights are fine-tuned.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from models.compress.pruning import sparsity
from models.compress.pruning.sparsity_search import Bound, search
from models.compress.step import Context, Data, OnEpoch, StepModel, StepRefused
from models.compress.tuning import Tuning, labelled_rows, named_layers, own_loss, tune
from models.options import bounded
from models.pretrain.data.batches import Arrays
from models.zoo.spec import ModelSpec

MIN_ROWS = 20
"""Minimum number of training rows to both train and score a search."""


@dataclass(frozen=True)
class PruneOptions(Tuning):
    """Options of pruning; those of `Tuning` are for the fine-tuning, and layers in `freeze` are not cut.

    Attributes:
        method: how weights are ranked. `l1` and `group-lasso` train with that penalty first.
        sparsity: share of the weights in the layers to cut that become zero; for `search` the maximum.
        per_layer: `global` ranks the weights of all layers together, `uniform` cuts every layer alike, `search` finds a share for
            each layer such that accuracy on held-out training rows falls by at most `max_accuracy_drop`.
        ramp: share of the fine-tuning over which sparsity grows, in `cuts` cuts; 0, or no epochs, cuts at once.
        regularise_epochs: training under the penalty, whose lambda is `strength`, before the first cut.
        calibration_rows: number of rows to measure ‖x‖ on.
        held_out: share of the training rows that the search scores on and never trains on.
        probe_epochs: fine-tuning that every candidate of the search gets before it is scored.
        keep: layers that are not cut: names separated by commas.
    """

    method: Literal["magnitude", "l1", "group-lasso", "activation"] = "magnitude"
    sparsity: float = bounded(0.5, 0.0, 0.99)
    per_layer: Literal["global", "uniform", "search"] = "global"
    ramp: float = bounded(0.6, 0.0, 1.0)
    cuts: int = bounded(10, 1, 10_000)
    regularise_epochs: int = bounded(5, 1, 100_000)
    strength: float = bounded(0.02, 0.0, 1e3)
    calibration_rows: int = bounded(256, 1, 100_000)
    held_out: float = bounded(0.1, 0.01, 0.5)
    max_accuracy_drop: float = bounded(0.01, 0.0, 1.0)
    probe_epochs: int = bounded(0, 0, 1000)
    keep: str = ""


def prune(model: StepModel, data: Data, options: PruneOptions, context: Context) -> StepModel:
    """`model` with many zero weights, fine-tuned. Uses training rows only.

    Raises:
        StepRefused: there is no layer to cut, or too few rows for a search.
    """
    rng = context.rng()
    module = copy.deepcopy(model.module).requires_grad_(True)
    excluded = (*named_layers(module, options.keep, "keep"), *named_layers(module, options.freeze, "freeze"))
    names = sparsity.prunable(module, model.spec, excluded)
    if not names:
        raise StepRefused(
            f"prune finds no layer to cut in model {model.spec.name!r}: weights with two axes or more are cut, those of "
            f"keep = {options.keep!r} and freeze = {options.freeze!r} are not"
        )
    rows = labelled_rows(data)
    search_facts: dict[str, Any] = {}
    if options.per_layer == "search":
        rows, held_out = split_rows(rows, options.held_out, rng)
    if options.method in ("l1", "group-lasso"):
        regularise(module, names, model.spec, rows, options, rng, context.report_epochs(stage="regularise"))
    inputs = {}
    if options.method == "activation":
        inputs = sparsity.input_norms(module, names, rows.x[: options.calibration_rows])

    if options.per_layer == "search":
        probe = replace(options, epochs=options.probe_epochs)
        bound = Bound(options.max_accuracy_drop, options.sparsity)
        goals, held_out_facts = search(module, names, inputs, model.spec, rows, held_out, probe, bound, rng)
        search_facts = {"held_out": held_out_facts}
    else:
        groups = [names] if options.per_layer == "global" else [(name,) for name in names]
        goals = tuple(sparsity.goal(module, group, options.sparsity) for group in groups)
    ramp = sparsity.Ramp(options.ramp, options.cuts)
    sparsity.cut(
        module, goals, inputs, model.spec, rows, options, ramp, rng, context.report_epochs(stage="prune")
    )

    # torch's pruning moves a weight behind its bias; restore the order of the spec
    pruned = copy.deepcopy(model.module)
    pruned.load_state_dict(module.state_dict())
    facts = {
        "method": options.method,
        "per_layer": options.per_layer,
        **sparsity.facts(model.module, pruned, names),
        **search_facts,
        "saves": "transport only: zeros compress, while a dense file on the device and its latency stay as they are",
    }
    return StepModel(model.spec, pruned.eval(), facts=facts)


def split_rows(rows: Arrays, share: float, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Rows to train on, and `share` of them to score on.

    Raises:
        StepRefused: there are fewer than `MIN_ROWS`.
    """
    if len(rows) < MIN_ROWS:
        raise StepRefused(
            f"a search scores on held-out training rows, and there are {len(rows)} in all, expected {MIN_ROWS} or more"
        )
    order = rng.permutation(len(rows))
    count = max(1, round(share * len(rows)))
    scored, trained = order[:count], order[count:]
    return Arrays(rows.x[trained], rows.y[trained]), Arrays(rows.x[scored], rows.y[scored])


def regularise(
    module: nn.Module,
    names: Sequence[str],
    spec: ModelSpec,
    rows: Arrays,
    options: PruneOptions,
    rng: np.random.Generator,
    on_epoch: OnEpoch,
) -> None:
    """Trains in place, with a proximal step of the penalty after every step of the optimizer.

    L1 shrinks every weight by lr · strength (soft threshold; Parikh and Boyd 2014, section 6.5.2). The group lasso shrinks the norm
    of each output channel's weights by lr · strength · √(their number) (section 6.5.4; Yuan and Lin 2006; channels as in Wen 2016),
    so that whole channels become zero and `structured` can remove them.
    """
    weights = [module.get_parameter(f"{name}.weight") for name in names]
    threshold = options.lr * options.strength

    def shrink(step: int) -> None:
        with torch.no_grad():
            for weight in weights:
                if options.method == "l1":
                    weight.copy_(weight.sign() * (weight.abs() - threshold).clamp(min=0))
                else:
                    channels = weight.view(len(weight), -1)
                    norms = channels.norm(dim=1, keepdim=True).clamp(min=1e-12)
                    channels *= (1 - threshold * channels.shape[1] ** 0.5 / norms).clamp(min=0)

    training = replace(options, epochs=options.regularise_epochs)
    tune(module, rows, training, rng, own_loss(spec), after_step=shrink, on_epoch=on_epoch)
