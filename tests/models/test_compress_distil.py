"""Distillation: the loss is Hinton's, padding does not count, and a student learns from a teacher alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import zoo
from models.compress.distil import Options, distil, distillation_loss
from models.labels import PADDING
from models.pretrain import params
from models.zoo.spec import masked_cross_entropy

OPTIONS = Options(epochs=1, temperature=3.0, alpha=0.7)


def softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6), temperature=st.floats(0.5, 10), alpha=st.floats(0, 1), rows=st.integers(1, 6)
)
def test_the_loss_equals_a_naive_twin(seed: int, temperature: float, alpha: float, rows: int) -> None:
    rng = np.random.default_rng(seed)
    said, taught = rng.normal(size=(2, rows, 5))
    y = rng.integers(PADDING, 5, size=rows).astype(np.int32)
    p, q = softmax(taught / temperature), softmax(said / temperature)
    soft = (p * np.log(p / q)).sum(-1).mean() * temperature**2
    hard = [-np.log(softmax(said)[row, label]) for row, label in enumerate(y) if label != PADDING]
    expected = alpha * soft + (1 - alpha) * (np.mean(hard) if hard else 0)
    options = replace(OPTIONS, temperature=temperature, alpha=alpha)
    actual = distillation_loss(torch.from_numpy(said), torch.from_numpy(taught), torch.from_numpy(y), options)
    assert float(actual) == pytest.approx(expected, abs=1e-9)


def test_at_high_temperature_logits_are_matched() -> None:
    """Hinton 2015, equation 4: the gradient tends to (z - v) / classes for logits of zero mean; T² is in ours."""
    generator = torch.Generator().manual_seed(0)
    z, v = torch.randn(2, 1, 6, generator=generator, dtype=torch.float64)
    z, v = (z - z.mean()).requires_grad_(), v - v.mean()
    loss = distillation_loss(z, v, torch.tensor([2]), replace(OPTIONS, temperature=1e3, alpha=1.0))
    (gradient,) = torch.autograd.grad(loss, [z])
    torch.testing.assert_close(gradient, (z - v).detach() / 6, atol=1e-3, rtol=0)


def test_without_the_soft_term_it_is_plain_training() -> None:
    logits, y = (
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 2, PADDING]),
    )
    loss = distillation_loss(logits, torch.full((4, 3), 7.0), y, replace(OPTIONS, alpha=0.0))
    torch.testing.assert_close(loss, masked_cross_entropy(logits, y))


def test_padding_inside_a_sequence_does_not_count_and_an_unlabelled_sequence_does() -> None:
    generator = torch.Generator().manual_seed(0)
    said, taught = torch.randn(2, 2, 3, 4, generator=generator)
    y = torch.tensor([[1, PADDING, 2], [PADDING] * 3])
    changed_padding, changed_unlabelled = said.clone(), said.clone()
    changed_padding[0, 1] += torch.tensor([5.0, 0, 0, 0])
    changed_unlabelled[1, 1] += torch.tensor([5.0, 0, 0, 0])
    base, same, other = (
        distillation_loss(z, taught, y, OPTIONS) for z in (said, changed_padding, changed_unlabelled)
    )
    torch.testing.assert_close(base, same)
    assert abs(float(base - other)) > 0.01


def test_a_student_learns_from_what_the_teacher_says_about_unlabelled_rows(world: dict[str, Any]) -> None:
    nothing = np.full(len(world["x"]), PADDING, np.int32)
    options = Options(epochs=30, batch_size=16, lr=0.01)
    result = distil(
        world["teacher"], world["student"], world["x"], nothing, options, np.random.default_rng(0)
    )
    x = torch.from_numpy(world["unseen"])
    wanted = world["teacher"](x).argmax(1)
    before, after = (
        (module(x).argmax(1) == wanted).float().mean() for module in (world["student"], result.student)
    )
    assert before < 0.6
    assert after > 0.85
    assert len(result.losses) == 30 * -(-len(nothing) // 16)
    assert not result.student.training


def test_distilling_changes_neither_module_and_repeats_bit_for_bit(world: dict[str, Any]) -> None:
    def tensors(module: nn.Module) -> dict[str, np.ndarray]:
        return params.params_of(module)

    given = [tensors(world["teacher"]), tensors(world["student"])]
    state = torch.random.get_rng_state()
    options = Options(epochs=3)
    results = [
        distil(world["teacher"], world["student"], world["x"], world["y"], options, np.random.default_rng(1))
        for _ in range(2)
    ]
    assert results[0].losses == results[1].losses
    first, second = (tensors(result.student) for result in results)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    for before, module in zip(given, (world["teacher"], world["student"]), strict=True):
        assert all(np.array_equal(before[name], value) for name, value in tensors(module).items())
    assert torch.equal(state, torch.random.get_rng_state())


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
    y = teacher(torch.from_numpy(x)).argmax(1).int().numpy()
    return {"teacher": teacher, "student": student, "x": x, "y": y, "unseen": unseen}
