"""The app's strategy."""

from __future__ import annotations

from flwr.serverapp.strategy import FedAvg


class Everybody(FedAvg):
    """FedAvg over all clients, who are not evaluated."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
