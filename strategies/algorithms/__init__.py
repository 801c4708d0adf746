"""Federated algorithms by name, one file each: a dataclass of its options that builds the `Strategy`."""

from __future__ import annotations

from typing import Any, Protocol

from strategies.algorithms.fedadagrad import FedAdagrad
from strategies.algorithms.fedadam import FedAdam
from strategies.algorithms.fedavg import FedAvg
from strategies.algorithms.fedavgm import FedAvgM
from strategies.algorithms.fedprox import FedProx
from strategies.algorithms.fedyogi import FedYogi
from strategies.algorithms.scaffold import Scaffold
from strategies.strategy import Strategy


class Algorithm(Protocol):
    """A dataclass; each field is made by `strategies.options.field`."""

    def __init__(self, **options: Any) -> None: ...

    def build(self) -> Strategy: ...


ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedprox": FedProx,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "scaffold": Scaffold,
}
