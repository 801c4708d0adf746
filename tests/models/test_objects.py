"""Models given as objects: written as source and weights, and built again from these alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models import user_code
from models.objects import torch_model
from models.objects.source import NotWritable, Source

WIDTH = 6


class Gate(nn.Module):
    """A module of a file that other processes import."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)


class Tied(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.gate = Gate()
        self.gates = nn.Sequential(self.gate, self.gate)
        self.norm = nn.GroupNorm(2, width)
        self.register_buffer("scale", torch.arange(width, dtype=torch.float32))
        self.register_buffer("seen", torch.tensor(3), persistent=False)
        self.activation, self.shape, self.plan = F.relu, torch.Size([width]), {"steps": [1, (2, None)]}
        self.norm.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gates(self.norm(self.activation(self.second(self.first(x))) + self.scale * self.seen))


def written(folder: Path, model: Any, **options: Any) -> Any:
    """The builder that other processes get."""
    for name, content in torch_model.write(model, options).items():
        (folder / name).write_bytes(content)
    return user_code.load(f"{folder / torch_model.SOURCE}:{torch_model.BUILDER}")


def test_a_finished_module_is_built_again_with_its_weights_and_structure(tmp_path: Path) -> None:
    model = Tied()
    build = written(tmp_path, model)
    again, other = build(input_shape=(WIDTH,), classes=WIDTH), build(input_shape=(WIDTH,), classes=WIDTH)
    x = torch.randn(3, WIDTH)
    assert torch.equal(again(x), model(x))
    assert list(again.state_dict()) == list(model.state_dict())
    assert again.second.weight is again.first.weight and again.gates[0] is again.gates[1] is again.gate
    assert [name for name, each in again.named_parameters() if each.requires_grad] == [
        name for name, each in model.named_parameters() if each.requires_grad
    ]
    assert again.plan == model.plan and again.first.weight is not other.first.weight
    with torch.no_grad():
        other.first.weight.zero_()
    assert torch.equal(again(x), model(x))


LAYERS: list[nn.Module] = [
    nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)),
    nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 3)),
    nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8, batch_first=True), nn.Flatten(), nn.Softmax(-1)),
]  # fmt: skip


@pytest.mark.parametrize("model", LAYERS, ids=["convolution", "norm", "attention"])
def test_layers_of_torch_are_built_again(tmp_path: Path, model: nn.Module) -> None:
    again = written(tmp_path, model)(input_shape=(1, 8, 8), classes=3)
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(again.eval()(x), copy.deepcopy(model).eval()(x))


def test_a_class_inside_a_function_is_copied_with_what_it_uses(tmp_path: Path) -> None:
    width, names = 5, ["a", "b"]

    def activation(x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) * len(names)

    class Net(nn.Module):
        def __init__(self, input_shape: tuple[int, ...], classes: int, more: int = WIDTH) -> None:
            super().__init__()
            self.first = nn.Linear(input_shape[0], width + more)
            self.last = nn.Linear(width + more, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(activation(self.first(x)))

    text = torch_model.write(Net, {})[torch_model.SOURCE].decode()
    assert "def activation(x" in text and "width = 5" in text and "names = ['a', 'b']" in text
    module = written(tmp_path, Net)(input_shape=(4,), classes=3, more=1)
    assert module(torch.zeros(2, 4)).shape == (2, 3) and module.first.out_features == 6


def test_a_builder_gets_the_arguments_that_it_takes(tmp_path: Path) -> None:
    def fixed(width: int = 2) -> nn.Module:
        return nn.Linear(4, width)

    build = written(tmp_path, fixed)
    assert build(input_shape=(4,), classes=3).out_features == 2
    assert build(input_shape=(4,), classes=3, width=7).out_features == 7


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *arguments: None)
    return model


def attributed(value: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = value
    return model


TABLE = torch.zeros(3)


def uses_a_tensor() -> nn.Module:
    def build() -> nn.Module:
        return nn.Linear(len(TABLE), 2)

    return build  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(2, 2), "it is a lambda; define it with `def`"),
        (7, "it is a int; expected a torch.nn.Module"),
        (hooked(), "Linear has hooks"),
        (attributed(Path("x")), "Linear.extra is a PosixPath, which cannot be written down; give a function"),
        (nn.LSTM(2, 3), "LSTM._flat_weight_refs.* give a function or class that builds"),
        (uses_a_tensor(), "build uses it: 'TABLE' is a Tensor, which cannot be written down"),
    ],
    ids=["lambda", "number", "hooks", "attribute", "lstm", "tensor"],
)
def test_objects_that_cannot_be_written_are_named(model: Any, message: str) -> None:
    with pytest.raises(NotWritable, match=message):
        torch_model.write(model, {})


def test_options_are_for_a_builder() -> None:
    with pytest.raises(
        NotWritable, match=r"\[model\] has the options width, but the model is a finished module"
    ):
        torch_model.write(nn.Linear(2, 2), {"width": 3})


def test_two_objects_of_one_name_are_refused() -> None:
    def first() -> type:
        class Net(nn.Module):
            pass

        return Net

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    source = Source()
    source.refer(Net)
    with pytest.raises(NotWritable, match="two different objects are called 'Net'"):
        source.refer(first())


def test_a_file_is_executed_anew_each_time_and_reported_when_it_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    for number in (1, 2):
        file.write_text(f"def build(): return {number}\n")
        assert user_code.load(f"{file}:build")() == number
    file.unlink()
    with pytest.raises(user_code.UserCodeError, match="does not exist"):
        user_code.load(f"{file}:build")
