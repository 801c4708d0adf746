"""Codebook weights: every weight of a tensor is one of 2^bits values, so that storing it takes few bits.

Han, Mao, Dally 2016, "Deep compression", section 3: k-means over the values of each tensor, with equally spaced initial centroids
(section 3.2), then fine-tuning, where the gradient of a centroid is the sum of its weights' gradients (section 3.3, equation 3).
Pruned weights stay zero: one of the values is reserved for zero.

No supported runtime computes with codebooks. The module has ordinary float weights with few distinct values and its `.tflite` is
float32. Codebooks save transport and storage, where a codebook with packed indices, or zlib, replaces the weights.
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

from models.compress.quantization import quantize
from models.compress.step import Context, Data, StepModel
from models.compress.tuning import Tuning, is_within, labelled_rows, named_layers, own_loss, tune
from models.options import bounded
from models.pretrain.params import copy_into, params_of

_ITERATIONS = 50
"""Maximum iterations of k-means; it stops once no value moves to another centroid."""


@dataclass(frozen=True)
class CodebookOptions(Tuning):
    """Options of weight sharing.

    Attributes:
        bits: of an index; a tensor has 2^bits values.
        least_size: tensors with fewer values, and all of one axis, do not change.
        epochs: of fine-tuning the centroids and all other params; 0: none.
        max_accuracy_drop: how far the accuracy on test rows may fall below the original model's, as a fraction.
    """

    bits: int = bounded(4, 1, 8)
    least_size: int = bounded(256, 1, 1_000_000_000)
    epochs: int = bounded(0, 0, 100_000)
    weight_decay: float = bounded(0.0, 0.0, 1e3)
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


@dataclass(frozen=True)
class Codebook:
    """A tensor as codebook and indices. `centroids`: float32 [k]; `indices`: uint8, of the tensor's shape; `bits` of each."""

    centroids: npt.NDArray[np.float32]
    indices: npt.NDArray[np.uint8]
    bits: int

    def values(self) -> npt.NDArray[np.float32]:
        shared: npt.NDArray[np.float32] = self.centroids[self.indices]
        return shared

    def packed(self) -> bytes:
        """The centroids, then the indices with `bits` bits each, most significant bit first."""
        spread = np.unpackbits(self.indices.reshape(-1, 1), axis=1)[:, -self.bits :]
        return self.centroids.tobytes() + np.packbits(spread).tobytes()


def cluster(model: StepModel, data: Data, options: CodebookOptions, context: Context) -> StepModel:
    """`model` with shared weights.

    Raises:
        StepRefused: it loses too much accuracy, its conversion is wrong, or there is no label to fine-tune on.
    """
    before = quantize.to_tflite(model.module, model.spec)
    module, books = share_weights(model, data, options, context)
    tflite, _ = quantize.convert_checked(StepModel(model.spec, module), data.x_test)
    facts = quantize.evaluate(before, tflite, data, "codebook", options.max_accuracy_drop)
    return StepModel(model.spec, module, tflite, "codebook", {**facts, **transport_sizes(module, books)})


def share_weights(
    model: StepModel, data: Data, options: CodebookOptions, context: Context
) -> tuple[nn.Module, dict[str, Codebook]]:
    """A copy of the module with shared weights, fine-tuned if `epochs` is not 0, and their codebooks."""
    books = codebooks(model.module, options)
    context.on_progress({"step": "cluster", "tensors": len(books), "bits": options.bits})
    shared = _SharedWeights(model.module, books)
    if options.epochs and books:
        tune(
            shared,
            labelled_rows(data),
            replace(options, freeze=shared.freeze_names(options.freeze)),
            context.rng(),
            own_loss(model.spec),
            on_epoch=context.report_epochs(epochs=options.epochs),
        )
    return shared.module(), shared.codebooks()


def codebooks(module: nn.Module, options: CodebookOptions) -> dict[str, Codebook]:
    """Name -> codebook of every matrix or kernel that is large enough."""
    return {
        name: codebook(parameter.detach().cpu().numpy(), options.bits)
        for name, parameter in module.named_parameters()
        if parameter.ndim > 1 and parameter.numel() >= options.least_size
    }


def codebook(values: npt.NDArray[np.float32], bits: int) -> Codebook:
    """Lloyd's k-means of the values, with one centroid at zero if any value is zero.

    In one dimension the midpoints between neighbours determine the nearest centroid, so each pass is one binary search.
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
            previous, nearest = nearest, _nearest(rest, centroids)
            if np.array_equal(previous, nearest):
                break
    if zeros.any():
        centroids = np.sort(np.append(centroids, 0.0))
    indices = _nearest(flat, centroids)
    if zeros.any():
        # a small weight may become zero, but zero must stay zero
        indices[zeros] = int(np.flatnonzero(centroids == 0.0)[0])
    return Codebook(centroids.astype(np.float32), indices.astype(np.uint8).reshape(values.shape), bits)


def transport_sizes(module: nn.Module, books: Mapping[str, Codebook]) -> dict[str, Any]:
    """Bytes of the params as codebooks, packed indices and, for params without a codebook, float32.

    `*_zlib_bytes`: the same after zlib, as in transport; it saves as much as Han's Huffman coding.
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


class _SharedWeights(nn.Module):
    """`module` with its clustered weights looked up in trainable centroids."""

    def __init__(self, module: nn.Module, books: Mapping[str, Codebook]) -> None:
        super().__init__()
        self.inner = copy.deepcopy(module)
        self.books = dict(books)
        self.centroids = nn.ParameterDict(
            {
                str(index): nn.Parameter(torch.from_numpy(book.centroids.copy()))
                for index, book in enumerate(books.values())
            }
        )
        self.indices = [torch.from_numpy(book.indices.astype(np.int64)) for book in books.values()]
        self.moving = [torch.from_numpy((book.centroids != 0).astype(np.float32)) for book in books.values()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the looked-up weights replace the inner ones, which get no gradient, so the optimizer skips them
        logits: torch.Tensor = torch.func.functional_call(self.inner, self._weights(), (x,))
        return logits

    def _weights(self) -> dict[str, torch.Tensor]:
        parts = zip(self.books, self.centroids.values(), self.moving, self.indices, strict=True)
        return {name: (centroids * moving)[indices] for name, centroids, moving, indices in parts}

    def freeze_names(self, freeze: str) -> str:
        """The option `freeze` for this module, from one for the original module."""
        layers = named_layers(self.inner, freeze, "freeze")
        shared = [f"centroids.{index}" for index, name in enumerate(self.books) if is_within(name, layers)]
        return ",".join([*(f"inner.{layer}" for layer in layers), *shared])

    def codebooks(self) -> dict[str, Codebook]:
        """The current codebooks."""
        return {
            name: replace(book, centroids=centroids.detach().numpy() * (book.centroids != 0))
            for (name, book), centroids in zip(self.books.items(), self.centroids.values(), strict=True)
        }

    def module(self) -> nn.Module:
        """The original module with the trained values."""
        changed = copy.deepcopy(self.inner)
        copy_into(changed, {name: book.values() for name, book in self.codebooks().items()})
        return changed.eval()


def _nearest(values: npt.NDArray[np.float64], centroids: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Index of the nearest of the ascending `centroids` to each value."""
    return np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values).astype(np.int64)
