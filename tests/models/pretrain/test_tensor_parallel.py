"""What processes that share matrices keep, and what they exchange."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from models.pretrain import params, plan_rules, trainer, world
from models.pretrain import plan as plans
from models.pretrain.parallelize import sizes_of
from models.pretrain.training import TrainingOptions
from tests.models.pretrain.curves import BATCH, LENGTH, settings, spec_of, tokens
from tests.support import ranks
from tests.support.whole_model import whole

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


HERE = "tests.models.pretrain.test_tensor_parallel"
UNEVEN: dict[str, Any] = {"vocab": 49}
ANNOTATED: dict[str, Any] = {"name": "tests.models.pretrain.annotated:build"}


@pytest.mark.extended
def test_vocabulary_that_tp_does_not_divide_is_split_and_trained_as_one() -> None:
    """Params as well as losses: a row that no token asks for moves by weight decay alone, and is easily lost."""
    expected = ranks.run(1, f"{HERE}:trained", ["dp=1"], UNEVEN)[0][0]
    texts = ["dp=2,tp=2,zero=3", "tp=4,sequence=true,loss_parallel=true", "tp=2,pp=2"]

    for text, found in zip(texts, ranks.run(4, f"{HERE}:trained", texts, UNEVEN)[0], strict=True):
        assert found.keys() == expected.keys()
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], atol=2e-5, err_msg=f"{text}: {name}")


def test_rows_of_the_vocabulary_are_kept_once() -> None:
    kept = [shapes["head.weight"][0] for shapes in ranks.run(4, f"{HERE}:kept", "tp=4", UNEVEN)]

    assert sum(kept) == 49
    assert max(kept) == 13


def test_sequence_splits_what_lies_between_matrices_and_gradients_stay_those_of_one() -> None:
    expected = ranks.run(1, f"{HERE}:first_pass", "dp=1", {})[0]

    for found in ranks.run(2, f"{HERE}:first_pass", "tp=2,sequence=true", {}):
        assert set(expected["hidden"]) == {(BATCH, LENGTH, 32)}
        assert set(found["hidden"]) == {(BATCH, LENGTH // 2, 32)}
        for name, gradient in found["gradients"].items():
            np.testing.assert_allclose(gradient, expected["gradients"][name], atol=1e-6, err_msg=name)


def test_loss_parallel_never_gathers_logits() -> None:
    """Every element is counted that a process gets from others to make a tensor whole."""
    with_logits, without = (
        ranks.run(2, f"{HERE}:first_pass", text, {})[0]["gathered"]
        for text in ("tp=2", "tp=2,loss_parallel=true")
    )

    assert max(with_logits) == BATCH * LENGTH * 48
    assert not without


def test_torch_exchanges_what_annotated_operators_want_elsewhere() -> None:
    """`up` gives features of all tokens, `gate` wants tokens with all features, `down` features again: two exchanges
    forward and two backward; the sums are `down`'s output, and the gradient of what `up` was given."""
    alone = ranks.run(1, f"{HERE}:first_pass", "dp=1", ANNOTATED)[0]

    for found in ranks.run(2, f"{HERE}:first_pass", "tp=2", ANNOTATED):
        # gloo has no all-to-all between dims: torch gathers there and keeps a part
        assert found["collectives"] == {"all_gather_into_tensor": 4, "all_reduce": 2}
        for name, gradient in found["gradients"].items():
            np.testing.assert_allclose(gradient, alone["gradients"][name], atol=1e-6, err_msg=name)


def test_model_without_a_head_is_refused_split_logits() -> None:
    with pytest.raises(plans.PlanError, match="loss_parallel needs a model that says what its head is"):
        plan_rules.check(
            plans.parse("tp=2,loss_parallel=true"),
            sizes_of(spec_of(**ANNOTATED)),
            TrainingOptions(batch_size=8),
        )


def trained(texts: list[str], model: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Runs in the ranks. By plan, the params after a few steps, in process 0."""
    found = []
    with world.join(plans.parse(texts[0])) as first:
        for text in texts:
            here, spec = world.build(plans.parse(text), first.device), spec_of(**model)
            training = trainer.build(spec, tokens(), settings(steps=3), here, seed=5)
            for _ in range(training.steps):
                training.train_step()
            full = whole(training.parallel.parts, spec, here)
            if full is not None:
                found.append(params.params_of(full))
    return found


def kept(text: str, model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Runs in the ranks. Shapes of this process's part of what is split."""
    with world.join(plans.parse(text)) as here:
        training = trainer.build(spec_of(**model), tokens(), settings(), here, seed=5)
        named = training.parallel.parts[0].named_parameters()
        return {name: tuple(p.to_local().shape) for name, p in named if isinstance(p, DTensor)}


def first_pass(text: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in the ranks. Of the first batch's pass: shapes after every layer, gradients made whole, collectives by
    name, for a model without layers, and sizes of what was gathered."""
    with world.join(plans.parse(text)) as here:
        training = trainer.build(spec_of(**model), tokens(), settings(), here, seed=5)
        (module,) = training.parallel.parts
        hidden: list[tuple[int, ...]] = []
        layers = list(getattr(module, "layers", torch.nn.ModuleDict()).values())
        for layer in layers:
            layer.register_forward_hook(lambda _, inputs, output: hidden.append(tuple(output.shape)))
        gathered: list[int] = []
        # torch's loses its way in what it takes for the tree of modules, where hooks call operators
        with nullcontext() if layers else CommDebugMode() as debug, _Gathered(gathered):  # type: ignore[no-untyped-call]
            training.run(training.batches[0])
        counts = debug.get_comm_counts() if debug else {}
        collectives = {str(call).rpartition(".")[2]: number for call, number in counts.items()}
        training.sums.finish()
        return {
            "hidden": hidden,
            "collectives": collectives,
            "gathered": gathered,
            "gradients": {
                name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).numpy()
                for name, p in module.named_parameters()
                if p.grad is not None
            },
        }


class _Gathered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of every result of an all-gather."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # to be called again with the exchanges that it makes of it
        result = func(*args, **(kwargs or {}))
        if "all_gather" in str(func) and isinstance(result, torch.Tensor):
            self.sizes.append(result.numel())
        return result
