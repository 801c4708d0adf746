"""Rows held out of the training set are scored under every plan as by one process, and change nothing in the training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.pretrain import evaluation, initial, params, trainer, validation, world
from models.pretrain import plan as plans
from models.pretrain.data.batches import Arrays, BatchRandom
from models.pretrain.data.held_out import Part, Rest, draw
from models.pretrain.recovery.checkpoint import Checkpointer, Policy
from models.pretrain.recovery.curve import Curve
from models.pretrain.recovery.manifest import steps_in
from tests.models.pretrain.curves import settings, spec_of, tokens
from tests.support import ranks
from tests.support.long import extended

SCORED = "tests.models.pretrain.test_validation:scored"
BEST = "tests.models.pretrain.test_validation:best"
PLANS = [
    "dp=4,zero=3",
    "dp=2,cp=2,zero=1",
    "dp=2,tp=2,zero=2,sequence=true,loss_parallel=true",
    "tp=2,pp=2,schedule=interleaved",
    "dp=2,pp=2,schedule=zbv,zero=2",
    "dp=4,batch_shares=1+2+3+4",
]
MORE_PLANS = [
    "dp=4",
    "dp=2,pp=2,schedule=naive",
    "pp=4,schedule=gpipe",
    "dp=2,pp=2,schedule=zero-bubble",
    "dp=4,zero=2,shards=2,microbatches=2",
    "cp=2,tp=2",
    "dp=2,tp=2,zero=3",
]
EXPERTS = {"name": "moe", "experts": 4, "chosen": 2}
WITH_EXPERTS = ["dp=4,ep=2", "dp=2,ep=2,pp=2"]
ROWS = 11
"""One batch of 8, and a remainder that some ranks have nothing of."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "model"), [(PLANS, {}), *extended((MORE_PLANS, {}), (WITH_EXPERTS, EXPERTS))]
)
def test_plans_score_what_one_process_scores(texts: list[str], model: dict[str, Any]) -> None:
    ((losses, scores, whole),) = ranks.run(1, SCORED, ["dp=1"], model)[0]
    ((without, _, _),) = ranks.run(1, SCORED, ["dp=1"], model, every=0)[0]

    assert losses == without
    np.testing.assert_allclose(scores[-1], whole, rtol=1e-5)
    assert len(set(scores)) == len(scores)
    for rank in ranks.run(4, SCORED, texts, model):
        for text, (trained, found, _) in zip(texts, rank, strict=True):
            np.testing.assert_allclose(found, scores, atol=1e-5, err_msg=text)
            np.testing.assert_allclose(trained, losses, atol=1e-5, err_msg=text)


@pytest.mark.slow
def test_ranks_that_step_alone_are_scored_at_their_mean_and_step_on_as_before() -> None:
    text = "dp=2,sync_every=4"
    scored, plain = (ranks.run(2, SCORED, [text], {}, every=every)[0][0] for every in (1, 0))

    assert scored[0] == plain[0]
    # after the last synchronization the mean is the model
    assert scored[1][-1] == pytest.approx(scored[2], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp=2,zero=3", *extended("tp=2", "pp=2", "dp=2,sync_every=2")])
def test_best_checkpoint_is_kept_survives_a_restart_and_becomes_the_result(text: str, tmp_path: Path) -> None:
    for losses, kept, resumed_best, result in ranks.run(2, BEST, text, str(tmp_path)):
        lowest = min(losses, key=lambda step: losses[step])

        assert 0 < lowest < max(losses), "the last model must not be the best"
        assert lowest in kept and max(losses) in kept
        assert resumed_best == (lowest, losses[lowest])
        assert result == pytest.approx(losses[lowest], rel=1e-5)


@given(st.integers(2, 60), st.data())
def test_rows_held_out_and_the_others_are_all_rows_once(rows: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, rows - 1))
    source = Arrays(np.arange(rows), np.arange(rows, dtype=np.int32))
    held = draw(rows, count, np.random.default_rng(data.draw(st.integers(0, 9))))
    random = BatchRandom(np.random.default_rng(0), 0, np.arange(0))

    part, rest = Part(source, held), Rest(source, held)

    assert (len(part), len(rest)) == (count, rows - count)
    read = [each.read(np.arange(len(each)), random)[0].tolist() for each in (part, rest)]
    assert read == [held.tolist(), sorted(set(range(rows)) - set(held.tolist()))]


@given(st.sets(st.integers(1, 50), min_size=1), st.integers(1, 5), st.data())
def test_best_never_expires(steps: set[int], keep: int, data: st.DataObject) -> None:
    best = data.draw(st.sampled_from(sorted(steps)))

    expired = Policy(keep=keep, keep_best=True).expired(sorted(steps), best)

    assert best not in expired
    assert set(steps) - set(expired) == {*sorted(steps)[-keep:], best}


def scored(
    texts: Sequence[str], model: dict[str, Any], every: int = 1
) -> list[tuple[list[float], list[float], float]]:
    """Runs in the ranks. By plan: losses of the steps, of the validations, and the gathered model's on the same rows."""
    with world.join(plans.parse(texts[0])) as first:
        return [_scored(world.build(plans.parse(text), first.device), model, every) for text in texts]


def _scored(here: world.World, model: dict[str, Any], every: int) -> tuple[list[float], list[float], float]:
    spec, held = spec_of(**model), _held()
    training = trainer.build(spec, tokens(), settings(validate_every=every), here, seed=5)
    losses: list[float] = []
    scores: list[float] = []

    def note(progress: trainer.Progress) -> None:
        losses.extend(progress.losses)
        scores.extend([] if progress.validation_loss is None else [progress.validation_loss])

    trainer.train(training, note, 1, validation=validation.build(training, spec, held) if every else None)
    final, whole = validation.final_scores(training, spec, held), 0.0
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        if params.save_parts(training.parallel.parts, spec, here, path) is not None:
            module = initial.with_params(spec, path, new_head=False).build(0)
            scores_of_file = evaluation.evaluate(module, spec, held, here.device)
            whole = scores_of_file.loss
            assert final.accuracy == scores_of_file.accuracy
            np.testing.assert_allclose(final.loss, whole, rtol=1e-5)
    if training.local is not None and every:
        scores.append(validation.build(training, spec, held).loss())
    return losses, scores, whole


def best(text: str, folder: str) -> tuple[dict[int, float], list[int], tuple[int, float], float]:
    """Runs in the ranks: validation losses by step of a training that gets worse, its checkpoints, the best that a
    restarted process finds, and the validation loss of the result."""
    with world.join(plans.parse(text)) as here:
        spec, held, steps = spec_of(), _held(), 12
        options = settings(validate_every=1, steps=steps, lr=0.3)
        training = trainer.build(spec, tokens(), options, here, seed=5)
        scoring = validation.build(training, spec, held)
        policy = Policy(every=5, keep=1, keep_best=True, result="best")
        curve, losses = Curve(Path(folder) / "curve.jsonl"), {}

        def note(progress: trainer.Progress) -> None:
            losses[training.step] = progress.validation_loss
            if here.rank == 0:
                curve.add(training.step, progress.losses, [0.0], progress.validation_loss)

        saver = Checkpointer(Path(folder), policy, training.identity, here)
        trainer.train(training, note, 1, saver, validation=scoring)
        again = Checkpointer(Path(folder), policy, training.identity, here)
        again.restore_best(curve.validation_losses() if here.rank == 0 else {})
        again.load_best(training.state)
        return losses, steps_in(Path(folder)), again.best, scoring.loss()  # type: ignore[return-value]


def _held() -> Arrays:
    rows = tokens(ROWS + 20)
    return Arrays(rows.x[20:], rows.y[20:])
