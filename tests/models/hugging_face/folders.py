"""Small random models of transformers, saved as people have them, and the same models as ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models import zoo
from models.hugging_face.checkpoint import open_checkpoint, write
from models.pretrain import initial
from models.pretrain.params import params_of
from models.zoo import ModelSpec

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB, LENGTH = 60, 24
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
_SCALED: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2 untied": (
        "GPT2LMHeadModel",
        {**_GPT2, "tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu"},
    ),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama 3": (
        "LlamaForCausalLM",
        {**_LLAMA, "rope_parameters": _SCALED, "tie_word_embeddings": True, "head_dim": 12},
    ),
    "llama biased": (
        "LlamaForCausalLM",
        {**_LLAMA, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
    ),
    "qwen2": ("Qwen2ForCausalLM", {**_LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "bert": ("BertForMaskedLM", {**_BERT, "mask_token_id": 5}),
    "bert classifier": ("BertForSequenceClassification", {**_BERT, "mask_token_id": 5, "num_labels": 3}),
}


def save(name: str, folder: Path, seed: int = 0, **options: Any) -> Any:
    """A model of transformers with random weights, biases and norms too; writes it into `folder`. `options`: of `save_pretrained`."""
    import transformers

    kind, sizes = MODELS[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(seed)
    model = cls(cls.config_class(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, **options)
    return model


def theirs(folder: Path) -> Any:
    """The model of a folder as transformers loads it, which must find every tensor and use every one."""
    import json

    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, about = getattr(transformers, name).from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    problems = {key: value for key, value in about.items() if value}
    assert not problems, problems
    return model.eval()


def ours(folder: Path) -> tuple[nn.Module, ModelSpec]:
    """The model of a folder as ours."""
    checkpoint = open_checkpoint(folder)
    spec = spec_of(checkpoint.description.described())
    module = initial.with_params(spec, folder, new_head=False).build(0).eval()
    return module, spec


def spec_of(described: Mapping[str, Any]) -> ModelSpec:
    shape = {**described, "input_shape": tuple(described["input_shape"])}
    return zoo.get(shape.pop("name"), **shape.pop("options"), **shape)


def write_ours(module: nn.Module, spec: ModelSpec, folder: Path, **options: Any) -> None:
    params = params_of(module)
    write(
        folder,
        spec.described(),
        {name: value.shape for name, value in params.items()},
        params.__getitem__,
        **options,
    )


def rows(count: int = 3, least: int = 0) -> torch.Tensor:
    return torch.randint(least, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits_of_theirs(model: Any, x: torch.Tensor) -> torch.Tensor:
    mask = {"attention_mask": (x != 0).long()} if model.config.model_type == "bert" else {}
    logits: torch.Tensor = model(input_ids=x, **mask).logits
    return logits
