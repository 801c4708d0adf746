"""Documents that are packed into one window are computed as one by one."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import zoo
from models.job import JobError
from models.pretrain import plan_rules
from models.pretrain.data import documents
from models.pretrain.parallelize import sizes_of
from models.pretrain.plan import parse
from models.pretrain.training import TrainingOptions
from models.zoo.spec import ModelSpec

LENGTH, VOCAB, END = 24, 12, 11
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"width": 16, "layers": 2, "heads": 2},
    "charlm": {"width": 16, "layers": 2, "heads": 2},
    "moe": {"width": 16, "layers": 2, "heads": 2, "experts": 2, "chosen": 1},
}


def spec_of(name: str, **options: Any) -> ModelSpec:
    return zoo.get(name, input_shape=(LENGTH,), classes=VOCAB, **{**MODELS[name], **options})


@pytest.mark.parametrize("name", MODELS)
def test_a_window_of_documents_is_computed_as_they_are_one_by_one(name: str) -> None:
    spec = spec_of(name)
    module, alone = documents.confined(spec, END, "job").build(3).eval(), spec.build(3).eval()
    rng = np.random.default_rng(5)
    sizes = [[5, 9, 1, 6], [24], [1, 1, 22]]
    x = torch.from_numpy(rng.integers(0, END, (len(sizes), LENGTH)))
    for row, lengths in zip(x, sizes, strict=True):
        row[np.cumsum(lengths) - 1] = END
    with torch.inference_mode():
        together = module(x)
        for row, (own, lengths) in enumerate(zip(x, sizes, strict=True)):
            for start, end in itertools.pairwise(np.cumsum([0, *lengths]).tolist()):
                padded = torch.zeros(1, LENGTH, dtype=x.dtype)
                padded[0, : end - start] = own[start:end]
                expected = alone(padded)[0, : end - start]
                torch.testing.assert_close(together[row, start:end], expected, atol=2e-5, rtol=1e-5)
        # what is left out matters
        if name == "gpt":
            assert (together[0, 10:] - alone(x)[0, 10:]).abs().max() > 1e-3


def test_params_and_their_names_are_those_of_the_model() -> None:
    spec = spec_of("gpt")
    own, confined = spec.build(3).state_dict(), documents.confined(spec, END, "job").build(3).state_dict()
    assert list(own) == list(confined)
    assert all(torch.equal(own[name], confined[name]) for name in own)


def test_a_copied_module_has_documents_of_its_own() -> None:
    module = documents.confined(spec_of("gpt"), END, "job").build(3).eval()
    twin = copy.deepcopy(module)
    x = torch.tensor([[1] * 10 + [END] + [2] * 13])
    with torch.inference_mode():
        expected = module(x)
        twin(torch.full_like(x, 3))
        attention = module.get_submodule("layers.0")(module.get_submodule("embedding")(x))
        twin(torch.full_like(x, 3))
        assert torch.equal(module(x), expected)
        assert torch.equal(attention, module.get_submodule("layers.0")(module.get_submodule("embedding")(x)))


@given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=4))
def test_documents_and_positions_are_counted(rows: list[list[int]]) -> None:
    number, position = documents.find_documents(torch.tensor(rows), 3)
    for row, numbers, positions in zip(rows, number.tolist(), position.tolist(), strict=True):
        document, place = 0, 0
        for token, found in zip(row, zip(numbers, positions, strict=True), strict=True):
            assert found == (document, place)
            document, place = (document + 1, 0) if token == 3 else (document, place + 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda: spec_of("gpt", attention="block_sparse"), r"has attention that takes no mask: layers.0.attention.core \(BlockSparseAttention\); use \"concatenate\""),
        (lambda: zoo.get("lstm", input_shape=(LENGTH,), classes=VOCAB), r"model 'lstm' does not say where its attention is"),
    ],
)  # fmt: skip
def test_models_that_cannot_are_refused(spec: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        documents.confined(spec(), END, "job.json")


def test_plans_whose_ranks_do_not_see_whole_sequences_are_refused() -> None:
    sizes = sizes_of(documents.confined(spec_of("gpt"), END, "job"))
    options = TrainingOptions(batch_size=8)
    for plan in ("dp=2", "tp=2,sequence=true", "dp=2,zero=3"):
        plan_rules.check(parse(plan), sizes, options)
    for plan, message in (
        ("cp=2", "of which a cp rank has a part: use cp=1, or packing = concatenate"),
        ("pp=2", "which later stages do not see: use pp=1, or packing = concatenate"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_rules.check(parse(plan), sizes, options)
        plan_rules.check(parse(plan), sizes_of(spec_of("gpt")), options)
