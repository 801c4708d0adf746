"""What becomes a graph, and why the rest does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from models.conversion.trace import NotTraceable, trace
from models.zoo import get
from models.zoo.spec import ModelSpec


def test_the_graphs_are_the_step_and_the_logits_of_the_module() -> None:
    spec = get("mlp", input_shape=(5,), classes=3)
    module = spec.build(seed=0)
    graphs = trace(spec, 4)
    x, y = spec.example_batch(4)

    loss, *trained = graphs.train(x, y, torch.tensor(0.5), *graphs.values)
    (logits,) = graphs.infer(x, *graphs.values)

    expected = spec.loss(module(x), y)
    gradients = torch.autograd.grad(expected, list(module.parameters()))
    torch.testing.assert_close(logits, module(x).detach())
    torch.testing.assert_close(loss, expected.detach())
    for got, weight, gradient in zip(trained, module.parameters(), gradients, strict=True):
        torch.testing.assert_close(got, weight.detach() - 0.5 * gradient)


def test_frozen_tensors_come_in_and_do_not_go_out() -> None:
    def build() -> nn.Module:
        model = flat(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model[1].requires_grad_(False)
        return model

    graphs = trace(spec_of(build), 3)

    assert [tensor.name for tensor in graphs.tensors if not tensor.trainable] == [
        "1.weight", "1.bias", "2.running_mean", "2.running_var",
    ]  # fmt: skip
    assert [tensor.signature_name for tensor in graphs.trainable] == [
        "_2__weight", "_2__bias", "_3__weight", "_3__bias",
    ]  # fmt: skip


class Attending(nn.Module):
    """[B, 4, 8] -> logits [B, 2], by one of torch's own attention layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            h = self.layer(x, x, x, need_weights=False)[0]
        else:
            h = self.layer(x)
        answer: torch.Tensor = self.out(h.mean(1))
        return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    ],
    ids=["MultiheadAttention", "TransformerEncoderLayer"],
)
def test_attention_of_torch_is_products_and_softmax(layer: Callable[[], nn.Module]) -> None:
    spec = ModelSpec("attending", lambda: Attending(layer()), (4, 8), 2)
    module = spec.build(seed=0).eval()
    graphs = trace(spec, 3)
    x, y = spec.example_batch(3)
    loss = graphs.train(x, y, torch.tensor(0.5), *graphs.values)[0]
    torch.testing.assert_close(graphs.infer(x, *graphs.values)[0], module(x).detach())
    torch.testing.assert_close(loss, spec.loss(module(x), y).detach())
    operations = {str(node.target) for graph in (graphs.train, graphs.infer) for node in graph.graph.nodes}
    assert not [name for name in operations if "attention" in name or "transformer" in name]
    assert torch.backends.mha.get_fastpath_enabled()


def test_dropout_is_still_refused_in_attention() -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    with pytest.raises(NotTraceable, match="random, and a LiteRT step has no random numbers"):
        trace(ModelSpec("attending", lambda: Attending(layer), (4, 8), 2), 3)


def test_buffers_that_are_no_part_of_the_state_are_constants() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.register_buffer("shift", torch.tensor(3.0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shifted: torch.Tensor = self.fc(x.flatten(1) + self.shift)
            return shifted

    graphs = trace(spec_of(Shifted), 3)

    assert [tensor.name for tensor in graphs.tensors] == ["fc.weight", "fc.bias"]


def test_training_mode_is_traced_for_training_only() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.fc(x.flatten(1))
            return logits if self.training else logits * 0

    graphs = trace(spec_of(Halved), 3)

    x, y = spec_of(Halved).example_batch(3)
    assert not graphs.infer(x, *graphs.values)[0].any()
    assert (graphs.train(x, y, torch.tensor(1.0), *graphs.values)[1] != graphs.values[0]).any()


def tied() -> nn.Module:
    model = flat(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[1].weight
    return model


def named(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = flat(nn.Linear(4, 2))
        model.register_parameter(name, nn.Parameter(torch.zeros(1)))
        return model

    return build


def upsampling() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2)),
        nn.Conv2d(1, 1, 1),
        nn.ConvTranspose2d(1, 1, 1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(x.flatten(1))
        return logits if logits.sum() > 0 else -logits


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: flat(nn.Dropout(0.5), nn.Linear(4, 2)), r"is random, .*remove dropout \(p=0\)"),
        (upsampling, r"no LiteRT gradient for aten.convolution_backward of a transposed convolution"),
        (tied, r"'2.weight' and '1.weight' are one tensor"),
        (named("lr"), r"tensor 'lr' would be called 'lr', which is an input or output"),
        (named("_1__weight"), r"would be called '_1__weight', which is tensor '_1__weight'"),
        (lambda: flat(nn.Linear(4, 2)).double(), r"tensor '1.weight' is float64; params are float32"),
        (lambda: flat(nn.Linear(4, 2)).requires_grad_(False), r"no trainable parameter"),
        (lambda: flat(nn.Linear(4, 3)), r"needs logits of shape \('B', 2\), the model returns \('B', 3\)"),
        (lambda: flat(nn.Linear(5, 2)), r"running it failed: RuntimeError: mat1 and mat2 shapes"),
        (Branching, r"running it failed: RuntimeError: .*data-dependent|running it failed"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_its_reason(
    build: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(NotTraceable, match=reason):
        trace(spec_of(build), 3)


def test_dropout_of_nothing_is_no_dropout() -> None:
    assert trace(spec_of(lambda: flat(nn.Dropout(0.0), nn.Linear(4, 2))), 3).tensors


def flat(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *layers)


def spec_of(build: Callable[[], nn.Module]) -> ModelSpec:
    return ModelSpec("own", build, (2, 2), 2)
