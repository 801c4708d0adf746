"""Loads data sets and partitions them among clients, with NumPy only.

`load` makes a Dataset from a name, `partition` assigns training rows to clients, `owners` assigns held-out rows,
`preview` describes the result for a person. Nothing here imports a training framework, nor scikit-learn, whose bundled
digits are read as a file.
"""

from __future__ import annotations

from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import sample_of
from models.datasets.partitioners import (
    Partition,
    client_names,
    owners,
    parse_partition,
    partition,
    public_rows,
)
from models.datasets.sources import from_settings, load
from models.datasets.summary import preview

__all__ = [
    "DataError",
    "Dataset",
    "Partition",
    "client_names",
    "from_settings",
    "load",
    "owners",
    "parse_partition",
    "partition",
    "preview",
    "public_rows",
    "sample_of",
]
