"""transformers' GPT-2 with the weights of `models.zoo.gpt`, whose matrices have no biases: GPT-2's are zero."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from models.zoo import ModelSpec

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def of(module: nn.Module, spec: ModelSpec) -> Any:
    """A `GPT2LMHeadModel` that computes what `module`, a `gpt` of full attention, does."""
    from transformers import GPT2Config, GPT2LMHeadModel

    options = spec.options
    config = GPT2Config(
        vocab_size=spec.classes,
        n_positions=spec.input_shape[0],
        n_embd=options["width"],
        n_layer=options["layers"],
        n_head=options["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=options["tie"],
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = GPT2LMHeadModel(config).eval()
    ours = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    renamed = {
        "transformer.wte.weight": ours["embedding.token.weight"],
        "transformer.wpe.weight": ours["embedding.position.weight"],
        "transformer.ln_f.weight": ours["norm.weight"],
        "transformer.ln_f.bias": ours["norm.bias"],
        "lm_head.weight": ours["head.weight"],
    }
    for layer in range(options["layers"]):
        here, there = f"layers.{layer}", f"transformer.h.{layer}"
        for norm, name in (("norm1", "ln_1"), ("norm2", "ln_2")):
            for kind in ("weight", "bias"):
                renamed[f"{there}.{name}.{kind}"] = ours[f"{here}.{norm}.{kind}"]
        attention = [ours[f"{here}.attention.{name}.weight"].T for name in ("query", "key", "value")]
        renamed[f"{there}.attn.c_attn.weight"] = torch.cat(attention, 1)
        renamed[f"{there}.attn.c_proj.weight"] = ours[f"{here}.attention.out.weight"].T
        renamed[f"{there}.mlp.c_fc.weight"] = ours[f"{here}.mlp.up.weight"].T
        renamed[f"{there}.mlp.c_proj.weight"] = ours[f"{here}.mlp.down.weight"].T
    unknown = theirs.load_state_dict(renamed, strict=False)
    biases = [name for name in unknown.missing_keys if name.endswith(".bias")]
    if unknown.unexpected_keys or biases != list(unknown.missing_keys):
        raise ValueError(f"not the weights of a GPT-2: {unknown}")
    with torch.no_grad():
        for name in biases:
            theirs.get_parameter(name).zero_()
    return theirs
