"""Pieces of a model that are measured one at a time, without the model, and once per machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from models.pretrain.parallelize import sizes_of
from models.pretrain.planner import layer_profile, pieces
from models.pretrain.planner.live_memory import LiveBytes
from models.pretrain.planner.profile import Piece, most
from models.pretrain.planner.profile_cache import Cache
from models.pretrain.training import TrainingOptions
from models.zoo import ModelSpec, gpt, moe
from models.zoo.layout import Layout

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds

CPU = torch.device("cpu")


def small(layers: int = 3, tie: bool = False) -> ModelSpec:
    return gpt.spec((16,), 64, width=32, layers=layers, heads=4, tie=tie)


def measured(spec: ModelSpec, cache: Cache) -> list[Piece]:
    first, layers, last, loss = layer_profile.measure(spec, CPU, cache)
    return [first, *layers, last, loss]


def test_equal_layers_are_measured_once_and_on_this_machine_only_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "this machine")
    found = measured(small(), cache)
    assert cache.measured == 4 and cache.found == 0  # first, one layer, last and loss
    again = Cache(tmp_path, "this machine")
    assert measured(small(layers=5), again)[1] == found[1]
    assert again.measured == 0 and again.found == 4
    other = Cache(tmp_path, "another machine")
    measured(small(), other)
    assert other.measured == 4


def test_a_damaged_file_of_figures_is_measured_anew(tmp_path: Path) -> None:
    optimizer = layer_profile.optimizer(TrainingOptions(), CPU, Cache(tmp_path, ""))
    assert optimizer.state == 2 and optimizer.per_value > 0
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    cache = Cache(tmp_path, "")
    layer_profile.optimizer(TrainingOptions(), CPU, cache)
    assert cache.measured == 1


def test_layers_that_differ_in_heads_alone_are_measured_apart() -> None:
    def layer(heads: int) -> nn.Module:
        return pieces.parts_of(pieces.without_params(gpt.spec((16,), 64, width=32, heads=heads)), LAYOUT)[1]

    assert pieces.identity(layer(4)) == pieces.identity(layer(4)) != pieces.identity(layer(2))


LAYOUT = gpt.layout(16, 32, 4)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(small(), id="gpt"),
        pytest.param(moe.spec((16,), 64), id="moe", marks=pytest.mark.extended),
    ],
)
def test_bytes_counted_without_data_are_those_of_the_whole_model(spec: ModelSpec) -> None:
    first, *layers, last, _ = measured(spec, Cache(None, ""))
    module = spec.build(0)
    for rows in (1, 3, 16, 32):
        x = spec.example_batch(rows)[0]
        with LiveBytes([x, *module.parameters()]) as live:
            before = live.now
            output = module(x)
            kept = live.now - before
        assert output.shape[0] == rows
        predicted = sum(piece.kept["none"].at(rows) for piece in (first, *layers, last))
        assert predicted == pytest.approx(kept, rel=0.02)
        for piece in (first, *layers, last):
            assert most(piece.backward_bytes["none"], rows) >= piece.kept["none"].at(rows)


def test_params_that_pieces_share_count_once() -> None:
    total = sum(parameter.numel() for parameter in small(tie=True).build(0).parameters())
    assert sum(piece.local_values() for piece in measured(small(tie=True), Cache(None, ""))) == total


@pytest.mark.slow
def test_a_model_larger_than_memory_has_only_the_piece_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 layers of 3 million params, 2.5 GB, of which no process builds more than one."""
    huge = gpt.spec((8,), 64, width=512, layers=200, heads=4)
    live = 0
    with_params = pieces.with_params

    def counted(part: nn.Module, device: torch.device) -> nn.Module:
        nonlocal live
        live = max(live, sum(parameter.numel() for parameter in part.parameters()))
        return with_params(part, device)

    monkeypatch.setattr(pieces, "with_params", counted)
    found = measured(huge, Cache(None, ""))
    assert sizes_of(huge).layers == 200 == len(found) - 3
    assert sum(piece.local_values() for piece in found) > 6e8 > 100 * live > 0


def test_buffers_are_kept_and_params_have_their_shapes() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("shift", torch.tensor([1.0, 2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.linear(x) + self.shift)

    spec = replace(small(), module=Shifted, layout=None)
    hollow = pieces.without_params(spec)
    assert all(parameter.is_meta for parameter in hollow.parameters())
    filled = pieces.with_params(pieces.parts_of(hollow, Layout(order=()))[1], CPU)
    assert filled.get_buffer("shift").tolist() == [1.0, 2.0]
    assert filled(torch.ones(5, 3)).isfinite().all()
    assert all(parameter.is_meta for parameter in hollow.parameters())
