"""The model, each client's data, and local training."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

FEATURES, CLASSES, SAMPLES = 784, 62, 60
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, 64)
        self.fc2 = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x)))


def load_data(partition_id: int, batch_size: int) -> Batches:
    drawn = torch.Generator().manual_seed(partition_id)
    x = torch.randn(SAMPLES, FEATURES, generator=drawn)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=drawn)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def train(net: Net, batches: Batches, epochs: int, lr: float) -> float:
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
def test(net: Net, batches: Batches) -> tuple[float, float]:
    net.eval()
    loss = correct = 0.0
    for x, y in batches:
        logits = net(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(1) == y).sum().item()
    return loss / SAMPLES, correct / SAMPLES
