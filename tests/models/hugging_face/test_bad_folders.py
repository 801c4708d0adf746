"""Folders that cannot be read are refused with the file, the key or the tensor, and what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from models import zoo
from models.hugging_face.checkpoint import open_checkpoint, write
from models.hugging_face.config import read
from models.hugging_face.folder import open_folder
from models.options import JobError
from models.pretrain import initial
from models.pretrain.params import params_of
from models.zoo import ModelSpec

LLAMA: dict[str, Any] = {
    "norm": "rms", "activation": "swiglu", "positions": "rope", "kv_heads": 2, "bias": "qkv",
}  # fmt: skip
TENSOR = "model.layers.1.self_attn.k_proj.weight"


def small(name: str = "gpt", **options: Any) -> ModelSpec:
    return zoo.get(name, input_shape=(8,), classes=20, width=16, layers=2, heads=4, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen2."""
    write_model(small(**LLAMA), tmp_path)
    return tmp_path


def write_model(spec: ModelSpec, folder: Path, **options: Any) -> None:
    params = params_of(spec.build(0))
    shapes = {name: value.shape for name, value in params.items()}
    write(folder, spec.described(), shapes, params.__getitem__, **options)


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def change_tensors(folder: Path, changed: Mapping[str, np.ndarray | None]) -> None:
    path = folder / "model.safetensors"
    tensors = {**safetensors.numpy.load_file(path), **changed}
    safetensors.numpy.save_file({name: value for name, value in tensors.items() if value is not None}, path)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', expected one of gpt2, llama, qwen2, bert"),
        ({"model_type": None}, "model_type is None, expected one of"),
        ({"hidden_size": "16"}, "hidden_size is '16', expected a whole number of 1 or more"),
        ({"vocab_size": None}, "vocab_size is None, expected a whole number"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', expected one of silu"),
        ({"use_sliding_window": True}, "use_sliding_window is True, which these models do not have"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn', expected default or llama3"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3', and factor is None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5, expected 1.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not known here"),
        ({"num_experts": 8}, "num_experts = '8' is not known here"),
    ],
)
def test_a_config_that_is_not_covered_is_refused_by_its_key(
    keys: dict[str, Any], reason: str, folder: Path
) -> None:
    change(folder / "config.json", **keys)
    with pytest.raises(JobError, match=rf"config.json: .*{reason}"):
        read(folder)


def test_llamas_biases_of_the_network_alone_are_refused(folder: Path) -> None:
    change(folder / "config.json", model_type="llama", mlp_bias=True)
    with pytest.raises(JobError, match=r"mlp_bias is true without attention_bias"):
        read(folder)


def test_a_config_that_is_none_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    with pytest.raises(JobError, match=r"config.json holds list, expected an object"):
        read(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(JobError, match=r"config.json is not JSON"):
        read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(JobError, match=r"config.json: No such file"):
        read(folder)


def test_missing_and_unknown_tensors_are_named(folder: Path) -> None:
    change_tensors(folder, {TENSOR: None})
    with pytest.raises(JobError, match=rf"tensor '{TENSOR}' is missing"):
        open_checkpoint(folder)
    change_tensors(
        folder, {TENSOR: np.zeros((8, 16), np.float32), "model.q_norm.weight": np.zeros(4, np.float32)}
    )
    with pytest.raises(
        JobError, match=r"model.safetensors: tensor 'model.q_norm.weight' is none of a qwen2 with this"
    ):
        open_checkpoint(folder)


def test_a_tensor_of_another_shape_is_named_with_its_file(folder: Path) -> None:
    change_tensors(folder, {TENSOR: np.zeros((4, 16), np.float32)})
    with pytest.raises(
        JobError,
        match=rf"model.safetensors: tensor '{TENSOR}' is \[4, 16\] as 'layers.1.attention.key.weight', expected \[8, 16\]",
    ):
        initial.with_params(small(**LLAMA), folder, new_head=False)


def test_a_model_with_other_options_is_refused(folder: Path) -> None:
    with pytest.raises(
        JobError, match=r"does not fit model 'gpt': .*'layers.0.attention.key.weight', expected \[16, 16\]"
    ):
        initial.with_params(small(**{**LLAMA, "kv_heads": 4}), folder, new_head=False)


def test_integers_are_no_weights(folder: Path) -> None:
    change_tensors(folder, {TENSOR: np.zeros((8, 16), np.int8)})
    with pytest.raises(JobError, match=rf"tensor '{TENSOR}' is I8, expected F64, F32, F16, BF16"):
        open_checkpoint(folder).read("layers.1.attention.key.weight")


def test_pickles_are_refused_unopened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        JobError, match=r"pytorch_model.bin: is a file of Python pickles.*save the weights as safetensors"
    ):
        open_folder(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(JobError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        open_folder(folder)


def test_a_damaged_file_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nonsense" * 9)
    with pytest.raises(JobError, match=r"model.safetensors is not a readable .safetensors file"):
        open_folder(folder)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    write_model(small(**LLAMA), tmp_path, shard_bytes=2000)
    index = tmp_path / "model.safetensors.index.json"
    known = json.loads(index.read_text())["weight_map"]
    for changed, reason in (
        ({TENSOR: "elsewhere.safetensors"}, r"elsewhere.safetensors does not exist"),
        (
            {TENSOR: "../x.safetensors"},
            rf"tensor '{TENSOR}' is in '../x.safetensors', expected a .safetensors file of",
        ),
        ({TENSOR: min(known.values())}, rf"tensor '{TENSOR}' is in model-00001-of-.*, expected model-"),
        ({"more": min(known.values())}, r"tensor 'more' is in model-.*, expected no such tensor"),
    ):
        change(index, weight_map={**known, **changed})
        with pytest.raises(JobError, match=reason):
            open_folder(tmp_path)
    change(index, weight_map={})
    with pytest.raises(JobError, match=r"index.json has no weight_map"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("gpt", {"attention": "block_sparse"}, "attention is 'block_sparse', expected 'full'"),
        ("gpt", {"norm": "rms"}, "norm is 'rms', expected 'layer' for GPT-2"),
        ("gpt", {"activation": "swiglu"}, "activation is 'swiglu' with learned positions"),
        ("gpt", {"kv_heads": 2}, "GPT-2 has as many heads of keys as of queries"),
        ("gpt", {"positions": "rope"}, "norm is 'layer', expected 'rms' for Llama and Qwen2"),
        ("gpt", {**LLAMA, "dropout": 0.1}, "dropout is 0.1, and Llama and Qwen2 have none"),
        ("bert", {"vocab": 20, "pool": "mean"}, "pool is 'mean', and BERT classifies by the 'first' token"),
    ],
)
def test_a_model_without_a_counterpart_is_not_written(
    name: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=f"cannot be written in Hugging Face's layout: {reason}"):
        write_model(small(name, **options), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_parts_of_tensors_are_those_of_the_whole(tmp_path: Path) -> None:
    """Matrices of GPT-2 are transposed, and query, key and value are in one."""
    spec = small(bias="all")
    write_model(spec, tmp_path)
    checkpoint, params = open_checkpoint(tmp_path), params_of(spec.build(0))
    assert checkpoint.shapes == {name: value.shape for name, value in params.items()}
    for name, value in params.items():
        box = tuple(slice(size // 4, size // 2) for size in value.shape)
        np.testing.assert_array_equal(checkpoint.read(name, box).numpy(), value[box], err_msg=name)
        np.testing.assert_array_equal(checkpoint.read(name, box[:1]).numpy(), value[box[:1]], err_msg=name)


def test_the_mask_of_bert_is_found_or_asked_for(tmp_path: Path) -> None:
    write_model(small("bert", vocab=20, objective="masked"), tmp_path)
    assert read(tmp_path).options["mask_token"] == 20
    config = tmp_path / "config.json"
    change(config, mask_token_id=None)
    with pytest.raises(
        JobError, match=r"mask_token_id is None, and no tokenizer.json or vocab.txt beside it names"
    ):
        read(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\nthe\n[MASK]\n")
    assert read(tmp_path).options["mask_token"] == 2
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "[MASK]"}]}))
    assert read(tmp_path).options["mask_token"] == 7
