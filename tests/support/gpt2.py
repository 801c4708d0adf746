"""transformers' GPT-2 with the weights of `models.zoo.gpt`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from models.hugging_face.checkpoint import write
from models.pretrain.params import params_of
from models.zoo import ModelSpec

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def of(module: nn.Module, spec: ModelSpec) -> Any:
    """A `GPT2LMHeadModel` that computes what `module`, a `gpt` of full attention, does."""
    from transformers import GPT2LMHeadModel

    params = params_of(module)
    shapes = {name: value.shape for name, value in params.items()}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), spec.described(), shapes, params.__getitem__)
        return GPT2LMHeadModel.from_pretrained(folder).eval()
