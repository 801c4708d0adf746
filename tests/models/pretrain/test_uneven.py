"""Processes with rows of their own, some with fewer: the training of one process that has all of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

HERE = "tests.models.pretrain.test_uneven"


@pytest.mark.parametrize("plan", ["dp=2,zero=3", *extended("dp=2", "dp=2,zero=1")])
def test_a_process_that_ends_early_follows_the_others(plan: str) -> None:
    (alone,) = ranks.run(1, f"{HERE}:together", [3, 6])
    for found in ranks.run(2, f"{HERE}:apart", plan, [3, 6]):
        np.testing.assert_allclose(found, alone, atol=1e-5)


def test_a_process_may_have_nothing() -> None:
    (alone,) = ranks.run(1, f"{HERE}:together", [0, 2])
    for found in ranks.run(2, f"{HERE}:apart", "dp=2", [0, 2]):
        np.testing.assert_allclose(found, alone, atol=1e-5)


# what the processes run


def apart(plan: str, steps: list[int]) -> list[float]:
    """Losses of processes that have rows for so many steps each, and of a step on rows all know at the end."""
    from models.pretrain import plan as plans
    from models.pretrain import trainer, world
    from models.pretrain.data import uneven
    from tests.models.pretrain.curves import settings, small_gpt, tokens

    with world.join(plans.parse(plan)) as here:
        training = trainer.build(small_gpt(), tokens(), settings(steps=20), here, seed=5)
        uneven.train(training, _own(here.rank, steps[here.rank]), small_gpt())
        training.train_step()
        return training.losses()


def together(steps: list[int]) -> list[float]:
    """The same with the rows of all in one process."""
    import torch

    from models.pretrain import plan as plans
    from models.pretrain import trainer, world
    from models.pretrain.data.batches import Batch
    from tests.models.pretrain.curves import settings, small_gpt, tokens

    with world.join(plans.parse("dp=1")) as here:
        training = trainer.build(small_gpt(), tokens(), settings(steps=20), here, seed=5)
        own = [list(_own(rank, count)) for rank, count in enumerate(steps)]
        for step in range(max(steps)):
            x, y = (np.concatenate([rows[step][part] for rows in own if step < len(rows)]) for part in (0, 1))
            training.train_on(Batch(torch.from_numpy(x), torch.from_numpy(y).long(), int((y >= 0).sum())))
        training.train_step()
        return training.losses()


def _own(rank: int, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:  # type: ignore[type-arg]
    """Two rows a step from the first process, three from the second, nowhere the same."""
    from tests.models.pretrain.curves import tokens

    source = tokens(40)
    for step in range(steps):
        first = 20 * rank + (2 + rank) * step
        yield source.read(np.arange(first, first + 2 + rank))
