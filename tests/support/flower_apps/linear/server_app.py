"""The ServerApp."""

from __future__ import annotations

import random

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

import coordinator
import models
import strategies

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    random.seed(0)
    strategy = strategies.Everybody()
    seen: list[dict[str, object]] = []

    def keep(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        seen.append({"before": [each["metrics"]["before"] for each in replies]})
        seen[-1]["workers"] = sorted({each["metrics"]["worker"] for each in replies})
        return MetricRecord({"clients": len(replies)})

    strategy.train_metrics_aggr_fn = keep
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"w": Array(models.initial(int(context.run_config["model.features"])))}),
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    w = result.arrays["w"].numpy()
    assert isinstance(Message, type) and hasattr(models, "step")
    coordinator.write(str(context.run_config["out"]), {"w": w.tolist(), "rounds": seen})
