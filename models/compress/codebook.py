"""Codebook weights: every weight of a tensor is one of 2^bits values, so that a file of them needs few bits a weight.

Han, Mao, Dally 2016, "Deep compression", section 3: k-means over the values of each tensor, centroids begun at equal distances
(section 3.2), then fine-tuned, the gradient of a centroid being the sum of its weights' (section 3.3, equation 3).
Weights that are zero, because they were pruned, stay zero: one of the values is reserved for it.

No runtime of ours computes with codebooks. The module has ordinary float weights of few different values and its `.tflite` is
float32; what is saved is transport and storage, where a codebook and packed indices, or zlib, take the place of the weights.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from models.compress import quantize
from models.compress.step import Context, Data, Model
from models.compress.tuning import Tuning, labelled, named_layers, tune, within
from models.options import bounded
from models.pretrain.params import params_of

_ITERATIONS = 50
"""Of k-means; it stops before, once no value moves to another centroid."""


@dataclass(frozen=True)
class Options(Tuning):
    """How to share weights.

    Attributes:
        bits: of an index; there are 2^bits values a tensor.
        least_size: tensors with fewer values, and all of one axis, are left as they are.
        epochs: of fine-tuning the centroids, and whatever else is learnt; 0: none.
        max_accuracy_drop: how far below the model given the accuracy on test rows may fall, as a fraction.
    """

    bits: int = bounded(4, 1, 8)
    least_size: int = bounded(256, 1, 1_000_000_000)
    epochs: int = bounded(0, 0, 100_000)
    weight_decay: float = bounded(0.0, 0.0, 1e3)
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


@dataclass(frozen=True)
class Codebook:
    """A tensor by its values. `centroids`: float32 [k], rising; `indices`: uint8, of the tensor's shape; `bits` of each."""

    centroids: npt.NDArray[np.float32]
    indices: npt.NDArray[np.uint8]
    bits: int

    def values(self) -> npt.NDArray[np.float32]:
        shared: npt.NDArray[np.float32] = self.centroids[self.indices]
        return shared

    def packed(self) -> bytes:
        """The centroids, then the indices, `bits` each, the highest bit first."""
        spread = np.unpackbits(self.indices.reshape(-1, 1), axis=1)[:, -self.bits :]
        return self.centroids.tobytes() + np.packbits(spread).tobytes()


def cluster(model: Model, data: Data, options: Options, context: Context) -> Model:
    """`model` with shared weights.

    Raises:
        StepRefused: it is too inaccurate so, its conversion is wrong, or there is no label to fine-tune by.
    """
    before = quantize.converted(model.module, model.spec)
    module, books = shared(model, data, options, context)
    tflite, _ = quantize.faithful(Model(model.spec, module), data.x_test)
    facts = quantize.gated(before, tflite, data, "codebook", options.max_accuracy_drop)
    return Model(model.spec, module, tflite, "codebook", {**facts, **transport(module, books)})


def shared(
    model: Model, data: Data, options: Options, context: Context
) -> tuple[nn.Module, dict[str, Codebook]]:
    """A copy of the module with shared weights, fine-tuned if asked, and their codebooks."""
    books = codebooks(model.module, options)
    context.tell({"step": "cluster", "tensors": len(books), "bits": options.bits})
    looked_up = _Shared(model.module, books)
    if options.epochs and books:
        rows = labelled(data)
        tune(
            looked_up,
            rows.x,
            rows.y,
            replace(options, freeze=looked_up.names(options.freeze)),
            context.rng(),
            lambda module, x, y: model.spec.loss(module(x), y),
            on_epoch=lambda epoch, loss: context.tell(
                {"epoch": epoch, "epochs": options.epochs, "loss": loss}
            ),
        )
    return looked_up.whole(), looked_up.learnt()


def codebooks(module: nn.Module, options: Options) -> dict[str, Codebook]:
    """Name -> codebook of every matrix or kernel that is large enough."""
    return {
        name: codebook(parameter.detach().cpu().numpy(), options.bits)
        for name, parameter in module.named_parameters()
        if parameter.ndim > 1 and parameter.numel() >= options.least_size
    }


def codebook(values: npt.NDArray[np.float32], bits: int) -> Codebook:
    """Lloyd's k-means of the values, one of the centroids at zero where some of them are zero.

    Among numbers on a line the nearest centroid is told by the midpoints between neighbours, so a pass is one search.
    """
    flat = values.reshape(-1).astype(np.float64)
    zeros = flat == 0.0
    rest = flat[~zeros]
    count = 2**bits - (1 if zeros.any() else 0)
    distinct = np.unique(rest)
    if len(distinct) <= count:
        centroids = distinct
    else:
        centroids = np.linspace(distinct[0], distinct[-1], count)
        nearest = _nearest(rest, centroids)
        for _ in range(_ITERATIONS):
            sizes = np.bincount(nearest, minlength=count)
            sums = np.bincount(nearest, weights=rest, minlength=count)
            centroids = np.where(sizes > 0, sums / np.maximum(sizes, 1), centroids)
            centroids.sort()
            moved, nearest = nearest, _nearest(rest, centroids)
            if np.array_equal(moved, nearest):
                break
    if zeros.any():
        centroids = np.sort(np.append(centroids, 0.0))
    indices = _nearest(flat, centroids)
    if zeros.any():
        # a small weight may round to zero, but no zero may become a weight
        indices[zeros] = int(np.flatnonzero(centroids == 0.0)[0])
    return Codebook(centroids.astype(np.float32), indices.astype(np.uint8).reshape(values.shape), bits)


def transport(module: nn.Module, books: Mapping[str, Codebook]) -> dict[str, Any]:
    """Bytes of the params as codebooks, packed indices and, of what has no codebook, float32.

    `*_zlib_bytes`: the same through zlib, as a file on its way would be; it finds what Han's Huffman coding does.
    """
    packed = b"".join(book.packed() for book in books.values())
    params = params_of(module)
    plain = b"".join(values.tobytes() for name, values in params.items() if name not in books)
    everything = b"".join(values.tobytes() for values in params.values())
    return {
        "codebook_bytes": sum(book.centroids.nbytes for book in books.values()),
        "index_bytes": len(packed) - sum(book.centroids.nbytes for book in books.values()),
        "other_bytes": len(plain),
        "transport_bytes": len(packed) + len(plain),
        "transport_zlib_bytes": len(zlib.compress(packed + plain, 9)),
        "params_bytes": len(everything),
        "params_zlib_bytes": len(zlib.compress(everything, 9)),
        "values": {name: len(book.centroids) for name, book in books.items()},
    }


class _Shared(nn.Module):
    """`module` with its clustered weights looked up in centroids, which are what is learnt of them."""

    def __init__(self, module: nn.Module, books: Mapping[str, Codebook]) -> None:
        super().__init__()
        self.inner = copy.deepcopy(module)
        self.books = dict(books)
        self.centroids = nn.ParameterDict(
            {
                str(place): nn.Parameter(torch.from_numpy(book.centroids.copy()))
                for place, book in enumerate(books.values())
            }
        )
        self.indices = [torch.from_numpy(book.indices.astype(np.int64)) for book in books.values()]
        self.moving = [torch.from_numpy((book.centroids != 0).astype(np.float32)) for book in books.values()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the inner weights are replaced by what is looked up, so they have no gradient and the optimizer passes over them
        logits: torch.Tensor = torch.func.functional_call(self.inner, self._weights(), (x,))
        return logits

    def _weights(self) -> dict[str, torch.Tensor]:
        parts = zip(self.books, self.centroids.values(), self.moving, self.indices, strict=True)
        return {name: (centroids * moving)[indices] for name, centroids, moving, indices in parts}

    def names(self, freeze: str) -> str:
        """`freeze`, said of the module's layers, of ours."""
        layers = named_layers(self.inner, freeze, "freeze")
        looked_up = [f"centroids.{place}" for place, name in enumerate(self.books) if within(name, layers)]
        return ",".join([*(f"inner.{layer}" for layer in layers), *looked_up])

    def learnt(self) -> dict[str, Codebook]:
        """The codebooks as they are now."""
        found = {}
        for (name, book), centroids in zip(self.books.items(), self.centroids.values(), strict=True):
            values = centroids.detach().numpy() * (book.centroids != 0)
            order = np.argsort(values, kind="stable")
            ranks = np.empty_like(order)
            ranks[order] = np.arange(len(order))
            indices = ranks[book.indices].astype(np.uint8)
            found[name] = Codebook(values[order].astype(np.float32), indices, book.bits)
        return found

    def whole(self) -> nn.Module:
        """The module with the learnt values in place."""
        return _with_values(self.inner, {name: book.values() for name, book in self.learnt().items()})


def _with_values(module: nn.Module, values: Mapping[str, npt.NDArray[np.float32]]) -> nn.Module:
    changed = copy.deepcopy(module)
    parameters = dict(changed.named_parameters())
    with torch.no_grad():
        for name, array in values.items():
            parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))
    return changed.eval()


def _nearest(values: npt.NDArray[np.float64], centroids: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Index of the nearest of the rising `centroids` to each value."""
    return np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values).astype(np.int64)
