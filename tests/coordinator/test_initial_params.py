"""`model.init` names a file, or a folder in Hugging Face's layout: the same params, whatever number of files they are in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.runs.initial_params import read_init
from edge_client.wire import arrays

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
