"""The ServerApp."""

from __future__ import annotations

import random

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from mlpapp.task import make_net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    random.seed(0)  # of the clients that FedAvg samples
    torch.manual_seed(0)
    strategy = FedAvg(
        fraction_train=float(context.run_config["fraction-train"]),
        fraction_evaluate=float(context.run_config["fraction-evaluate"]),
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_net(str(context.run_config["net"])).state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    print("finished, trained", sorted(result.train_metrics_clientapp))
    if context.run_config["out"]:
        np.savez(
            str(context.run_config["out"]), **{name: each.numpy() for name, each in result.arrays.items()}
        )
