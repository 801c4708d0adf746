"""Layer freezing: some modules keep their params and the work that would change them is skipped (Brock 2017).

The option `freeze` names modules of the model, such as "embedding,layers.0,layers.1". Their params need no
gradients, so the backward pass stops at the first trainable module, and the optimizer does not see them. They run in
evaluation mode: no dropout, and norms use their running statistics.

The output of a frozen prefix of the model is constant for an example. It is cached in host memory, up to
`freeze_cache_mib`, and reused when the example comes again. An example whose input has changed, because it was
shifted or other tokens were masked, is computed again. Nothing is cached where processes communicate within the
prefix (tp, cp, ep, zero 2 or 3): their cache misses would differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from models.pretrain.data.batches import Batch
from models.pretrain.parallel.model.stage import Stage
from models.pretrain.params import unwrapped_name
from models.pretrain.plan import ParallelPlan, PlanError
from models.pretrain.training import TrainingOptions
from models.zoo.layout import Layout

if TYPE_CHECKING:
    from models.pretrain.forward_backward import Pass

Outputs = tuple[torch.Tensor, ...]
"""The output of a module for a batch: one tensor or several."""


class Frozen(Stage):
    """A model whose first `prefix_length` modules are frozen, with a cache of the prefix's outputs.

    Attributes:
        forwards: examples that went through the prefix.
        rows: numbers of the examples in the next passes.
    """

    def __init__(self, whole: nn.Module, names: Sequence[str], prefix_length: int, cache_bytes: int) -> None:
        super().__init__(whole, names)
        self.prefix_length, self.free_bytes = prefix_length, cache_bytes
        self.forwards = 0
        self._cache: dict[int, tuple[torch.Tensor, Outputs]] = {}
        self.rows: list[int] = []

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        (x,) = inputs
        with torch.no_grad():
            outputs = self._prefix(x)
        rest = self.names[self.prefix_length :]
        logits: torch.Tensor = self.through(rest, outputs if len(outputs) > 1 else outputs[0])
        return logits

    def _prefix(self, x: torch.Tensor) -> Outputs:
        rows, self.rows = self.rows[: len(x)], self.rows[len(x) :]
        if len(rows) < len(x) or not (self.free_bytes or self._cache):
            return self._compute(x)
        host = x.cpu()
        outputs = [self._cached(row, mine) for row, mine in zip(rows, host, strict=True)]
        missing = [index for index, cached in enumerate(outputs) if cached is None]
        if missing:
            fresh = self._compute(x if len(missing) == len(x) else x[torch.tensor(missing, device=x.device)])
            self._store([rows[index] for index in missing], host[missing], fresh)
            if len(missing) == len(x):
                return fresh
            for index, computed in zip(missing, _by_row(fresh), strict=True):
                outputs[index] = computed
        columns = zip(*(output for output in outputs if output is not None), strict=True)
        return tuple(torch.stack(column).to(x.device, non_blocking=True) for column in columns)

    def _compute(self, x: torch.Tensor) -> Outputs:
        self.forwards += len(x)
        h = self.through(self.names[: self.prefix_length], x)
        return tuple(h) if isinstance(h, tuple) else (h,)

    def _cached(self, row: int, x: torch.Tensor) -> Outputs | None:
        before, outputs = self._cache.get(row, (None, None))
        return outputs if before is not None and torch.equal(before, x) else None

    def _store(self, rows: Sequence[int], x: torch.Tensor, fresh: Outputs) -> None:
        for row, before, after in zip(rows, x, _by_row(fresh), strict=True):
            size = before.nbytes + sum(tensor.nbytes for tensor in after)
            if row in self._cache or size <= self.free_bytes:
                self.free_bytes -= 0 if row in self._cache else size
                self._cache[row] = (before.clone(), tuple(tensor.clone() for tensor in after))


def _by_row(outputs: Outputs) -> list[Outputs]:
    """The outputs of every example, in host memory."""
    return list(zip(*(tensor.cpu() for tensor in outputs), strict=True))


def freeze(
    module: nn.Module, layout: Layout | None, options: TrainingOptions, plan: ParallelPlan
) -> nn.Module:
    """Freezes the modules of `module` that `options` name; returns a `Frozen` model where that saves forward passes.

    Raises:
        PlanError: no such module, nothing left to train, or a plan with stages.
    """
    names = _names(options)
    if not names:
        return module
    known = dict(module.named_modules())
    if unknown := [name for name in names if name not in known]:
        near = ", ".join(path for path in known if path and path.count(".") <= 1)
        raise PlanError(
            f"options.freeze names {unknown[0]!r}, which is no module of this model; it has {near}"
        )
    if plan.pp > 1:
        raise PlanError(f"plan {plan}: pp and freeze: a frozen stage has no gradients to send back")
    for name in names:
        module.get_submodule(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise PlanError(f"options.freeze is {options.freeze!r}: nothing is left to train")
    order = layout.sequence(module) if layout is not None else []
    prefix_length = len(list(itertools.takewhile(names.__contains__, order)))
    communicates = plan.tp > 1 or plan.cp > 1 or plan.ep > 1 or plan.zero >= 2
    looks_at_tokens = (
        layout is not None and layout.documents
    )  # later modules too, so their input is not all they need
    if not prefix_length or communicates or looks_at_tokens or not options.freeze_cache_mib:
        return module
    return Frozen(module, order, prefix_length, options.freeze_cache_mib * 2**20)


def set_eval_mode(parts: Sequence[nn.Module], options: TrainingOptions) -> None:
    """Puts the frozen modules in evaluation mode; call it after anything that puts `parts` in training mode."""
    names = _names(options)
    for part in parts:
        for path, module in part.named_modules():
            if unwrapped_name(path) in names:
                module.eval()


def track_rows(parts: Sequence[nn.Module], run: Pass) -> Pass:
    """Wraps `run` so that a frozen model knows which examples it processes."""
    models = [module for part in parts for module in part.modules() if isinstance(module, Frozen)]
    if not models:
        return run
    (frozen,) = models

    def tracked(batch: Batch) -> torch.Tensor:
        frozen.rows = list(batch.rows)
        return run(batch)

    return tracked


def _names(options: TrainingOptions) -> list[str]:
    return [name for name in (part.strip() for part in options.freeze.split(",")) if name]
