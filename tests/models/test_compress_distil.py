"""Distillation: the loss is Hinton's, padding does not count, and a student learns from a teacher alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import zoo
from models.compress import report
from models.compress.distil import DistilOptions, consensus, distil, distillation_loss, parse_model, step
from models.compress.step import Context, Data, StepModel, StepRefused
from models.labels import PADDING
from models.pretrain import params
from models.zoo.spec import masked_cross_entropy


def softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6), temperature=st.floats(0.5, 10), alpha=st.floats(0, 1), rows=st.integers(1, 6)
)
def test_the_loss_equals_a_naive_twin(seed: int, temperature: float, alpha: float, rows: int) -> None:
    rng = np.random.default_rng(seed)
    student_logits, taught = rng.normal(size=(2, rows, 5))
    y = rng.integers(PADDING, 5, size=rows).astype(np.int32)
    p, q = softmax(taught / temperature), softmax(student_logits / temperature)
    soft = (p * np.log(p / q)).sum(-1).mean() * temperature**2
    hard = [-np.log(softmax(student_logits)[row, label]) for row, label in enumerate(y) if label != PADDING]
    expected = alpha * soft + (1 - alpha) * (np.mean(hard) if hard else 0)
    given_logits = torch.from_numpy(student_logits), torch.from_numpy(taught)
    actual = distillation_loss(*given_logits, torch.from_numpy(y), temperature, alpha)
    assert float(actual) == pytest.approx(expected, abs=1e-9)


def test_at_high_temperature_logits_are_matched() -> None:
    """Hinton 2015, equation 4: the gradient tends to (z - v) / classes for logits of zero mean; T² is in ours."""
    generator = torch.Generator().manual_seed(0)
    z, v = torch.randn(2, 1, 6, generator=generator, dtype=torch.float64)
    z, v = (z - z.mean()).requires_grad_(), v - v.mean()
    loss = distillation_loss(z, v, torch.tensor([2]), 1e3, 1.0)
    (gradient,) = torch.autograd.grad(loss, [z])
    torch.testing.assert_close(gradient, (z - v).detach() / 6, atol=1e-3, rtol=0)


def test_without_the_soft_term_it_is_plain_training() -> None:
    logits, y = (
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 2, PADDING]),
    )
    loss = distillation_loss(logits, torch.full((4, 3), 7.0), y, 3.0, 0.0)
    torch.testing.assert_close(loss, masked_cross_entropy(logits, y))


def test_padding_inside_a_sequence_does_not_count_and_an_unlabelled_sequence_does() -> None:
    generator = torch.Generator().manual_seed(0)
    student_logits, taught = torch.randn(2, 2, 3, 4, generator=generator)
    y = torch.tensor([[1, PADDING, 2], [PADDING] * 3])
    changed_padding, changed_unlabelled = student_logits.clone(), student_logits.clone()
    changed_padding[0, 1] += torch.tensor([5.0, 0, 0, 0])
    changed_unlabelled[1, 1] += torch.tensor([5.0, 0, 0, 0])
    base, same, other = (
        distillation_loss(z, taught, y, 3.0, 0.7)
        for z in (student_logits, changed_padding, changed_unlabelled)
    )
    torch.testing.assert_close(base, same)
    assert abs(float(base - other)) > 0.01


@pytest.mark.slow
def test_a_student_learns_from_what_the_teacher_says_about_unlabelled_rows(world: dict[str, Any]) -> None:
    nothing = np.full(len(world["x"]), PADDING, np.int32)
    options = DistilOptions(epochs=30, batch_size=16, lr=0.01)
    result = distil(
        [world["teacher"]], world["student"], world["x"], nothing, options, np.random.default_rng(0)
    )
    x = torch.from_numpy(world["unseen"])
    wanted = world["teacher"](x).argmax(1)
    before, after = (
        (module(x).argmax(1) == wanted).float().mean() for module in (world["student"], result[0])
    )
    assert before < 0.6
    assert after > 0.85
    assert len(result[1]) == 30 * -(-len(nothing) // 16)
    assert not result[0].training


def test_distilling_changes_neither_module_and_repeats_bit_for_bit(world: dict[str, Any]) -> None:
    def tensors(module: nn.Module) -> dict[str, np.ndarray]:
        return params.params_of(module)

    given = [tensors(world["teacher"]), tensors(world["student"])]
    state = torch.random.get_rng_state()
    options = DistilOptions(epochs=3)
    results = [
        distil(
            [world["teacher"]], world["student"], world["x"], world["y"], options, np.random.default_rng(1)
        )
        for _ in range(2)
    ]
    assert results[0][1] == results[1][1]
    first, second = (tensors(result[0]) for result in results)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    for before, module in zip(given, (world["teacher"], world["student"]), strict=True):
        assert all(np.array_equal(before[name], value) for name, value in tensors(module).items())
    assert torch.equal(state, torch.random.get_rng_state())


@given(seed=st.integers(0, 10**6), temperature=st.floats(0.5, 10), teachers=st.integers(1, 4))
def test_an_ensemble_speaks_with_the_mean_of_its_probabilities(
    seed: int, temperature: float, teachers: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=(teachers, 3, 5)) * 3
    agreed = consensus([torch.from_numpy(each) for each in logits], temperature).numpy()
    expected = np.mean([softmax(each / temperature) for each in logits], axis=0)
    np.testing.assert_allclose(softmax(agreed / temperature), expected, atol=1e-9)


@pytest.mark.slow
def test_a_hint_brings_the_students_layer_nearer_to_the_teachers(world: dict[str, Any]) -> None:
    """Of what the teacher's layer does over unseen rows, a linear map of the student's explains more with hints."""

    def unexplained(student: nn.Module) -> float:
        x = torch.from_numpy(world["unseen"])
        with torch.no_grad():
            ours, theirs = (module.get_submodule("hidden.0")(x) for module in (student, world["teacher"]))
        ours = torch.cat([ours, torch.ones(len(x), 1)], 1)
        rest = theirs - ours @ torch.linalg.lstsq(ours, theirs).solution
        return float(rest.square().mean() / theirs.var(0).mean())

    left = {}
    for hint in (0.0, 10.0):
        options = DistilOptions(epochs=15, lr=0.01, alpha=0.0, hint=hint)
        student = zoo.get("mlp", input_shape=(8,), classes=3, hidden=[4]).build(2)
        found = distil([world["teacher"]], student, world["x"], world["y"], options, np.random.default_rng(0))
        left[hint] = unexplained(found[0])
        assert set(found[0].state_dict()) == set(student.state_dict())  # the regressor is thrown away
    assert left[10.0] < 0.9 * left[0.0]


def test_a_hints_weight_means_the_same_however_large_the_teachers_answers_are(world: dict[str, Any]) -> None:
    """The teacher's layer a thousand times larger, and what reads it a thousand times smaller: the same teacher."""
    losses = []
    for factor in (1.0, 1024.0):
        teacher = copy.deepcopy(world["teacher"])
        with torch.no_grad():
            for name, by in (
                ("hidden.0.weight", factor),
                ("hidden.0.bias", factor),
                ("fc.weight", 1 / factor),
            ):
                teacher.get_parameter(name).mul_(by)
        options = DistilOptions(epochs=1, lr=0.0, weight_decay=0.0, hint=1.0)
        regressor_at_rest = distil(
            [teacher], world["student"], world["x"], world["y"], options, np.random.default_rng(0)
        )
        plain = distil(
            [teacher],
            world["student"],
            world["x"],
            world["y"],
            replace(options, hint=0.0),
            np.random.default_rng(0),
        )
        losses.append((np.mean(regressor_at_rest[1]), np.mean(plain[1])))
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-4)
    for hinted, plain_loss in losses:
        assert 0.5 < hinted - plain_loss < 2.0  # a regressor that knows nothing errs by about all of it


class Bypassed(nn.Module):
    """A layer with weights that nobody calls, one that answers with two tensors, and none in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.recurrent, self.fc = (
            nn.Linear(8, 4),
            nn.GRU(8, 4, batch_first=True),
            nn.Linear(4, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.recurrent(x.unsqueeze(1))[0][:, -1])
        return logits


@pytest.mark.parametrize(
    ("student", "layer", "fault"),
    [
        (Bypassed, "unused", "the student's layer unused is not called; name another one in hint_student"),
        (Bypassed, "", "the student's layer in the middle does not return a single tensor"),
        (nn.Identity, "", "the student has no layer with weights of two axes or more"),
    ],
)
def test_a_layer_that_cannot_be_hinted_at_is_refused(
    student: Callable[[], nn.Module], layer: str, fault: str, world: dict[str, Any]
) -> None:
    options = DistilOptions(epochs=1, hint=1.0, hint_student=layer)
    with pytest.raises(StepRefused, match=fault):
        distil([world["teacher"]], student(), world["x"], world["y"], options, np.random.default_rng(0))


def test_sequences_of_other_lengths_are_no_hints() -> None:
    class Convolved(nn.Module):
        def __init__(self, stride: int) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv1d(1, 4, 3, stride), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.fc(self.conv(x.unsqueeze(1)).mean(-1))
            return logits

    x, y = np.zeros((4, 9), np.float32), np.zeros(4, np.int32)
    options = DistilOptions(hint=1.0, hint_student="conv", hint_teacher="conv")
    narrow = Convolved(2)
    narrow.conv = nn.Conv1d(1, 2, 3, 2)
    narrow.fc = nn.Linear(2, 3)
    with pytest.raises(StepRefused, match="name layers of the same kind"):
        distil([Convolved(1)], narrow, x, y, options, np.random.default_rng(0))


def test_hints_pass_between_maps_of_different_extent() -> None:
    wide, narrow = (
        zoo.get("cnn", input_shape=(6, 6), classes=3, channels=channels) for channels in ([6, 6], [2, 3])
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6, 6)).astype(np.float32), rng.integers(0, 3, 20).astype(np.int32)
    layers = {"hint_teacher": "conv1", "hint_student": "conv2"}
    options = DistilOptions(epochs=1, hint=1.0, **layers)
    found = distil([wide.build(0)], narrow.build(1), x, y, options, rng)
    assert np.isfinite(found[1]).all()
    with pytest.raises(
        StepRefused, match=r"hint_teacher = 'conv3' is not a layer of the teacher; it has conv1, conv2"
    ):
        distil([wide.build(0)], narrow.build(1), x, y, DistilOptions(hint=1.0, hint_teacher="conv3"), rng)
    with pytest.raises(StepRefused, match="name layers of the same kind"):
        distil(
            [wide.build(0)],
            narrow.build(1),
            x,
            y,
            DistilOptions(hint=1.0, hint_teacher="fc", hint_student="conv1"),
            rng,
        )


def test_a_step_distils_into_the_same_architecture_into_another_or_goes_on(world: dict[str, Any]) -> None:
    spec = zoo.get("mlp", input_shape=(8,), classes=3, hidden=[32])
    original = StepModel(spec, world["teacher"])
    data = Data(world["x"], world["y"], world["unseen"], world["taught"])
    context = Context(5, original)
    again = step(original, data, DistilOptions(epochs=8, lr=0.01), context)
    assert again.spec == spec and again.module is not original.module
    assert report.quality(again.module, data.x_test, data.y_test) > 0.85
    assert again.facts["teachers"]["original"]["accuracy"] == 1.0

    other = step(original, data, DistilOptions(epochs=1, student="mlp(hidden=[4])"), context)
    assert other.spec.options == {"hidden": [4]}
    assert report.parameters(other.module) == 8 * 4 + 4 + 4 * 3 + 3

    onwards = step(original, data, DistilOptions(epochs=0, start="current"), context)
    assert all(np.array_equal(a, b) for a, b in zip(params.params_of(onwards.module).values(), params.params_of(original.module).values(), strict=True))  # fmt: skip

    pruned = StepModel(spec, zoo.get("mlp", input_shape=(8,), classes=3, hidden=[9]).build(0))
    with pytest.raises(StepRefused, match="cannot start from fresh weights; start = 'current' trains it"):
        step(pruned, data, DistilOptions(), context)
    with pytest.raises(StepRefused, match="give only one"):
        step(pruned, data, DistilOptions(student="mlp", start="current"), context)


def test_several_teachers_are_taken_by_name_and_must_fit(world: dict[str, Any]) -> None:
    spec = zoo.get("mlp", input_shape=(8,), classes=3, hidden=[32])
    other = zoo.get("mlp", input_shape=(8,), classes=4)
    data = Data(world["x"], world["y"], world["unseen"], world["taught"])
    models = {"one": StepModel(spec, world["teacher"]), "two": StepModel(spec, spec.build(9)), "odd": StepModel(other, other.build(0))}  # fmt: skip
    context = Context(5, models["one"], models)
    options = DistilOptions(epochs=1, teachers="one, two", student="logreg")
    assert set(step(models["one"], data, options, context).facts["teachers"]) == {"one", "two"}
    with pytest.raises(
        StepRefused, match=r"teacher 'odd' takes \(8,\) to 4 classes, the student \(8,\) to 3"
    ):
        step(models["one"], data, DistilOptions(teachers="odd"), context)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("logregg", "did you mean 'logreg'"),
        ("mlp(8)", "options are key=value"),
        ("mlp(hiden=[4])", "hiden"),
        ("mlp(hidden=open('x'))", "not of the form"),
    ],
)
def test_a_student_that_cannot_be_is_refused(text: str, fault: str) -> None:
    with pytest.raises(StepRefused, match=fault):
        parse_model(text, zoo.get("logreg", input_shape=(8,), classes=3))


def test_a_students_vocabulary_is_the_teachers() -> None:
    teacher = zoo.get("textcls", input_shape=(8,), classes=3, input_dtype="int32", vocab=50)
    assert parse_model("textcls(width=8, heads=2)", teacher).vocab == 50


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    """A fixed random teacher over 8 features, and a student that has seen nothing."""
    rng = np.random.default_rng(0)
    teacher = zoo.get("mlp", input_shape=(8,), classes=3, hidden=[32]).build(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(3)
    student = zoo.get("mlp", input_shape=(8,), classes=3, hidden=[16]).build(2)
    x, unseen = (rng.normal(size=(rows, 8)).astype(np.float32) for rows in (300, 200))
    y, taught = (teacher(torch.from_numpy(rows)).argmax(1).int().numpy() for rows in (x, unseen))
    return {"teacher": teacher, "student": student, "x": x, "y": y, "unseen": unseen, "taught": taught}
