"""Laws of the residual network and of both transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.catalog import MODELS
from models.zoo import ModelNotFound, ModelSpec, get
from models.zoo.textcls import PAD
from models.zoo.trial import are_probabilities, vocabulary

SPECS = {
    "resnet8 group": get("resnet8", input_shape=(8, 8), classes=10, width=8),
    "resnet8 batch": get("resnet8", input_shape=(3, 9, 7), classes=10, width=8, norm="batch"),
    "charlm": get("charlm", input_shape=(12,), classes=30),
    "textcls": get("textcls", input_shape=(12,), classes=3, vocab=40),
}

every_one = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@every_one
def test_logits_have_the_shape_of_the_task(spec: ModelSpec) -> None:
    x, y = spec.example_batch(5)

    logits = spec.build(seed=0).eval()(x)

    assert logits.shape == (*y.shape, spec.classes)


@pytest.mark.slow
@every_one
def test_gradient_descent_fits_a_batch(spec: ModelSpec) -> None:
    module = spec.build(seed=0)
    x, y = spec.example_batch(6)
    weights = list(module.parameters())
    before = float(spec.loss(module(x), y).detach())
    for _ in range(40):
        gradients = torch.autograd.grad(spec.loss(module(x), y), weights)
        with torch.no_grad():
            torch._foreach_add_(weights, list(gradients), alpha=-0.1)

    assert float(spec.loss(module(x), y).detach()) < 0.7 * before


@pytest.mark.slow
@every_one
def test_every_parameter_is_used(spec: ModelSpec) -> None:
    module = spec.build(seed=0)
    x, y = spec.example_batch(16)
    names = [name for name, _ in module.named_parameters()]

    gradients = torch.autograd.grad(spec.loss(module(x), y), list(module.parameters()))

    assert [name for name, gradient in zip(names, gradients, strict=True) if not gradient.any()] == []


@every_one
def test_a_row_is_alone_in_its_batch(spec: ModelSpec) -> None:
    module = spec.build(seed=0).eval()
    x, _ = spec.example_batch(5)

    torch.testing.assert_close(module(x)[2], module(x[2:3])[0], rtol=1e-5, atol=1e-5)


def test_a_character_sees_none_that_come_after_it() -> None:
    spec = SPECS["charlm"]
    module = spec.build(seed=0)
    x, _ = spec.example_batch(2)
    later = x.clone()
    later[:, 7:] = (later[:, 7:] + 1) % spec.classes

    before, after = module(x), module(later)

    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any()


def test_a_character_sees_those_before_it() -> None:
    spec = SPECS["charlm"]
    module = spec.build(seed=0)
    x, _ = spec.example_batch(2)
    earlier = x.clone()
    earlier[:, 0] = (earlier[:, 0] + 1) % spec.classes

    assert ((module(x) - module(earlier)).abs().amax(-1) > 1e-6).all()


def test_padding_does_not_count_in_a_text() -> None:
    spec = SPECS["textcls"]
    module = spec.build(seed=0)
    x, _ = spec.example_batch(3)
    x[:, 7:] = PAD
    x[:, :7] = x[:, :7].clamp(min=1)
    before = module(x)
    with torch.no_grad():
        embedding = module.get_submodule("embedding")
        embedding.weight[PAD] += 5.0
        embedding.position[7:] += 5.0

    torch.testing.assert_close(module(x), before)


def test_a_text_of_padding_alone_is_finite_and_has_finite_gradients() -> None:
    spec = SPECS["textcls"]
    module = spec.build(seed=0)
    x, y = spec.example_batch(3)
    x[1] = PAD

    loss = spec.loss(module(x), y)

    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, list(module.parameters())))


def test_example_tokens_fill_the_vocabulary_and_not_the_classes() -> None:
    spec = SPECS["textcls"]

    x, y = spec.example_batch(20)

    assert (spec.vocab, int(x.max()), int(x.min())) == (40, 39, 0)
    assert int(y.max()) == spec.classes - 1


def test_an_image_without_channels_is_one_channel_deep() -> None:
    flat, deep = (get("resnet8", input_shape=shape, classes=10) for shape in ((8, 8), (1, 8, 8)))
    x = torch.rand(2, 8, 8)

    torch.testing.assert_close(flat.build(seed=0)(x), deep.build(seed=0)(x[:, None]))


@pytest.mark.parametrize(
    ("name", "input_shape", "options", "reason"),
    [
        ("charlm", (12,), {"width": 30, "heads": 4}, "width 30 and heads 4"),
        ("textcls", (12,), {"width": 8, "heads": 16}, "width 8 and heads 16"),
        ("textcls", (12,), {"vocab": 1}, "vocab counts padding and at least one token"),
        ("charlm", (4, 4), {}, r"expected token sequences, \(length,\) per example, got \(4, 4\)"),
        ("resnet8", (64,), {}, r"expected images, .* got \(64,\)"),
        ("resnet8", (8, 8), {"width": 6}, "width must be a positive multiple of 4.*got 6"),
        ("resnet8", (8, 8), {"norm": "layer"}, "norm is 'group' or 'batch', got 'layer'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(
    name: str, input_shape: tuple[int, ...], options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelNotFound, match=reason):
        get(name, input_shape=input_shape, classes=5, **options)


@every_one
def test_the_options_of_the_record_are_the_catalogs(spec: ModelSpec) -> None:
    options = MODELS[spec.name].options.model_validate(dict(spec.options))

    assert options.model_dump() == dict(spec.options)


@pytest.mark.parametrize("name", ["resnet8", "charlm", "textcls"])
def test_the_catalogs_defaults_are_the_architectures(name: str) -> None:
    shape = (8, 8) if name == "resnet8" else (12,)

    assert dict(get(name, input_shape=shape, classes=3).options) == MODELS[name].options().model_dump()


class Embedded(torch.nn.Module):
    """Ids [B, T] looked up in a table of `rows`, places in another, by torch's layer or its function."""

    def __init__(self, rows: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.word, self.place = torch.nn.Embedding(rows, 4), torch.nn.Embedding(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.place(torch.arange(x.shape[1]))
        match self.how:
            case "layer":
                words = self.word(x)
            case "function":
                words = torch.nn.functional.embedding(x.long(), self.word.weight)
            case "other order":
                words = self.word(x.t()).transpose(0, 1)
            case _:
                words = (
                    torch.nn.functional.one_hot(x.long(), self.word.num_embeddings).float() @ self.word.weight
                )
        return (words + places).sum(-1)


@pytest.mark.parametrize(
    ("how", "found"), [("layer", 40), ("function", 40), ("other order", 40), ("one-hot", None)]
)
def test_the_vocabulary_of_a_model_is_what_it_looks_ids_up_in(how: str, found: int | None) -> None:
    assert vocabulary(Embedded(40, how), (3,)) == found
    spec = ModelSpec("own", lambda: Embedded(40, how), (3,), 3, input_dtype="int32", vocab=found)
    if found is None:
        with pytest.raises(ValueError, match=r"how many it takes cannot be determined.*ModelSpec with vocab"):
            _ = spec.described_vocab
    else:
        assert spec.described_vocab == 40


def test_probabilities_are_distinguished_from_logits() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3))
    odds = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert are_probabilities(odds) and are_probabilities(odds[None])
    for other in (logits, np.zeros((4, 3)), np.log(odds), odds * 2, np.ones((4, 1))):
        assert not are_probabilities(other)
