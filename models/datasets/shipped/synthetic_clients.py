"""Synthetic(alpha, beta): clients whose labels and inputs follow models of their own. Li 2020 (FedProx), appendix C.1.

Client k draws uₖ ~ N(0, alpha) and Bₖ ~ N(0, beta), then a linear model Wₖ, bₖ ~ N(uₖ, 1) and the mean of its inputs vₖ ~ N(Bₖ, 1). Its
inputs are x ~ N(vₖ, Σ) with Σⱼⱼ = j^-1.2, its labels the largest output of its model. So alpha says how much the models differ, and
beta how much the inputs do. It has 50 rows and a log-normal number (4, 2) more; a tenth of them is held out.
"""

from __future__ import annotations

import numpy as np

from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import stream
from models.datasets.notation import Call

INPUTS, CLASSES, CLIENTS = 60, 10, 30
LARGEST_CLIENT = 20_000
"""Most rows of a client: the distribution has a long tail."""


def options(call: Call) -> tuple[float, float]:
    """Alpha and beta of `synthetic(alpha, beta)`.

    Raises:
        DataError: something else than two numbers of 0 or more.
    """
    values = call.positional
    are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
    if len(values) != 2 or call.named or not are_numbers or not all(0 <= each <= 1e6 for each in values):
        raise DataError(
            "expected synthetic(alpha, beta), two numbers of 0 or more, such as synthetic(1, 1); or named options: "
            "synthetic(shape=[784], classes=62, samples=60)"
        )
    return float(values[0]), float(values[1])


def load(call: Call, clients: int | None, seed: int) -> Dataset:
    """x float32 [N, 60] and y in 10 classes; every client is a site.

    Raises:
        DataError: alpha or beta is no number of 0 or more.
    """
    alpha, beta = options(call)
    clients = clients or CLIENTS
    rng = stream(seed, "synthetic clients")
    sizes = np.minimum(rng.lognormal(4, 2, clients).astype(np.int64) + 50, LARGEST_CLIENT)
    deviations = np.arange(1, INPUTS + 1) ** -0.6
    x, y, test = [], [], []
    for size in sizes.tolist():
        mean, centre = rng.normal(0, alpha**0.5), rng.normal(0, beta**0.5)
        weights, bias = rng.normal(mean, 1, (INPUTS, CLASSES)), rng.normal(mean, 1, CLASSES)
        inputs = rng.normal(centre, 1, INPUTS) + rng.normal(0, 1, (size, INPUTS)) * deviations
        x.append(inputs.astype(np.float32))
        y.append((inputs @ weights + bias).argmax(axis=1).astype(np.int32))
        test.append(rng.permutation(size) < size // 10)
    return Dataset(
        name="synthetic",
        x=np.concatenate(x),
        y=np.concatenate(y),
        test=np.concatenate(test),
        classes=CLASSES,
        site=np.repeat(np.arange(clients, dtype=np.int32), sizes),
        site_names=tuple(f"client-{index:02d}" for index in range(clients)),
        notes=(
            f"Made-up data of {clients} clients with models of their own: alpha = {alpha:g}, beta = {beta:g}.",
        ),
    )
