"""`model.init` names a file, or a folder in Hugging Face's layout: the same params, whatever number of files they are in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments.experiment import with_start
from coordinator.experiments.schema import Experiment
from coordinator.runs.initial_params import read_init
from edge_client.wire import arrays
from models import zoo
from models.hugging_face.checkpoint import write
from models.pretrain.params import params_of

TENSORS = {
    "body.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "body.bias": np.array([0.5, -1], np.float32),
    "head.weight": np.array([[2, 3]], np.float32),
}
BERT = """
import numpy as np
from transformers import BertConfig, BertForSequenceClassification

SIZE = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128,
        "max_position_embeddings": 8, "attn_implementation": "eager"}


class Classifier(BertForSequenceClassification):
    def forward(self, x):
        return super().forward(input_ids=x.long()).logits


def build(input_shape, classes):
    return Classifier(BertConfig(**SIZE, num_labels=classes))


def load(seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, 60)
    return {"x": (rng.integers(0, 20, (60, 6)) + 20 * y[:, None]).astype(np.int32), "y": y}
"""


def test_a_folder_of_several_files_has_the_params_of_one_file(tmp_path: Path) -> None:
    folder = in_files(
        tmp_path / "pretrained",
        {"a.safetensors": ["head.weight"], "b.safetensors": ["body.weight", "body.bias"]},
    )
    whole = tmp_path / "whole" / "model.safetensors"
    whole.parent.mkdir()
    whole.write_bytes(arrays.encode(TENSORS))
    for init in (folder, whole, whole.parent):
        found = arrays.decode(read(init))
        assert {name: value.tolist() for name, value in found.items()} == {
            name: value.tolist() for name, value in TENSORS.items()
        }


@pytest.mark.parametrize(
    ("files", "index", "reason"),
    [
        ({}, None, "neither model.safetensors nor model.safetensors.index.json"),
        ({}, {"metadata": {}}, "has no weight_map"),
        (
            {},
            {"weight_map": {"w": "../secret.safetensors"}},
            "'../secret.safetensors', which is not the name of a file in the folder",
        ),
        ({}, {"weight_map": {"w": "gone.safetensors"}}, "'gone.safetensors', which is not in the folder"),
        (
            {"a.safetensors": ["body.bias"], "b.safetensors": ["body.bias"]},
            {"weight_map": {"body.bias": "a.safetensors", "other": "b.safetensors"}},
            "tensor 'body.bias' is in two files",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    files: dict[str, list[str]], index: object, reason: str, tmp_path: Path
) -> None:
    folder = in_files(tmp_path / "pretrained", files)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=reason) as refused:
        read(folder)
    assert f"model.init = {str(folder)!r}" in str(refused.value)


@pytest.mark.extended
@pytest.mark.slow
def test_a_hugging_face_model_is_adapted_by_lora_and_loads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder that `save_pretrained` writes, in several files, to params that the same class loads."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers, which comes with litert-torch, is not installed"
    )
    scope: dict[str, object] = {}
    exec(compile(BERT, "clinic.py", "exec"), scope)
    build = scope["build"]
    assert callable(build)
    transformers.set_seed(3)
    pretrained = build((6,), 2)
    pretrained.save_pretrained(tmp_path / "pretrained", max_shard_size="20KB")
    assert len(list((tmp_path / "pretrained").glob("*.safetensors"))) > 1
    (tmp_path / "clinic.py").write_text(BERT)
    monkeypatch.chdir(tmp_path)
    trained = fedloop.simulate(
        {
            "model": {
                "name": "clinic:build",
                "init": str(tmp_path / "pretrained"),
                "adapt": "lora(2, 8)",
            },
            "data": {"dataset": "clinic:load"},
            "federation": {"rounds": 2, "clients": 2, "clients_per_round": 2, "runtimes": {"torch": 1.0}},
            "local": {"lr": 0.2},
        },
        out=tmp_path / "run",
    )
    every = sum(value.nbytes for value in pretrained.state_dict().values())
    assert trained.report["rounds"][0]["bytes_up"] < 2 * every / 3
    from safetensors.torch import load_file

    missing, unexpected = pretrained.load_state_dict(
        load_file(tmp_path / "run" / "model.safetensors"), strict=False
    )
    assert (missing, unexpected) == ([], [])


@pytest.mark.parametrize(
    ("name", "options", "shard_bytes"),
    [
        ("gpt", {"bias": "all", "tie": True}, 10**9),
        (
            "gpt",
            {"bias": "qkv", "norm": "rms", "activation": "swiglu", "positions": "rope", "kv_heads": 2},
            2000,
        ),
        ("bert", {"objective": "classify", "vocab": 20, "mask_token": 5}, 10**9),
    ],
)
def test_a_published_model_has_the_params_of_ours(
    name: str, options: dict[str, Any], shard_bytes: int, tmp_path: Path
) -> None:
    """Its tensors have other names, some are transposed, and some are several of ours in one."""
    spec = zoo.get(name, input_shape=(8,), classes=20, width=16, layers=2, heads=4, **options)
    params = params_of(spec.build(1))
    shapes = {key: value.shape for key, value in params.items()}
    write(tmp_path / "hf", spec.described(), shapes, params.__getitem__, shard_bytes=shard_bytes)
    document = with_start({"model": {"init": str(tmp_path / "hf"), "dropout": 0}})
    model = document["model"]
    assert model["name"] == name and {key: model[key] for key in options} == options
    experiment = Experiment.model_validate(document)
    found = arrays.decode(read_init(experiment) or b"")
    assert found.keys() == params.keys()
    for key, value in params.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_a_published_model_with_other_tensors_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "vocab_size": 20,
        "n_positions": 8,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
    }
    folder = in_files(tmp_path / "hf", {"a.safetensors": ["body.weight"]})
    (folder / "config.json").write_text(json.dumps(config))
    document = with_start({"model": {"init": str(folder)}})
    with pytest.raises(
        UserError, match=r"model.init = .*tensor 'transformer.h.0.attn.c_attn.bias' is missing"
    ):
        read_init(Experiment.model_validate(document))
    (folder / "config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
    with pytest.raises(UserError, match="activation_function is 'relu'"):
        with_start({"model": {"init": str(folder)}})
    own = {"model": {"name": "clinic:build", "init": str(folder)}}
    assert with_start(own) == own  # its class has the folder's own names


def in_files(folder: Path, files: dict[str, list[str]]) -> Path:
    folder.mkdir()
    for file, names in files.items():
        (folder / file).write_bytes(arrays.encode({name: TENSORS[name] for name in names}))
    listed = {name: file for file, names in files.items() for name in names}
    if listed:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def read(init: Path) -> bytes:
    content = read_init(Experiment.model_validate({"model": {"name": "mlp", "init": str(init)}}))
    assert content is not None
    return content
