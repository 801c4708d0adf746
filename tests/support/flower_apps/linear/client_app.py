"""The ClientApp. `faults` names what some clients do wrong: `raise:1 die:2 die-once:3`, by partition."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from edge_client.history import remember
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import models

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    partition = int(context.node_config["partition-id"])
    fail(str(context.run_config["faults"]), partition, str(context.run_config["out"]))
    x, y = models.load_data(partition, int(context.run_config["model.features"]))
    w = models.step(msg.content["arrays"]["w"].numpy(), x, y, msg.content["config"]["lr"])
    before = remember(context.state, w)
    metrics = MetricRecord({"num-examples": len(x), "before": before, "worker": os.getpid()})
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics}), reply_to=msg)


def fail(faults: str, partition: int, out: str) -> None:
    for fault in faults.split():
        kind, _, who = fault.partition(":")
        if int(who) != partition:
            continue
        mark = Path(f"{out}.died")
        if kind == "raise":
            raise ValueError(f"partition {partition} has no data")
        if kind == "die" or not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
