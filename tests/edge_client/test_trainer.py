"""The Trainer's story around any runtime: what goes into an update, and how a model is scored."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.data.examples import PADDING, Examples, NoExamples
from edge_client.train.evaluation import EVALUATION_ROWS, Evaluation, merge, score
from edge_client.train.trainer import Trainer, TrainTask
from strategies.client_rules import ControlVariates, Correction, Proximal
from strategies.params import Params


class RecordingRuntime:
    """Adds 1 to `w` a step, says what it was given, and scores x itself as logits."""

    name = "recording"
    trainable = ("w",)

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.correction: Correction | None = None
        self.requested_rows: list[int] = []

    def take_steps(
        self, params: Params, batches: Iterable[Examples], lr: float, correction: Correction, seed: int
    ) -> tuple[Params, list[float]]:
        self.batches = [batch.y.tolist() for batch in batches]
        self.correction = correction
        return {"w": params["w"] + np.float32(len(self.batches))}, [float(len(b)) for b in self.batches]

    def logits(self, params: Params, x: np.ndarray) -> np.ndarray:
        self.requested_rows.append(len(x))
        return x


PARAMS: Params = {"w": np.array([1.0, 2.0], np.float32), "frozen": np.array([7.0], np.float32)}


def counted_examples(count: int) -> Examples:
    return Examples(np.zeros((count, 3), np.float32), np.arange(count, dtype=np.int32))


def test_an_update_says_what_was_done() -> None:
    runtime = RecordingRuntime()
    result = Trainer(runtime).train(
        PARAMS, TrainTask(seed=4, batch_size=4, lr=0.1, epochs=2), counted_examples(10)
    )
    update = result.update
    assert {name: value.tolist() for name, value in update.delta.items()} == {"w": [6.0, 6.0]}
    assert (update.num_examples, update.num_steps) == (10, 6)
    # Losses 4, 4, 2 of batches with 4, 4 and 2 examples: the mean is over examples, not over batches.
    assert update.train_loss == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)
    assert result.client_state == {} and update.extras == {}
    assert sorted(label for batch in runtime.batches[:3] for label in batch) == list(range(10))


def test_the_seed_of_the_task_fixes_the_batches() -> None:
    def batches(seed: int) -> list[list[int]]:
        runtime = RecordingRuntime()
        Trainer(runtime).train(
            PARAMS, TrainTask(seed=seed, batch_size=4, lr=0.1, steps=7), counted_examples(10)
        )
        return runtime.batches

    assert batches(3) == batches(3) != batches(4)
    assert len(batches(3)) == 7


def test_the_rule_gives_the_correction_and_gets_the_outcome() -> None:
    runtime = RecordingRuntime()
    Trainer(runtime).train(PARAMS, TrainTask(0, 4, 0.1, steps=1, rule=Proximal(mu=0.3)), counted_examples(3))
    assert runtime.correction == Correction(mu=0.3)

    control = {"control": {"w": np.array([0.5, 0.5], np.float32)}}
    kept = {"control": {"w": np.array([0.25, 0.0], np.float32)}}
    task = TrainTask(0, 4, 0.5, steps=2, rule=ControlVariates(), broadcast=control)
    result = Trainer(runtime).train(PARAMS, task, counted_examples(3), kept)
    assert runtime.correction.offset["w"].tolist() == [0.25, 0.5]
    # cᵢ − c + (w₀ − w) / (K · lr) = cᵢ − c − 2
    assert result.client_state["control"]["w"].tolist() == [-2.25, -2.5]
    assert result.update.extras["control"]["w"].tolist() == [-2.5, -2.5]


def test_a_client_without_examples_gets_that_reason() -> None:
    with pytest.raises(NoExamples, match="no local examples"):
        Trainer(RecordingRuntime()).train(PARAMS, TrainTask(0, 4, 0.1, epochs=1), counted_examples(0))


def naive_score(logits: np.ndarray, y: np.ndarray) -> tuple[float, list[int], list[int]]:
    loss, correct, labels = 0.0, [], []
    for row_logits, row_labels in zip(logits, y, strict=True):
        hits = counted = 0
        for scores, label in zip(np.atleast_2d(row_logits), np.atleast_1d(row_labels), strict=True):
            if label == PADDING:
                continue
            top = max(float(s) for s in scores)
            loss += top + math.log(sum(math.exp(float(s) - top) for s in scores)) - float(scores[label])
            hits += int(int(np.argmax(scores)) == label)
            counted += 1
        correct.append(hits)
        labels.append(counted)
    return loss, correct, labels


@settings(deadline=None)
@given(
    rows=st.integers(1, 6),
    length=st.none() | st.integers(1, 4),
    classes=st.integers(1, 5),
    scale=st.sampled_from([1.0, 100.0, 1e4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_score_is_cross_entropy_and_accuracy(
    rows: int, length: int | None, classes: int, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (rows,) if length is None else (rows, length)
    logits = rng.normal(0, scale, (*shape, classes)).astype(np.float32)
    y = rng.integers(PADDING, classes, shape).astype(np.int32)

    evaluation = score(logits, y)

    loss, correct, labels = naive_score(logits, y)
    assert evaluation.loss_sum == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert evaluation.correct.tolist() == correct
    assert evaluation.labels.tolist() == labels
    assert evaluation.loss == pytest.approx(loss / max(1, sum(labels)), rel=1e-12, abs=1e-12)
    assert evaluation.accuracy == sum(correct) / max(1, sum(labels))


def test_evaluation_goes_through_all_rows_a_fixed_number_at_a_time() -> None:
    count = 2 * EVALUATION_ROWS + 5
    rng = np.random.default_rng(0)
    data = Examples(
        rng.normal(size=(count, 3)).astype(np.float32), rng.integers(0, 3, count).astype(np.int32)
    )
    runtime = RecordingRuntime()
    evaluation = Trainer(runtime).evaluate({}, data)
    assert runtime.requested_rows == [EVALUATION_ROWS, EVALUATION_ROWS, 5]
    full = score(data.x, data.y)
    assert evaluation.correct.tolist() == full.correct.tolist()
    assert evaluation.loss_sum == pytest.approx(full.loss_sum, rel=1e-12)


def test_nothing_to_evaluate_is_zero_of_zero() -> None:
    nothing = merge([])
    assert (nothing.loss, nothing.accuracy, len(nothing.correct)) == (0.0, 0.0, 0)
    assert Trainer(RecordingRuntime()).evaluate({}, counted_examples(0)).loss == 0.0


def test_merging_keeps_the_order_of_rows() -> None:
    first = Evaluation(1.0, np.array([1, 0]), np.array([1, 1]))
    second = Evaluation(2.0, np.array([3]), np.array([4]))
    both = merge([first, second])
    assert (both.loss_sum, both.correct.tolist(), both.labels.tolist()) == (3.0, [1, 0, 3], [1, 1, 4])
