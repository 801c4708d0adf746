"""Data sets and how their rows are dealt out to clients.

`load` makes a Dataset from a name, `partition` says which training rows each client holds, `owners` says
whose each held-out row is, `preview` tells a person what was understood. Numpy only: nothing here imports
a training framework, nor scikit-learn, whose bundled digits are read as a file.
"""

from __future__ import annotations

from models.datasets import sources
from models.datasets.dataset import DataError, Dataset
from models.datasets.ownership import owners
from models.datasets.partitioners import Partition, client_names, parse_partition, partition
from models.datasets.public import public_rows
from models.datasets.sources import load
from models.datasets.summary import preview

__all__ = [
    "DataError",
    "Dataset",
    "Partition",
    "client_names",
    "load",
    "owners",
    "parse_partition",
    "partition",
    "preview",
    "public_rows",
    "sources",
]
