"""Low-rank factorisation: replaces a layer by two thinner ones, from the largest singular values of its weights.

A Linear [out, in] of rank r becomes in -> r without bias and r -> out. A convolution is the matrix [out, in·k·k]: it becomes one with
the full kernel to r channels and a 1x1 after it (Jaderberg 2014, section 2; Zhang 2016, equation 4). Truncating the singular value
decomposition is the best approximation of that rank (Eckart and Young 1936). The weights shrink where r · (out + in·k·k) <
out · in·k·k, which is the break-even. Factors are dense: zeros of an earlier pruning are lost, so factorise first.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from models.compress import report
from models.compress.pruning import sparsity
from models.compress.pruning.structure import Convolution, fit
from models.compress.step import Context, Data, StepModel, StepRefused
from models.compress.tuning import Tuning, labelled_rows, named_layers, own_loss, tune
from models.options import bounded
from models.pretrain.params import copy_into


@dataclass(frozen=True)
class LowRankOptions(Tuning):
    """Options of the factorisation; those of `Tuning` are for the fine-tuning afterwards, and layers in `freeze` are not factorised.

    Attributes:
        energy: share of the squared singular values of a layer that its rank keeps; 1 keeps all that are not zero.
        rank: the largest rank of any layer; 0: by `energy` alone.
        only_where_smaller: do not factorise layers whose two factors would hold more weights.
        keep: layers that are not factorised: names separated by commas.
    """

    epochs: int = bounded(5, 0, 100_000)
    energy: float = bounded(0.9, 0.01, 1.0)
    rank: int = bounded(0, 0, 1_000_000)
    only_where_smaller: bool = True
    keep: str = ""


def factorise(model: StepModel, data: Data, options: LowRankOptions, context: Context) -> StepModel:
    """`model` with layers of low rank replaced by pairs of thin layers, fine-tuned.

    Raises:
        StepRefused: no layer becomes smaller at this rank.
    """
    module = copy.deepcopy(model.module)
    designed = {name for name, _ in model.spec.build(0).named_modules()}  # a factor is not factorised again
    layers: dict[str, dict[str, Any]] = {}
    excluded = (*named_layers(module, options.keep, "keep"), *named_layers(module, options.freeze, "freeze"))
    for name in sparsity.prunable(module, model.spec, excluded):
        layer = module.get_submodule(name)
        if name not in designed or not _factorable(layer):
            continue
        singular = Decomposition.of(layer)
        rank = singular.rank(options.energy)
        rank = min(rank, options.rank) if options.rank else rank
        smaller = rank < singular.break_even
        layers[name] = singular.facts(rank, factorised=smaller or not options.only_where_smaller)
        if smaller or not options.only_where_smaller:
            module.set_submodule(name, singular.factors(rank))
    _require_any(layers, model, options)

    tune(
        module,
        labelled_rows(data),
        options,
        context.rng(),
        own_loss(model.spec),
        on_epoch=context.report_epochs(stage="lowrank"),
    )
    facts = {
        "layers": layers,
        "parameters": {"before": report.parameters(model.module), "after": report.parameters(module)},
        "macs": {"before": report.macs(model.module, model.spec), "after": report.macs(module, model.spec)},
    }
    return StepModel(model.spec, module, facts=facts)


@dataclass(frozen=True)
class Decomposition:
    """The singular value decomposition of a layer's weights as a matrix [out, in·k·k]: left [out, n], values [n] from large to small, right [n, in·k·k]."""

    layer: nn.Linear | Convolution
    left: torch.Tensor
    values: torch.Tensor
    right: torch.Tensor

    @classmethod
    def of(cls, layer: nn.Linear | Convolution) -> Decomposition:
        matrix = layer.weight.detach().flatten(1).double()  # so that the full rank restores the weights
        return cls(layer, *torch.linalg.svd(matrix, full_matrices=False))

    @property
    def break_even(self) -> int:
        """The smallest rank that saves nothing."""
        rows, columns = len(self.left), self.right.shape[1]
        return -(-rows * columns // (rows + columns))

    def energy_kept(self, rank: int) -> float:
        """Share of the squared singular values that `rank` keeps."""
        squares = self.values.square()
        return float(squares[:rank].sum() / squares.sum().clamp(min=1e-300))

    def rank(self, energy: float) -> int:
        """The smallest rank, from 1, that keeps `energy`."""
        squares = self.values.square()
        tail = squares.flip(0).cumsum(0).flip(0)  # [r]: the loss at rank r; small values are summed first
        lost = (1 - energy) * float(tail[0])
        return max(1, int((tail > lost).sum()))

    def factors(self, rank: int) -> nn.Module:
        """Two layers that replace one; each has the square root of the singular values."""
        root, weight = self.values[:rank].sqrt(), self.layer.weight
        first, second = root[:, None] * self.right[:rank], self.left[:, :rank] * root
        params = {
            "0.weight": first.reshape(rank, *weight.shape[1:]).numpy(),
            "1.weight": second.reshape(len(weight), rank, *[1] * (weight.ndim - 2)).numpy(),
        }
        if self.layer.bias is not None:
            params["1.bias"] = self.layer.bias.detach().numpy()
        pair = fit("layer", self.layer, {f"layer.{name}": values for name, values in params.items()})
        copy_into(pair, params)
        return pair.train(self.layer.training)

    def facts(self, rank: int, factorised: bool) -> dict[str, Any]:
        return {
            "rank": rank if factorised else len(self.values),
            "full_rank": len(self.values),
            "break_even": self.break_even,
            "energy": self.energy_kept(rank) if factorised else 1.0,
            "factorised": factorised,
        }


def _factorable(layer: nn.Module) -> TypeGuard[nn.Linear | Convolution]:
    return isinstance(layer, nn.Linear) or (isinstance(layer, Convolution) and layer.groups == 1)


def _require_any(layers: dict[str, dict[str, Any]], model: StepModel, options: LowRankOptions) -> None:
    if any(layer["factorised"] for layer in layers.values()):
        return
    ranks = ", ".join(
        f"{name} (of {layer['full_rank']}, break-even {layer['break_even']})"
        for name, layer in layers.items()
    )
    raise StepRefused(
        f"lowrank makes no layer of {model.spec.name!r} smaller at energy = {options.energy}: {ranks or 'it has no Linear or convolution'}; "
        "lower energy or rank, and fine-tune"
    )
