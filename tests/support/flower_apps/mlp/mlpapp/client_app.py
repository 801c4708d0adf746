"""The ClientApp."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from mlpapp.task import SAMPLES, load_data, make_net
from mlpapp.task import test as test_fn
from mlpapp.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    kind = str(context.run_config["net"])
    net = make_net(kind)
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    batches = load_data(int(context.node_config["partition-id"]), int(context.run_config["batch-size"]), kind)
    loss = train_fn(net, batches, int(context.run_config["local-epochs"]), msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": SAMPLES})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    kind = str(context.run_config["net"])
    net = make_net(kind)
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    batches = load_data(int(context.node_config["partition-id"]), int(context.run_config["batch-size"]), kind)
    loss, accuracy = test_fn(net, batches)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": SAMPLES})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
