"""Layer freezing: some modules keep their params, and the work that would change them is left out (Brock 2017).

`freeze` of the options names modules of the model, such as "embedding,layers.0,layers.1". Their params need no
gradients, so that the backward pass ends after the last module before which all is frozen; the optimizer does not know
of them. They run as in evaluation: without dropout, and norms by their running means.

What a frozen beginning of the model gives for an example never changes, so it is kept, up to `freeze_cache_mib` in
host memory, and its forward pass is left out as well when the example comes again. An example whose input has changed
meanwhile, because it is moved or hides other tokens, is computed again. Nothing is kept where the processes exchange
something within the beginning (tp, cp, ep, zero of 2 or 3): they would not miss the same examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from models.pretrain.data.batches import Batch
from models.pretrain.parallelize import Stage, whole_name
from models.pretrain.plan import ParallelPlan, PlanError
from models.pretrain.training import Options
from models.zoo.layout import Layout

if TYPE_CHECKING:
    from models.pretrain.passes import Pass


class Frozen(Stage):
    """A model of which the first `beginning` modules of its order are frozen, and what they gave for examples.

    Attributes:
        forwards: examples that went through the beginning.
    """

    def __init__(self, whole: nn.Module, names: Sequence[str], beginning: int, cache_bytes: int) -> None:
        super().__init__(whole, names)
        self.beginning, self.left_bytes = beginning, cache_bytes
        self.forwards = 0
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: list[int] = []

    def expect(self, rows: Sequence[int]) -> None:
        """The examples that the next passes are over, by number."""
        self._rows = list(rows)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        (x,) = inputs
        with torch.no_grad():
            h = self._begin(x)
        for name in self.names[self.beginning :]:
            h = self.get_submodule(name)(h)
        return h

    def _begin(self, x: torch.Tensor) -> torch.Tensor:
        rows, self._rows = self._rows[: len(x)], self._rows[len(x) :]
        if len(rows) < len(x) or not (self.left_bytes or self._kept):
            return self._computed(x)
        host = x.cpu()
        found = [self._found(row, mine) for row, mine in zip(rows, host, strict=True)]
        missing = [place for place, h in enumerate(found) if h is None]
        if missing:
            fresh = self._computed(x if len(missing) == len(x) else x[torch.tensor(missing, device=x.device)])
            if len(missing) == len(x):
                self._keep(rows, host, fresh)
                return fresh
            self._keep([rows[place] for place in missing], host[missing], fresh)
            for place, h in zip(missing, fresh, strict=True):
                found[place] = h.cpu()
        return torch.stack([h for h in found if h is not None]).to(x.device, non_blocking=True)

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += len(x)
        h = x
        for name in self.names[: self.beginning]:
            h = self.get_submodule(name)(h)
        return h

    def _found(self, row: int, x: torch.Tensor) -> torch.Tensor | None:
        before, h = self._kept.get(row, (None, None))
        return h if before is not None and torch.equal(before, x) else None

    def _keep(self, rows: Sequence[int], x: torch.Tensor, h: torch.Tensor) -> None:
        for row, before, after in zip(rows, x, h.cpu(), strict=True):
            size = before.nbytes + after.nbytes
            if row in self._kept or size <= self.left_bytes:
                self.left_bytes -= 0 if row in self._kept else size
                self._kept[row] = (before.clone(), after.clone())


def freeze(module: nn.Module, layout: Layout | None, options: Options, plan: ParallelPlan) -> nn.Module:
    """`module` with the modules frozen that `options` name, as a `Frozen` one where that saves forward passes.

    Raises:
        PlanError: there is no such module, nothing would be left to train, or the plan has stages.
    """
    named = _named(module, options)
    if not named:
        return module
    if plan.pp > 1:
        raise PlanError(f"plan {plan}: pp and freeze: a frozen stage has no gradients to send back")
    for name in named:
        module.get_submodule(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise PlanError(f"options.freeze is {options.freeze!r}: nothing is left to train")
    order = layout.sequence(module) if layout is not None else []
    beginning = 0
    while beginning < len(order) and order[beginning] in named:
        beginning += 1
    exchanging = plan.tp > 1 or plan.cp > 1 or plan.ep > 1 or plan.zero >= 2
    if not beginning or exchanging or not options.freeze_cache_mib:
        return module
    return Frozen(module, order, beginning, options.freeze_cache_mib * 2**20)


def settle(parts: Sequence[nn.Module], options: Options) -> None:
    """Has frozen modules run as in evaluation; after whatever puts `parts` in training mode."""
    named = _names(options)
    for part in parts:
        for path, module in part.named_modules():
            if whole_name(path) in named:
                module.eval()


def told(parts: Sequence[nn.Module], run: Pass) -> Pass:
    """`run`, which tells a frozen model which examples it sees."""
    found = [module for part in parts for module in part.modules() if isinstance(module, Frozen)]
    if not found:
        return run
    (frozen,) = found

    def telling(batch: Batch) -> torch.Tensor:
        frozen.expect(batch.rows)
        return run(batch)

    return telling


def _named(module: nn.Module, options: Options) -> list[str]:
    known = dict(module.named_modules())
    names = _names(options)
    for name in names:
        if name not in known:
            near = ", ".join(path for path in known if path and path.count(".") <= 1)
            raise PlanError(f"options.freeze names {name!r}, which is no module of this model; it has {near}")
    return names


def _names(options: Options) -> list[str]:
    return [name for name in (part.strip() for part in options.freeze.split(",")) if name]
