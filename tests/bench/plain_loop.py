"""A round of federated averaging as one writes it in plain PyTorch: a loop over clients on one core, and a weighted mean."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from models import datasets, zoo

CLIENTS, SAMPLES, BATCH, LR = 100, 60, 20, 0.05


@dataclass(frozen=True)
class Workload:
    """Clients that train one epoch of synthetic data. `rounds`: of one measurement by the loop."""

    model: str
    shape: tuple[int, ...]
    classes: int
    rounds: int
    hidden: tuple[int, ...] = ()

    @property
    def dataset(self) -> str:
        """The name of the data in an experiment."""
        return f"synthetic(shape={list(self.shape)}, classes={self.classes}, samples={SAMPLES})"

    def build(self) -> nn.Module:
        if self.model == "cnn":
            return build_cnn(self.shape, self.classes)
        options: dict[str, Any] = {"hidden": list(self.hidden)} if self.hidden else {}
        module: nn.Module = zoo.get(
            self.model, input_shape=self.shape, classes=self.classes, **options
        ).build(7)
        return module


WORKLOADS = {
    "MLP 784-64-62": Workload("mlp", (784,), 62, 10, (64,)),
    "CNN, 62,006 params": Workload("cnn", (32, 32, 3), 10, 1),
    "LR 60-10": Workload("logreg", (60,), 10, 20),
}


class _ChannelsFirst(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 3, 1, 2)


def build_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions with pooling and three dense layers, as in PyTorch's first tutorial; images are [32, 32, 3]."""
    layers: list[nn.Module] = [_ChannelsFirst()]
    for before, after in ((3, 6), (6, 16)):
        layers += [nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(84, classes))


class PlainLoop:
    """The clients of a workload in the memory of a device."""

    def __init__(self, workload: Workload, device: str = "cpu", lr: float = LR) -> None:
        self._workload, self._device, self._lr = workload, device, lr
        folder = os.environ.get("FEDLOOP_DATA_DIR")
        data = datasets.load(
            workload.dataset, data_dir=Path(folder) if folder else None, seed=7, clients=CLIENTS
        )
        x, y = torch.from_numpy(data.x).to(device), torch.from_numpy(data.y).long().to(device)
        test = torch.from_numpy(data.test).to(device)
        self._clients = list(zip(x[~test].tensor_split(CLIENTS), y[~test].tensor_split(CLIENTS), strict=True))
        self._test = x[test], y[test]

    @cached_property
    def _model(self) -> nn.Module:
        return self._workload.build().to(self._device)

    def accuracy(self) -> float:
        """On the held-out rows."""
        x, y = self._test
        with torch.no_grad():
            return float((self._model(x).argmax(-1) == y).float().mean())

    def train_round(self) -> None:
        """Trains every client from the model, and makes the mean of them the model."""
        model = self._model
        start = {name: value.clone() for name, value in model.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for x, y in self._clients:
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), self._lr)
            for rows in torch.split(torch.randperm(len(x), device=self._device), BATCH):
                optimizer.zero_grad()
                functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += value * len(x)
        examples = sum(len(x) for x, _ in self._clients)
        model.load_state_dict({name: value / examples for name, value in total.items()})


@cache
def _loop(name: str) -> PlainLoop:
    torch.set_num_threads(1)
    loop = PlainLoop(WORKLOADS[name])
    loop.train_round()  # not measured
    return loop


def measure_rate(name: str) -> float:
    """Clients a second of the loop on one core."""
    loop, rounds = _loop(name), WORKLOADS[name].rounds
    began = time.perf_counter()
    for _ in range(rounds):
        loop.train_round()
    return rounds * CLIENTS / (time.perf_counter() - began)


def count_operations(name: str) -> int:
    """Floating-point operations of the products with which one client trains."""
    workload = WORKLOADS[name]
    with FlopCounterMode(display=False) as counter:
        x, y = torch.zeros(SAMPLES, *workload.shape), torch.zeros(SAMPLES, dtype=torch.long)
        functional.cross_entropy(workload.build()(x), y).backward()
    return int(counter.get_total_flops())


def measure_operations() -> float:
    """Floating-point operations a second of a large matrix product on one core, the best of several."""
    torch.set_num_threads(1)
    size, best = 1024, 0.0
    a = torch.ones(size, size)
    for _ in range(20):
        began = time.perf_counter()
        torch.mm(a, a)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best
