"""A model whose layout does not say what it computes is refused before it is trained as another one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.pretrain.parallelize import require_composition, require_splittable, sizes_of
from models.pretrain.plan import PlanError, parse
from models.zoo import get
from models.zoo.layout import Layout
from models.zoo.spec import ModelSpec
from tests.support import ranks

LAYOUT = Layout(
    ("inner", "layers.*", "head"),
    columns=("layers.*.up",),
    rows=("layers.*.down",),
    heads=2,
    width=8,
    hidden=8,
)


class Net(nn.Module):
    """Features [B, 8] -> logits [B, 3], with `between`, which no module is, before the head."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.inner, self.head, self.between = nn.Linear(8, 8), nn.Linear(8, 3), between
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        for layer in self.layers:
            h = layer(h)
        answer: torch.Tensor = self.head(h.relu() if self.between == "relu" else h)
        return answer


def spec_of(between: str, layout: Layout = LAYOUT) -> ModelSpec:
    return ModelSpec("net", lambda: Net(between), (8,), 3, layout=layout)


def require(spec: ModelSpec) -> None:
    assert spec.layout is not None
    require_composition(spec.build(0), spec.layout, spec.example_batch(2)[0])


def test_modules_one_after_the_other_give_what_the_model_gives() -> None:
    require(spec_of(""))
    with pytest.raises(
        PlanError, match=r"one after the other they answer differently by up to 0\.\d+; name every step"
    ):
        require(spec_of("relu"))
    with pytest.raises(PlanError, match="no attribute `body`"):
        require(spec_of("", replace(LAYOUT, order=("inner", "layers.*", "body"))))


@pytest.mark.parametrize("name", ["gpt", "moe", "bert", "lstm", "resnet", "charlm", "textcls"])
def test_every_layout_of_the_catalog_is_what_its_model_computes(name: str) -> None:
    image = name == "resnet"
    spec = get(name, input_shape=(8, 8) if image else (6,), classes=5)
    if spec.layout is not None and spec.layout.order:
        require(spec)


def test_training_mode_is_as_before() -> None:
    module = get("gpt", input_shape=(6,), classes=5, dropout=0.5, layers=1).build(0)
    module.get_submodule("norm").eval()
    before = [part.training for part in module.modules()]
    require_composition(module, get("gpt", input_shape=(6,), classes=5).layout, torch.zeros(1, 6).int())  # type: ignore[arg-type]
    assert [part.training for part in module.modules()] == before


def build(between: str) -> None:
    from models.pretrain import trainer, world
    from models.pretrain.data.batches import Arrays
    from models.pretrain.training import TrainingOptions

    spec = spec_of(between)
    x, y = spec.example_batch(8)
    with world.join(parse("pp=2")) as here:
        trainer.build(spec, Arrays(x.numpy(), y.numpy()), TrainingOptions(batch_size=4), here, seed=0)


@pytest.mark.slow
def test_stages_of_another_model_are_refused_before_the_first_step() -> None:
    ranks.run(2, "tests.models.pretrain.test_composition:build", "")
    with pytest.raises(ranks.RankFailed, match="are not what the model computes: one after the other"):
        ranks.run(2, "tests.models.pretrain.test_composition:build", "relu")


class Dropping(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), drop


class Holder(nn.Module):
    def __init__(self, inside: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.layers, self.behind = nn.ModuleDict({"0": Dropping(inside)}), behind


def test_dropout_that_ranks_would_do_alike_is_refused() -> None:
    def problem(inside: nn.Module, behind: nn.Module, plan: str) -> str:
        try:
            require_splittable(Holder(inside, behind), LAYOUT, parse(plan))
        except PlanError as error:
            return str(error)
        return ""

    off, on = nn.Dropout(0.0), nn.Dropout(0.1)
    assert re.search("tp splits what 'layers.0.drop' drops from", problem(on, off, "tp=2"))
    assert re.search("tp splits", problem(nn.MultiheadAttention(8, 2, dropout=0.1), off, "tp=2"))
    assert re.search("but 'behind' is AlphaDropout", problem(off, nn.AlphaDropout(0.1), "tp=2,sequence=true"))
    assert not problem(off, nn.AlphaDropout(0.1), "tp=2")
    assert not problem(off, on, "tp=2,sequence=true")
    assert not problem(on, on, "dp=2")


def test_attention_that_the_model_does_not_have_is_not_known() -> None:
    spec = get("gpt", input_shape=(6,), classes=5)
    assert spec.layout is not None
    assert sizes_of(spec).attention
    assert not sizes_of(replace(spec, layout=replace(spec.layout, attention=("layers.*.core",)))).attention
