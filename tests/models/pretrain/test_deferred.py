"""A module created without memory gets, shard by shard, the values that creating it whole gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from models import tensor_file, zoo
from models.pretrain import initial, params, trainer, world
from models.pretrain.deferred.recording import Unrecordable, record
from models.pretrain.dtensor import full_tensor
from models.pretrain.plan import parse
from models.pretrain.recovery import shards
from models.zoo.layout import Chain, Layout
from models.zoo.spec import ModelSpec
from tests.models.pretrain.curves import settings, small_gpt, spec_of, tokens
from tests.support import ranks
from tests.support.long import extended

SEED = 5
HERE = "tests.models.pretrain.test_deferred"
GPT: dict[str, Any] = {"width": 32, "layers": 3, "heads": 4}


def _initialised() -> nn.Module:
    """Everything that initialisers do: views, orthogonal matrices, copies, constants, numbers of earlier tensors."""
    module = nn.Linear(8, 6)
    nn.init.orthogonal_(module.weight)
    module.register_buffer("constant", torch.tensor([1.0, 2.0]))
    module.register_buffer("index", torch.arange(5) * 2, persistent=False)
    module.scaled = nn.Parameter(torch.ones(3) * torch.tensor([1.0, 2.0, 3.0]))
    module.table = nn.Embedding(5, 3, padding_idx=1)
    module.drawn = nn.Parameter(torch.randn(3, 4))
    module.derived = nn.Parameter(torch.zeros(3) + module.drawn.detach()[:, 0])
    with torch.no_grad():
        module.table.weight[2:3].normal_()
    module.rates = tuple(each.item() for each in torch.linspace(0, 0.1, 3))  # type: ignore[assignment]
    return module


CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    "gpt": spec_of(**GPT).module,
    "tied": spec_of(**GPT, tie=True).module,
    "moe": spec_of("moe", **GPT, experts=4).module,
    "lstm": zoo.get("lstm", input_shape=(16,), classes=9, width=8, layers=2).module,
    "resnet": zoo.get("resnet", input_shape=(8, 8), classes=3, blocks=[1, 1], width=8).module,
    "copied layers": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 3),
    "initialised": _initialised,
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_replay_gives_the_values_of_the_constructor_in_any_selection(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        whole = CONSTRUCTORS[name]()
    expected = dict(whole.named_parameters(remove_duplicate=False)) | dict(
        whole.named_buffers(remove_duplicate=False)
    )
    before = torch.get_rng_state()
    recorded = record(CONSTRUCTORS[name])
    assert recorded.refs.keys() == expected.keys()
    storages = sorted({ref.storage for ref in recorded.refs.values()})
    for chosen in (storages, *([each] for each in storages)):
        found: dict[str, torch.Tensor] = {}
        deliver = {each: _collect(recorded.refs, each, found) for each in chosen}
        recorded.program.replay(SEED, deliver)
        assert found.keys() == {each for each, ref in recorded.refs.items() if ref.storage in chosen}
        for each, tensor in found.items():
            assert torch.equal(tensor, expected[each]), each
    assert all(tensor.is_meta for tensor in recorded.module.state_dict().values())
    assert torch.equal(torch.get_rng_state(), before)


def _collect(refs: Any, storage: int, found: dict[str, torch.Tensor]) -> Any:
    def deliver(view: Any) -> None:
        found.update({name: view(ref).clone() for name, ref in refs.items() if ref.storage == storage})

    return deliver


def _seeds() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Linear(2, 2)


def _seeds_apart() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return nn.Linear(2, 2)


def _own_generator() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    return module


def _decides() -> nn.Module:
    module = nn.Linear(2, 2)
    if torch.rand(()) > 0.5:
        nn.init.zeros_(module.bias)
    return module


def _keeps() -> nn.Module:
    module, scale = nn.Linear(2, 2), torch.randn(3)
    module.scaled = lambda x: x * scale  # type: ignore[assignment]
    return module


def _rejects() -> nn.Module:
    module = nn.Linear(8, 6)
    nn.init.trunc_normal_(module.weight)
    return module


@pytest.mark.parametrize(
    ("constructor", "reason"),
    [
        (_seeds, "seeds torch"),
        (_seeds_apart, "seeds torch"),
        (_own_generator, "a random generator of its own"),
        (_decides, "reads the value"),
        (_keeps, "neither parameters nor buffers"),
        (_rejects, "reads the value"),
    ],
)
def test_what_cannot_be_replayed_is_refused(constructor: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(Unrecordable, match=reason):
        record(constructor)


class Truncated(Chain):
    """Its initialiser draws until numbers fit, which a record cannot repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(at): nn.Embedding(48, 48) for at in range(2)})
        for layer in self.layers.values():
            nn.init.trunc_normal_(layer.get_parameter("weight"), std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(layer(x) for layer in self.layers.values())
        return total


def truncated() -> ModelSpec:
    return ModelSpec(
        "truncated", Truncated, (16,), 48, "int32", "next_token", layout=Layout(("layers.*",)), vocab=48
    )


def initial_values(plan: str, spec: str, path: str = "") -> str:
    """Checks every value of a built trainer against the whole model's; returns its note. Runs in the ranks."""
    whole = (
        truncated()
        if spec == "truncated"
        else small_gpt(vocab=51)
        if spec == "gpt"
        else spec_of(spec, experts=4)
    )
    whole = initial.with_params(whole, Path(path), new_head=True) if path else whole
    expected = params.named_tensors(whole.build(SEED))
    with world.join(parse(plan)) as here:
        training = trainer.build(whole, tokens(), settings(), here, SEED)
        for name, tensor in training.state._named().items():
            assert torch.equal(full_tensor(tensor.detach()), expected[name]), name
        training.train_step()
        assert np.isfinite(training.losses()).all()
        return training.note


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,tp=2,zero=3",
        *extended(
            "dp=3,zero=3",
            "dp=4,zero=3,shards=2",
            "dp=2,zero=2,precision=bf16",
            "tp=2,sequence=true,loss_parallel=true",
            "pp=2,tp=2,schedule=interleaved",
            "pp=2,dp=2,zero=3",
            "cp=2,dp=2,zero=3",
        ),
    ],
)
def test_shards_have_the_values_of_the_whole_model(plan: str, tmp_path: Path) -> None:
    assert set(ranks.run(parse(plan).processes, f"{HERE}:initial_values", plan, "gpt")) == {""}
    path = tmp_path / "model.safetensors"
    params.save(small_gpt(vocab=51).build(11), path)
    assert set(ranks.run(parse(plan).processes, f"{HERE}:initial_values", plan, "gpt", str(path))) == {""}


@pytest.mark.slow
def test_experts_are_created_apart() -> None:
    assert ranks.run(2, f"{HERE}:initial_values", "dp=2,ep=2", "moe") == ["", ""]


@pytest.mark.slow
def test_a_model_that_cannot_be_replayed_is_built_whole_and_that_is_said() -> None:
    for note in ranks.run(2, f"{HERE}:initial_values", "dp=2,zero=3", "truncated"):
        assert "builds the whole model 'truncated'" in note and "reads the value of a tensor" in note


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
        st.tuples(st.sampled_from(["f4", "f8", "i8", "u1"]), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
def test_files_are_those_of_safetensors(described: dict[str, tuple[str, list[int]]]) -> None:
    arrays = {
        name: np.random.default_rng(1).integers(0, 99, shape).astype(dtype)
        for name, (dtype, shape) in described.items()
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    entries = {name: tensor_file.Entry(tuple(each.shape), each.dtype) for name, each in tensors.items()}
    content = bytearray()
    names = tensor_file.ordered(entries)
    assert tensor_file.write(entries, (tensors[name] for name in names), content.extend) == len(content)
    assert bytes(content) == safetensors.numpy.save(arrays)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
def test_parts_of_files_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.arange(24).view(4, 6).to(dtype)
    with shards.write(tmp_path / "rank-00000.safetensors", {"x": x, "step": torch.tensor(3.0)}) as file:
        file.flush()
    stored = shards.stored_in(tmp_path)
    part = stored["x"].parts[0][1].read((slice(1, 3), slice(2, 5)))
    assert torch.equal(part, x[1:3, 2:5]) and shards.whole(stored, "step") == 3
    assert torch.equal(shards.whole(stored, "x"), x)
    with pytest.raises(ValueError, match="no tensor 'y'"):
        shards.whole(stored, "y")


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from("abcd"), st.just((0,)), st.tuples(st.integers(1, 9))),
            unique_by=lambda p: p[0],
        ),
        min_size=1,
        max_size=4,
    )
)
def test_every_part_is_written_by_one_process_that_has_it(parts: list[list[shards.Part]]) -> None:
    names = shards.assign(parts)
    written = [part for rank, mine in enumerate(parts) for part in mine if part[0] in names[rank]]
    assert sorted(written) == sorted({part for mine in parts for part in mine})
