"""The model, each client's data, and local training."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

SAMPLES = 60
SHAPES = {"mlp": (784,), "cnn": (3, 32, 32)}
CLASSES = {"mlp": 62, "cnn": 10}
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 64)
        self.fc2 = nn.Linear(64, 62)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc3(F.relu(self.fc2(x)))


def make_net(kind: str) -> nn.Module:
    return ConvNet() if kind == "cnn" else Net()


def load_data(partition_id: int, batch_size: int, kind: str) -> Batches:
    drawn = torch.Generator().manual_seed(partition_id)
    x = torch.randn(SAMPLES, *SHAPES[kind], generator=drawn)
    y = torch.randint(0, CLASSES[kind], (SAMPLES,), generator=drawn)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def train(net: nn.Module, batches: Batches, epochs: int, lr: float) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(batches))


@torch.no_grad()
def test(net: nn.Module, batches: Batches) -> tuple[float, float]:
    net.eval()
    loss = correct = 0.0
    for x, y in batches:
        logits = net(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(1) == y).sum().item()
    return loss / SAMPLES, correct / SAMPLES
