"""Tensors larger than what one wants to hold: read, or computed, piece by piece when somebody asks.

A set of tensors is a `Mapping` from names to arrays. Where the arrays lie on disk it is a `LazyTensors`, and
whatever is computed from it is one too (`elementwise`, `summed`, `picked`): nothing is read before the result
is, and then no more than a piece at a time. What is computed from arrays in memory is computed at once. The
arithmetic is the same, value by value in the same order, so both give the same bits.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import reduce

import numpy as np

from strategies.params import FloatArray, Params, Tensors

PIECE = 2**18
"""Values in a piece: two megabytes in float64, which a processor's cache holds."""

Entries = Mapping[str, tuple[Tensors, str]]
"""By a tensor's name: the set that it is taken from, and its name there."""


class NotFinite(ValueError):
    """A tensor holds NaN or infinity where it must not. `name`: which."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} holds NaN or infinity")
        self.name = name


class LazyTensors(Mapping[str, FloatArray]):
    """Tensors of known names and shapes whose values are had piece by piece. `self[name]` holds a whole one."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor; reads no values."""

    @abstractmethod
    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        """Values [start, stop) of one tensor in C order, without its axes. Not to be changed in place."""

    def __contains__(self, name: object) -> bool:
        return any(name == known for known in self)  # Mapping's own would read the tensor

    def __getitem__(self, name: str) -> FloatArray:
        shape = self.shape(name)
        size = math.prod(shape)
        if size <= PIECE:
            return self.piece(name, 0, size).reshape(shape)
        whole: FloatArray | None = None
        for start, stop in spans(size):
            values = self.piece(name, start, stop)
            whole = np.empty(size, values.dtype) if whole is None else whole
            whole[start:stop] = values
        assert whole is not None  # there was more than one piece
        return whole.reshape(shape)


def spans(size: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a tensor of `size` values begin and end."""
    return ((start, min(start + PIECE, size)) for start in range(0, size, PIECE))


def shape_of(tensors: Tensors, name: str) -> tuple[int, ...]:
    """The shape of one tensor; reads no values."""
    return tensors.shape(name) if isinstance(tensors, LazyTensors) else tensors[name].shape


def piece_of(tensors: Tensors, name: str, start: int, stop: int) -> FloatArray:
    """Values [start, stop) of one tensor in C order, without its axes."""
    if isinstance(tensors, LazyTensors):
        return tensors.piece(name, start, stop)
    return tensors[name].reshape(-1)[start:stop]


def pieces_of(tensors: Tensors, name: str) -> Iterator[FloatArray]:
    """All values of one tensor, piece by piece."""
    for start, stop in spans(math.prod(shape_of(tensors, name))):
        yield piece_of(tensors, name, start, stop)


def copy_into(target: FloatArray, tensors: Tensors, name: str) -> None:
    """Copies one tensor into an array of its shape, holding no more than a piece of it besides."""
    if not isinstance(tensors, LazyTensors) or not target.flags.c_contiguous:
        np.copyto(target, tensors[name])
        return
    if target.shape != tensors.shape(name):
        raise ValueError(f"tensor {name!r} is {tensors.shape(name)}, expected {target.shape}")
    flat = target.reshape(-1)
    for start, stop in spans(flat.size):
        flat[start:stop] = tensors.piece(name, start, stop)


def in_memory(tensors: Tensors) -> Params:
    """The tensors, read or computed now."""
    return tensors if isinstance(tensors, dict) else dict(tensors)


def l2_norm(tensors: Tensors) -> float:
    """The L2 norm over all tensors, in float64, which no float32 values overflow; inf or NaN where a value is one."""
    squares = (
        float(np.sum(np.square(piece, dtype=np.float64)))
        for name in tensors
        for piece in pieces_of(tensors, name)
    )
    return math.sqrt(sum(squares))


def require_finite(tensors: Tensors, names: Iterable[str]) -> None:
    """Reads the tensors named.

    Raises:
        NotFinite: naming the first that holds NaN or infinity.
    """
    for name in names:
        for piece in pieces_of(tensors, name):
            _require_numbers(name, piece)


def checked(tensors: Tensors, names: Collection[str]) -> Tensors:
    """The same tensors, of which those named are checked: now, or, where they are lazy, as they are read.

    Raises:
        NotFinite: as `require_finite`, now or from the result when it is read.
    """
    if isinstance(tensors, LazyTensors):
        return _Checked(tensors, names)
    require_finite(tensors, names)
    return tensors


def elementwise(function: Callable[..., FloatArray], *sources: Tensors) -> Tensors:
    """`function` of the values of equal name and place in `sources`; the names are those of the first.

    It is given arrays of one shape, whole ones or pieces, and must return a new one of that shape, each value of
    which depends on its own place.
    """
    if _any_lazy(sources):
        return _Elementwise(function, sources)
    # `asarray`, because numpy's arithmetic on arrays without axes gives scalars.
    return {name: np.asarray(function(*(source[name] for source in sources))) for name in sources[0]}


def remembered(tensors: Tensors) -> Tensors:
    """The same tensors, of which the last piece is kept: for two results that are computed side by side."""
    return _Remembered(tensors) if isinstance(tensors, LazyTensors) else tensors


def summed(total: Tensors, further: Tensors) -> Tensors:
    """`total + further`."""
    if not _any_lazy((total, further)):
        return elementwise(np.add, total, further)
    return _Sum((*total.terms, further) if isinstance(total, _Sum) else (total, further))


def picked(entries: Entries) -> Tensors:
    """Tensors of one or several sets under new names."""
    if any(isinstance(source, LazyTensors) for source, _ in entries.values()):
        return _Picked(entries)
    return {name: source[known] for name, (source, known) in entries.items()}


def overlaid(tensors: Tensors, over: Tensors) -> Tensors:
    """`tensors` with those in `over` in place of their own."""
    replaced = set(over)
    return picked({name: (over if name in replaced else tensors, name) for name in tensors})


def _require_numbers(name: str, values: FloatArray) -> None:
    if not np.isfinite(values).all():
        raise NotFinite(name)


def _any_lazy(sources: tuple[Tensors, ...]) -> bool:
    return any(isinstance(source, LazyTensors) for source in sources)


class _Elementwise(LazyTensors):
    def __init__(self, function: Callable[..., FloatArray], sources: tuple[Tensors, ...]) -> None:
        self._function = function
        self._sources = sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources[0])

    def __len__(self) -> int:
        return len(self._sources[0])

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self._sources[0], name)

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        return self._function(*(piece_of(source, name, start, stop) for source in self._sources))


class _Remembered(LazyTensors):
    def __init__(self, source: LazyTensors) -> None:
        self._source = source
        self._last: tuple[tuple[str, int, int], FloatArray] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        last, asked = self._last, (name, start, stop)
        if last is None or last[0] != asked:
            last = self._last = (asked, self._source.piece(name, start, stop))
        return last[1]


class _Sum(LazyTensors):
    """Terms added one after the other; a list, because a cohort of thousands nested in pairs would be too deep."""

    def __init__(self, terms: tuple[Tensors, ...]) -> None:
        self.terms = terms

    def __iter__(self) -> Iterator[str]:
        return iter(self.terms[0])

    def __len__(self) -> int:
        return len(self.terms[0])

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self.terms[0], name)

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        values = (piece_of(term, name, start, stop) for term in self.terms)
        total: FloatArray = reduce(np.add, values)
        return total


class _Checked(LazyTensors):
    def __init__(self, source: Tensors, names: Collection[str]) -> None:
        self._source = source
        self._names = frozenset(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self._source, name)

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        values = piece_of(self._source, name, start, stop)
        if name in self._names:
            _require_numbers(name, values)
        return values


class _Picked(LazyTensors):
    def __init__(self, entries: Entries) -> None:
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> FloatArray:
        source, known = self._entries[name]
        return source[known]

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(*self._entries[name])

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        return piece_of(*self._entries[name], start, stop)
