"""A data set described for a person, before training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.datasets.dataset import Dataset

LISTED = 12
"""Names spelled out before the rest is only counted."""


def preview(dataset: Dataset, *, private: bool = False) -> list[str]:
    """Lines for a person: rows, inputs, classes, sites, then the notes of the loader.

    `private`: also what is of single rows, such as the largest label. Such lines are printed and never kept, since reports and
    what is made from them are as public as the model.
    """
    held_out = int(dataset.test.sum())
    rows = len(dataset.test)
    return [
        f"{dataset.name}: {rows:,} rows, {rows - held_out:,} for training and {held_out:,} held out",
        f"inputs: {_inputs(dataset, private=private)}",
        *_labels(dataset, private=private),
        *_sites(dataset),
        *dataset.notes,
        *(dataset.private_notes if private else ()),
    ]


def _inputs(dataset: Dataset, *, private: bool) -> str:
    shape = " x ".join(str(extent) for extent in dataset.input_shape)
    if dataset.input_dtype == "int32":
        return f"{shape} token ids a row, {int(dataset.x.min())} to {int(dataset.x.max())}"
    if len(dataset.input_shape) == 1:
        return f"{shape} feature{'s' if dataset.input_shape != (1,) else ''} a row"
    extremes = f", {float(dataset.x.min()):.3g} to {float(dataset.x.max()):.3g}" if private else ""
    return f"{shape} numbers a row{extremes}"


def _labels(dataset: Dataset, *, private: bool) -> list[str]:
    if dataset.task == "next_token":
        return [
            f"labels: the next of {dataset.classes} tokens, {int((dataset.y >= 0).sum()):,} labels in all"
        ]
    if dataset.label_scale is not None:
        mean, deviation = dataset.label_scale
        low, high = (float(value) * deviation + mean for value in (dataset.y.min(), dataset.y.max()))
        extremes = f" from {low:.4g} to {high:.4g}" if private else ""
        return [
            f"label: a quantity{extremes}; training rows have mean {mean:.4g} and standard deviation {deviation:.4g}, "
            "by which it is standardised"
        ]
    names = dataset.class_names or [str(index) for index in range(dataset.classes)]
    return [
        f"{dataset.classes} classes: {_counted(names, np.bincount(dataset.y, minlength=dataset.classes))}"
    ]


def _sites(dataset: Dataset) -> list[str]:
    if dataset.site is None:
        return ["no sites: rows are dealt out by a partition"]
    counts = np.bincount(dataset.site, minlength=len(dataset.site_names))
    return [f"{len(dataset.site_names)} sites: {_counted(dataset.site_names, counts)}"]


def _counted(names: Sequence[str], counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    listed = ", ".join(
        f"{name} {count:,}" for name, count in zip(names[:LISTED], counts[:LISTED], strict=False)
    )
    rest = len(names) - LISTED
    return (
        f"{listed} and {rest} more ({counts.min():,} to {counts.max():,} rows each)" if rest > 0 else listed
    )
