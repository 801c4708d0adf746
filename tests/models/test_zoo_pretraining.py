"""Laws of the models of the datacenter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from models.catalog import MODELS
from models.pretrain.parallelize import sizes_of
from models.pretrain.plan import PlanError, parse
from models.pretrain.plan_rules import check
from models.pretrain.training import TrainingOptions
from models.zoo import ModelNotFound, ModelSpec, get

SPECS = {
    "gpt": get("gpt", input_shape=(12,), classes=30, width=16, layers=2),
    "gpt tied": get("gpt", input_shape=(12,), classes=30, width=16, layers=2, tie=True),
    "gpt llama": get(
        "gpt",
        input_shape=(12,),
        classes=30,
        width=16,
        layers=2,
        norm="rms",
        activation="swiglu",
        kv_heads=2,
        positions="rope",
        rope_scaling=[8.0, 1.0, 4.0, 8.0],
    ),
    "gpt biased": get("gpt", input_shape=(12,), classes=30, width=16, layers=2, bias="all", max_length=20),
    "bert": get("bert", input_shape=(12,), classes=3, vocab=40, width=16, layers=2),
    "bert masked": get(
        "bert", input_shape=(12,), classes=40, vocab=40, width=16, layers=2, objective="masked"
    ),
    "lstm": get("lstm", input_shape=(12,), classes=30, width=16),
    "resnet": get("resnet", input_shape=(8, 8), classes=10, width=8, blocks=[1, 2]),
    "resnet batch": get("resnet", input_shape=(3, 9, 7), classes=10, width=8, blocks=[1, 1], norm="batch"),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models gain nothing by several, and on a busy machine they wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


every_one = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@every_one
def test_logits_have_the_shape_of_the_task(spec: ModelSpec) -> None:
    x, y = spec.example_batch(5)
    assert spec.build(0).eval()(x).shape == (*y.shape, spec.classes)


@every_one
def test_adam_fits_a_batch(spec: ModelSpec) -> None:
    module = spec.build(0)
    x, y = spec.example_batch(6)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = spec.loss(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


@every_one
def test_every_parameter_is_used(spec: ModelSpec) -> None:
    module = spec.build(0)
    x, y = spec.example_batch(16)
    names = [name for name, _ in module.named_parameters()]
    gradients = torch.autograd.grad(spec.loss(module(x), y), list(module.parameters()))
    assert [name for name, gradient in zip(names, gradients, strict=True) if not gradient.any()] == []


@every_one
def test_a_row_is_alone_in_its_batch(spec: ModelSpec) -> None:
    module = spec.build(0).eval()
    x, _ = spec.example_batch(5)
    torch.testing.assert_close(module(x)[2], module(x[2:3])[0], rtol=1e-5, atol=1e-5)


@every_one
def test_a_layouts_modules_in_turn_are_the_model(spec: ModelSpec) -> None:
    assert spec.layout is not None
    module = spec.build(0).eval()
    x, _ = spec.example_batch(4)
    h = x
    for name in spec.layout.sequence(module):
        h = module.get_submodule(name)(h)
    torch.testing.assert_close(h, module(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt", "gpt tied", "lstm"])
def test_a_token_sees_none_after_it_and_all_before(name: str) -> None:
    spec = SPECS[name]
    module = spec.build(0)
    x, _ = spec.example_batch(2)
    later, earlier = x.clone(), x.clone()
    later[:, 7:] = (later[:, 7:] + 1) % spec.classes
    earlier[:, 0] = (earlier[:, 0] + 1) % spec.classes
    torch.testing.assert_close(module(x)[:, :7], module(later)[:, :7])
    assert (module(x)[:, 7:] != module(later)[:, 7:]).any()
    assert ((module(x) - module(earlier)).abs().amax(-1) > 0).all()


def test_a_hidden_token_sees_both_sides() -> None:
    spec = SPECS["bert masked"]
    module = spec.build(0)
    x, _ = spec.example_batch(2)
    x = x.clamp(min=1)
    for place in (0, 11):
        other = x.clone()
        other[:, place] = other[:, place] % 38 + 1
        assert ((module(x) - module(other)).abs().amax(-1) > 0).all()


@pytest.mark.parametrize("name", ["bert", "bert masked"])
def test_padding_does_not_count(name: str) -> None:
    spec = SPECS[name]
    module = spec.build(0)
    x, _ = spec.example_batch(3)
    x = x.clamp(min=1)
    x[:, 7:] = 0
    before = module(x)
    with torch.no_grad():
        rows = module.get_submodule("embedding")
        rows.token.weight[0] += 5.0
        rows.position.weight[7:] += 5.0
    if spec.task == "next_token":
        torch.testing.assert_close(module(x)[:, :7], before[:, :7])
    else:
        torch.testing.assert_close(module(x), before)


@pytest.mark.parametrize("name", ["bert", "bert masked"])
def test_a_text_of_padding_alone_is_finite_and_has_finite_gradients(name: str) -> None:
    spec = SPECS[name]
    module = spec.build(0)
    x, y = spec.example_batch(3)
    x[1] = 0
    loss = spec.loss(module(x), y)
    assert loss.isfinite()
    gradients = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(("name", "shape"), [("gpt", (12,)), ("bert", (12,)), ("lstm", (12,))])
def test_dropout_is_by_the_seed_and_off_in_evaluation(name: str, shape: tuple[int, ...]) -> None:
    spec = get(name, input_shape=shape, classes=30, width=16, layers=2, dropout=0.5)
    module = spec.build(0)
    x, _ = spec.example_batch(3)

    def answer(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        found: torch.Tensor = module(x)
        return found

    assert torch.equal(answer(1), answer(1))
    assert not torch.equal(answer(1), answer(2))
    module.eval()
    assert torch.equal(answer(1), answer(2))


def test_a_tied_head_is_the_embedding() -> None:
    module = SPECS["gpt tied"].build(0)
    assert module.get_parameter("head.weight") is module.get_parameter("embedding.token.weight")


def test_resnet_18_has_its_layers() -> None:
    module = get("resnet", input_shape=(3, 32, 32), classes=10).build(0)
    found = [
        name for name, part in module.named_modules() if isinstance(part, torch.nn.Conv2d | torch.nn.Linear)
    ]
    assert len([name for name in found if "shortcut" not in name]) == 18


@pytest.mark.parametrize(
    ("name", "plan", "reason"),
    [
        ("gpt tied", "pp=2", r"stages cannot share a param"),
        ("gpt tied", "tp=2,loss_parallel=true", r"loss_parallel needs a model that says what its head is"),
        ("gpt llama", "tp=4", r"tp=4 must divide the 2 heads of keys and values"),
        ("bert", "cp=2", r"cp needs a model whose sequences can be split"),
        ("bert", "tp=2,sequence=true", r"sequence needs a model whose sequences can be split"),
        ("lstm", "tp=2", r"tp needs a model that says how its matrices split"),
        ("lstm", "cp=2", r"cp needs a model that says where its attention is"),
        ("resnet", "pp=4", r"4 stages need as many layers, the model has 3"),
    ],
)
def test_a_plan_that_a_model_cannot_follow_is_refused(name: str, plan: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check(parse(plan), sizes_of(SPECS[name]), TrainingOptions(batch_size=16))


@pytest.mark.parametrize(
    ("name", "input_shape", "options", "reason"),
    [
        ("bert", (12,), {"width": 30, "heads": 4}, "width 30 and heads 4"),
        ("bert", (12,), {"objective": "guess"}, "objective is 'classify' or 'masked', got 'guess'"),
        (
            "bert",
            (12,),
            {"objective": "masked", "vocab": 4},
            "one of the vocab = 4 tokens, but there are 5 classes",
        ),
        ("gpt", (12,), {"dropout": 1.0}, "dropout is a share from 0 to below 1, got 1.0"),
        ("gpt", (12,), {"kv_heads": 3}, "kv_heads must divide heads, got kv_heads 3 and heads 4"),
        ("gpt", (12,), {"norm": "batch"}, "norm is 'batch', expected one of layer, rms"),
        ("gpt", (12,), {"max_length": 8}, "max_length is 8, but examples have 12 tokens"),
        ("gpt", (12,), {"positions": "rope", "width": 12}, "a head has 3: use an even number"),
        ("lstm", (4, 4), {}, r"expected token sequences, \(length,\) per example, got \(4, 4\)"),
        ("lstm", (4,), {"width": 0}, "width and layers are 1 or more"),
        ("resnet", (64,), {}, r"expected images, .* got \(64,\)"),
        (
            "resnet",
            (8, 8),
            {"blocks": [2, 0]},
            r"blocks has a number of 1 or more for every stage, got \[2, 0\]",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    name: str, input_shape: tuple[int, ...], options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelNotFound, match=reason):
        get(name, input_shape=input_shape, classes=5, **options)


@every_one
def test_the_options_of_the_record_are_the_catalogs(spec: ModelSpec) -> None:
    options = MODELS[spec.name].options.model_validate(dict(spec.options))
    assert options.model_dump() == dict(spec.options)


@pytest.mark.parametrize("name", ["gpt", "moe", "bert", "lstm", "resnet"])
def test_the_catalogs_defaults_are_the_architectures(name: str) -> None:
    shape = (8, 8) if name == "resnet" else (12,)
    assert dict(get(name, input_shape=shape, classes=3).options) == MODELS[name].options().model_dump()
