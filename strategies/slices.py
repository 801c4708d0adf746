"""Slices of params: the leading part of every tensor along all of its axes, which is what a narrower model has of a wider one.

Tensors on disk are sliced one at a time, when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from strategies.params import FloatArray, LazyTensors, Tensors, select, shape_of

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""


class NotASlice(ValueError):
    """A shape is not that of a leading part; the message names the tensor."""


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor; reads no values."""
    return {name: shape_of(tensors, name) for name in tensors}


def corner(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of the leading part of this shape."""
    return tuple(slice(size) for size in shape)


def require_slices(shapes: Shapes, whole: Shapes) -> None:
    """Checks that each shape is that of a leading part of the tensor of its name.

    Raises:
        NotASlice: naming the first tensor that `whole` lacks, or that is larger than there.
    """
    for name, shape in shapes.items():
        full = whole.get(name, ())
        if (
            name not in whole
            or len(shape) != len(full)
            or any(a > b for a, b in zip(shape, full, strict=True))
        ):
            raise NotASlice(
                f"tensor {name!r} is {shape}, no leading part of {full if name in whole else 'any tensor'}"
            )


def take(tensors: Tensors, shapes: Shapes) -> Tensors:
    """The leading part of each tensor that `shapes` names, C order; a tensor that has its shape is not copied.

    Raises:
        NotASlice: as `require_slices`.
    """
    whole = shapes_of(tensors)
    require_slices(shapes, whole)

    def part(name: str) -> FloatArray:
        return tensors[name][corner(shapes[name])].copy()

    narrower = {name: shape for name, shape in shapes.items() if shape != whole[name]}
    sliced = each_by(part, narrower, is_lazy=isinstance(tensors, LazyTensors))
    return select({name: (sliced if name in narrower else tensors, name) for name in shapes})


def place(tensors: Tensors, parts: Tensors) -> Tensors:
    """`tensors`, of which `parts` replace the leading parts; everything else stays as it is.

    Raises:
        NotASlice: as `require_slices`.
    """
    whole, shapes = shapes_of(tensors), shapes_of(parts)
    require_slices(shapes, whole)

    def placed(name: str) -> FloatArray:
        value = tensors[name].copy()
        value[corner(shapes[name])] = parts[name]
        return value

    changed = {name: whole[name] for name, shape in shapes.items() if shape != whole[name]}
    is_lazy = isinstance(tensors, LazyTensors) or isinstance(parts, LazyTensors)
    merged = each_by(placed, changed, is_lazy=is_lazy)
    sources = {name: merged if name in changed else parts if name in shapes else tensors for name in whole}
    return select({name: (source, name) for name, source in sources.items()})


def each_by(compute: Callable[[str], FloatArray], shapes: Shapes, *, is_lazy: bool) -> Tensors:
    """The tensors that `compute` makes for each name, now or, if they are lazy, one at a time when they are read."""
    return _OneByOne(compute, shapes) if is_lazy else {name: compute(name) for name in shapes}


class _OneByOne(LazyTensors):
    """Keeps the last tensor, of which a reader takes one piece after the other."""

    def __init__(self, compute: Callable[[str], FloatArray], shapes: Shapes) -> None:
        self._compute = compute
        self._shapes = dict(shapes)
        self._last: tuple[str, FloatArray] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def piece(self, name: str, start: int, stop: int) -> FloatArray:
        last = self._last
        if last is None or last[0] != name:
            last = self._last = (name, self._compute(name).reshape(-1))
        return last[1][start:stop]
