"""A chain of transforms: each sees the update of the one before, and gets back what it kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_client.data.examples import Examples
from edge_client.train.trainer import Trainer, TrainTask
from strategies.client_rules import ClientRule, ControlVariates, Correction
from strategies.params import Params
from strategies.strategy import ClipNorm
from strategies.update import Streams, Update, UpdateTransform, apply_all
from tests.support.quadratic import QuadraticRuntime

ROWS = Examples(np.zeros((4, 1), np.float32), np.zeros(4, np.int32))


@dataclass(frozen=True)
class RoundToStep:
    """Sends multiples of `step`; adds what rounding lost to the next update. Seide 2014, error feedback."""

    step: float

    def apply(self, update: Update, state: Streams) -> tuple[Update, dict[str, Params]]:
        residual = state.get("residual", {})
        wanted = {name: value + residual.get(name, np.float32(0)) for name, value in update.delta.items()}
        sent = {
            name: np.round(value / self.step).astype(np.float32) * self.step for name, value in wanted.items()
        }
        return replace(update, delta=sent), {"residual": {name: wanted[name] - sent[name] for name in wanted}}


class RoundedScaffold(ControlVariates):
    """A rule whose chain has two steps that keep state."""

    def transforms(self, correction: Correction, lr: float) -> tuple[UpdateTransform, ...]:
        return (*super().transforms(correction, lr), RoundToStep(0.25))


def updated(values: list[float]) -> Update:
    return Update({"w": np.array(values, np.float32)}, num_examples=1, num_steps=1, train_loss=0.0)


@given(st.lists(st.integers(-256, 256).map(lambda n: n / 64), min_size=1, max_size=8))
def test_with_error_feedback_all_that_was_trained_is_sent_in_the_end(values: list[float]) -> None:
    state: dict[str, Params] = {}
    total = 0.0
    for value in values:
        sent, state = apply_all([RoundToStep(0.25)], updated([value]), state)
        total += float(sent.delta["w"][0])
    assert total + float(state["residual"]["w"][0]) == sum(values)


def test_a_transform_gets_the_update_of_the_one_before() -> None:
    first, _ = apply_all([ClipNorm(1.0), RoundToStep(0.75)], updated([3.0, 4.0]), {})
    second, _ = apply_all([RoundToStep(0.75), ClipNorm(1.0)], updated([3.0, 4.0]), {})
    assert first.delta["w"].tolist() == [0.75, 0.75] != second.delta["w"].tolist()


def test_an_empty_chain_changes_and_keeps_nothing() -> None:
    update = updated([1.0])
    assert apply_all([], update, {"residual": {}}) == (update, {})


def test_a_client_keeps_the_state_of_every_transform_of_its_chain() -> None:
    rule: ClientRule = RoundedScaffold()
    params, control = {"w": np.float32([1.0])}, {"control": {"w": np.float32([0.0])}}

    def train(state: dict[str, Params], rule: ClientRule) -> tuple[Update, dict[str, Params]]:
        task = TrainTask(0, 4, 0.1, steps=2, rule=rule, broadcast=control)
        result = Trainer(QuadraticRuntime(1.0, 0.0)).train(params, task, ROWS, state)
        return result.update, result.client_state

    plain, kept_plain = train({}, ControlVariates())
    first, kept = train({}, rule)
    assert sorted(kept) == ["control", "residual"]
    assert kept["control"]["w"] == kept_plain["control"]["w"]
    assert first.extras["control"]["w"] == plain.extras["control"]["w"]
    np.testing.assert_array_equal(first.delta["w"] + kept["residual"]["w"], plain.delta["w"])
    assert train(kept, rule)[0].delta["w"] != first.delta["w"]
