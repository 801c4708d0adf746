"""Params: named float32 tensors, the only form of a model outside a framework; in memory, or lazy on disk.

Keys are PyTorch `state_dict` keys, the layout is PyTorch's, dtype float32, C order. Every runtime converts
to and from this form at its own boundary; aggregation, the wire and the disk use nothing else.

A set of tensors is a `Mapping` from names to arrays. If the arrays are on disk it is a `LazyTensors`, and so is
anything computed from it (`elementwise`, `add`, `select`): nothing is read before the result is, and then only one
piece at a time, so tensors may be larger than memory. Results of arrays in memory are computed immediately. The
arithmetic is the same, value by value in the same order, so both give the same bits.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, overload

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
Params = dict[str, FloatArray]
Tensors = Mapping[str, FloatArray]
"""Read-only params; they may be on disk and loaded one tensor at a time."""


class ShapeMismatch(ValueError):
    """Two sets of named tensors differ in names or shapes; the message names the first difference."""


def require_same_shapes(actual: Mapping[str, FloatArray], expected: Mapping[str, FloatArray]) -> None:
    """Checks that both hold the same names with the same shapes.

    Raises:
        ShapeMismatch: naming the first tensor, in sorted order, that is missing, extra or of another shape.
    """
    for name in sorted(set(actual) | set(expected)):
        if name not in actual:
            raise ShapeMismatch(f"tensor {name!r} is missing, expected shape {expected[name].shape}")
        if name not in expected:
            raise ShapeMismatch(f"tensor {name!r} is not one of {sorted(expected)}")
        if actual[name].shape != expected[name].shape:
            raise ShapeMismatch(f"tensor {name!r} is {actual[name].shape}, expected {expected[name].shape}")


def zeros_like(params: Mapping[str, FloatArray]) -> Params:
    """Float32 zeros with the names and shapes of `params`."""
    return {name: np.zeros(value.shape, np.float32) for name, value in params.items()}


def difference(trained: Mapping[str, FloatArray], base: Mapping[str, FloatArray]) -> Params:
    """`trained - base`, float32, over the names of `trained`."""
    # `asarray`, because numpy's arithmetic on zero-dimensional arrays returns scalars.
    return {name: np.asarray(value - base[name], np.float32) for name, value in trained.items()}


PIECE = 2**18
"""Values in a piece: two megabytes in float64, which a processor's cache holds."""

Entries = Mapping[str, tuple[Tensors, str]]
"""Tensor name -> the set that holds the tensor, and its name there."""


class NotFinite(ValueError):
    """The tensor called `name` holds NaN or infinity."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} holds NaN or infinity")
        self.name = name


class LazyTensors(Mapping[str, FloatArray]):
    """Tensors of known names and shapes whose values are read piece by piece. `self[name]` loads a complete tensor."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor; reads no values."""

    @abstractmethod
    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        """Values [start, stop) of one tensor in C order, flattened. Do not change them in place."""

    def __contains__(self, name: object) -> bool:
        return any(name == known for known in self)  # Mapping's own method would read the tensor

    def __getitem__(self, name: str) -> FloatArray:
        shape = self.shape(name)
        size = math.prod(shape)
        if size <= PIECE:
            return self.piece(name, 0, size).reshape(shape)
        tensor: FloatArray | None = None
        for start, stop in spans(size):
            values = self.piece(name, start, stop)
            tensor = np.empty(size, values.dtype) if tensor is None else tensor
            tensor[start:stop] = values
        assert tensor is not None  # there was more than one piece
        return tensor.reshape(shape)


def spans(size: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each piece of a tensor of `size` values."""
    return ((start, min(start + PIECE, size)) for start in range(0, size, PIECE))


def shape_of(tensors: Tensors, name: str) -> tuple[int, ...]:
    """The shape of one tensor; reads no values."""
    return tensors.shape(name) if isinstance(tensors, LazyTensors) else tensors[name].shape


def piece_of(tensors: Tensors, name: str, start: int, stop: int) -> FloatArray:
    """Values [start, stop) of one tensor in C order, flattened."""
    if isinstance(tensors, LazyTensors):
        return tensors.piece(name, start, stop)
    return tensors[name].reshape(-1)[start:stop]


def pieces_of(tensors: Tensors, name: str) -> Iterator[FloatArray]:
    """All values of one tensor, piece by piece."""
    for start, stop in spans(math.prod(shape_of(tensors, name))):
        yield piece_of(tensors, name, start, stop)


def copy_into(target: FloatArray, tensors: Tensors, name: str) -> None:
    """Copies one tensor into an array of its shape, with no more than one further piece in memory."""
    if not isinstance(tensors, LazyTensors) or not target.flags.c_contiguous:
        np.copyto(target, tensors[name])
        return
    if target.shape != tensors.shape(name):
        raise ValueError(f"tensor {name!r} is {tensors.shape(name)}, expected {target.shape}")
    flat = target.reshape(-1)
    for start, stop in spans(flat.size):
        flat[start:stop] = tensors.piece(name, start, stop)


def materialize(tensors: Tensors) -> Params:
    """Reads or computes the tensors now."""
    return tensors if isinstance(tensors, dict) else dict(tensors)


def l2_norm(tensors: Tensors) -> float:
    """The L2 norm over all tensors, in float64, which float32 values cannot overflow; inf or NaN if any value is."""
    squares = (
        float(np.sum(np.square(piece, dtype=np.float64)))
        for name in tensors
        for piece in pieces_of(tensors, name)
    )
    return math.sqrt(sum(squares))


def require_finite(tensors: Tensors, names: Iterable[str]) -> None:
    """Reads the named tensors.

    Raises:
        NotFinite: naming the first tensor that holds NaN or infinity.
    """
    for name in names:
        for piece in pieces_of(tensors, name):
            _require_finite(name, piece)


def guard_finite(tensors: Tensors, names: Collection[str]) -> Tensors:
    """The same tensors, with those named checked: now, or, if they are lazy, as they are read.

    Raises:
        NotFinite: as `require_finite`, now or when the result is read.
    """
    if isinstance(tensors, LazyTensors):
        return _Guarded(tensors, names)
    require_finite(tensors, names)
    return tensors


def elementwise(function: Callable[..., FloatArray], *sources: Tensors) -> Tensors:
    """Applies `function` to the values of equal name and position in `sources`; the names are those of the first.

    It receives arrays of one shape, complete tensors or pieces, and must return a new array of that shape, each value
    of which depends only on its own position.
    """
    if _any_lazy(sources):
        return _Elementwise(function, sources)
    # `asarray`, because numpy's arithmetic on zero-dimensional arrays returns scalars.
    return {name: np.asarray(function(*(source[name] for source in sources))) for name in sources[0]}


def cache_last_piece(tensors: Tensors) -> Tensors:
    """The same tensors with the last piece read kept, for two results that are computed side by side."""
    return _LastPieceCached(tensors) if isinstance(tensors, LazyTensors) else tensors


def add(total: Tensors, term: Tensors) -> Tensors:
    """`total + term`."""
    if not _any_lazy((total, term)):
        return elementwise(np.add, total, term)
    return _Sum((*total.terms, term) if isinstance(total, _Sum) else (total, term))


def select(entries: Entries) -> Tensors:
    """Tensors from one or several sets under new names."""
    if _any_lazy([source for source, _ in entries.values()]):
        return _Selected(entries)
    return {name: source[source_name] for name, (source, source_name) in entries.items()}


def overlay(tensors: Tensors, replacements: Tensors) -> Tensors:
    """`tensors`, with those in `replacements` replaced."""
    replaced = set(replacements)
    return select({name: (replacements if name in replaced else tensors, name) for name in tensors})


def _require_finite(name: str, values: FloatArray) -> None:
    if not np.isfinite(values).all():
        raise NotFinite(name)


def _any_lazy(sources: Sequence[Tensors]) -> bool:
    # `isinstance` of an abstract class takes longer than the arithmetic on a small tensor.
    return any(type(source) is not dict and isinstance(source, LazyTensors) for source in sources)


class _Derived(LazyTensors):
    """Tensors with the names and shapes of `template`."""

    def __init__(self, template: Tensors) -> None:
        self._template = template

    def __iter__(self) -> Iterator[str]:
        return iter(self._template)

    def __len__(self) -> int:
        return len(self._template)

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self._template, name)


class _Elementwise(_Derived):
    def __init__(self, function: Callable[..., FloatArray], sources: tuple[Tensors, ...]) -> None:
        super().__init__(sources[0])
        self._function = function
        self._sources = sources

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        return self._function(*(piece_of(source, name, start, stop) for source in self._sources))


class _LastPieceCached(_Derived):
    def __init__(self, source: LazyTensors) -> None:
        super().__init__(source)
        self._last: tuple[tuple[str, int, int], FloatArray] | None = None

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        last, key = self._last, (name, start, stop)
        if last is None or last[0] != key:
            last = self._last = (key, piece_of(self._template, name, start, stop))
        return last[1]


class _Sum(_Derived):
    """Terms added in order; a flat tuple, because a cohort of thousands nested in pairs would recurse too deeply."""

    def __init__(self, terms: tuple[Tensors, ...]) -> None:
        super().__init__(terms[0])
        self.terms = terms

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        values = (piece_of(term, name, start, stop) for term in self.terms)
        total: FloatArray = reduce(np.add, values)
        return total


class _Guarded(_Derived):
    def __init__(self, source: Tensors, names: Collection[str]) -> None:
        super().__init__(source)
        self._names = frozenset(names)

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        values = piece_of(self._template, name, start, stop)
        if name in self._names:
            _require_finite(name, values)
        return values


class _Selected(LazyTensors):
    def __init__(self, entries: Entries) -> None:
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> FloatArray:
        source, source_name = self._entries[name]
        return source[source_name]

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(*self._entries[name])

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        return piece_of(*self._entries[name], start, stop)


JsonValue = str | int | float | bool | None


@dataclass(frozen=True)
class State:
    """A strategy's state between rounds, which checkpoints like params.

    Arrays are named `<part>/<tensor>`, such as `momentum/fc.weight`; `values` are JSON scalars.
    """

    arrays: Tensors = field(default_factory=dict)
    values: Mapping[str, JsonValue] = field(default_factory=dict)


@overload
def subtree(arrays: Params, part: str) -> Params: ...
@overload
def subtree(arrays: Tensors, part: str) -> Tensors: ...
def subtree(arrays: Tensors, part: str) -> Tensors:
    """The tensors of one part, without its prefix."""
    prefix = part + "/"
    return select({name[len(prefix) :]: (arrays, name) for name in arrays if name.startswith(prefix)})


def flatten(parts: Mapping[str, Tensors]) -> Tensors:
    """Several parts as one set of tensors: `{"part": {"w": a}}` becomes `{"part/w": a}`."""
    return select({f"{part}/{name}": (tensors, name) for part, tensors in parts.items() for name in tensors})


@overload
def unflatten(arrays: Params) -> dict[str, Params]: ...
@overload
def unflatten(arrays: Tensors) -> dict[str, Tensors]: ...
def unflatten(arrays: Tensors) -> Mapping[str, Tensors]:
    """The inverse of `flatten`, parts in sorted order."""
    return {part: subtree(arrays, part) for part in sorted({name.split("/", 1)[0] for name in arrays})}
