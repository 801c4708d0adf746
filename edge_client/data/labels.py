"""Labels as indices of classes or as quantities, by the same rules in a simulation and on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import number
from edge_client.data.connector import DataProblem
from edge_client.data.quoting import listed, quoted

NO_LABEL = frozenset({"", "nan", "n/a", "null"})
"""Texts that stand for a missing label, in any case."""


def is_empty(cell: object) -> bool:
    """Whether a cell of the label's column says that there is none."""
    return cell is None or str(cell).strip().casefold() in NO_LABEL


def quantities(
    cells: Sequence[object], place: Callable[[int], str], decimal_comma: bool = False
) -> npt.NDArray[np.float64]:
    """[N], the numbers in cells, to be predicted as such; an error begins with the `place` of its cell.

    Raises:
        DataProblem: a cell is empty or no finite number.
    """
    values = []
    for row, cell in enumerate(cells):
        value = number(cell, decimal_comma)
        if value is None or not np.isfinite(value):
            raise DataProblem(
                f"{place(row)}: the label {quoted(str('' if cell is None else cell))} is no number, and data.task = "
                '"regression" predicts one; correct the cell or remove the row'
            )
        values.append(value)
    return np.array(values, np.float64)


def standardised(values: npt.NDArray[np.float64], label_scale: Sequence[float]) -> npt.NDArray[np.float32]:
    """Quantities as a model predicts them. `label_scale`: mean and deviation in their own unit."""
    mean, deviation = label_scale
    return ((values - mean) / deviation).astype(np.float32)


def class_name(value: float) -> str:
    """The name of a class that is a number, so that 1 and 1.0 are one class."""
    return f"{value:.12g}"


class Labels:
    """The classes of a data set in the order of their indices; without names, labels are the indices themselves.

    Where all names are numbers, labels are compared by value: 1.0 is the class "1".
    """

    def __init__(self, classes: Sequence[str], decimal_comma: bool = False) -> None:
        self._classes = classes
        self._decimal_comma = decimal_comma
        self._by_name = {name: index for index, name in enumerate(classes)}
        values = [number(name) for name in classes]
        by_value = {class_name(value): index for index, value in enumerate(values) if value is not None}
        self._by_value = by_value if len(by_value) == len(classes) else {}

    def index(self, cell: object) -> int:
        """The index of a label's class.

        Raises:
            DataProblem: the label is missing, is no class, or is a text without names to look it up in. The message
                does not name the place.
        """
        if isinstance(cell, float) and cell.is_integer():
            cell = int(cell)
        text = "" if cell is None else str(cell).strip()
        index = self._by_name.get(text)
        if index is None:
            value = number(text, self._decimal_comma)
            index = self._by_number(value) if value is not None else None
        if index is not None:
            return index
        if is_empty(text):
            raise DataProblem("the label is empty; fill it in or remove the row")
        if self._classes:
            raise DataProblem(f"label {quoted(text)} is none of the option classes: {listed(self._classes)}")
        raise DataProblem(
            f"label {quoted(text)} is no class index 0, 1, …; for named classes give the option classes, a list of the "
            "names in the same order on every device"
        )

    def indices(self, cells: Sequence[object], place: Callable[[int], str]) -> npt.NDArray[np.int32]:
        """[N], `index` of each cell; an error begins with the `place` of its cell."""
        found = np.empty(len(cells), np.int32)
        for row, cell in enumerate(cells):
            try:
                found[row] = self.index(cell)
            except DataProblem as problem:
                raise DataProblem(f"{place(row)}: {problem}") from None
        return found

    def _by_number(self, value: float) -> int | None:
        if self._classes:
            return self._by_value.get(class_name(value))
        return int(value) if value.is_integer() and 0 <= value < 1e9 else None
