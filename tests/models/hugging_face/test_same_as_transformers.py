"""Models of transformers and ours with the same weights have the same logits, read and written in any form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models import zoo
from tests.models.hugging_face.folders import (
    MODELS,
    VOCAB,
    logits_of_theirs,
    ours,
    rows,
    save,
    theirs,
    write_ours,
)

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

every_model = pytest.mark.parametrize("name", MODELS)
TOLERANCE = 1e-4


def padded(name: str) -> torch.Tensor:
    x = rows(least=1)
    if "bert" in name:
        x[0, 15:] = 0
    return x


@every_model
def test_the_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    x = padded(name)

    module, _ = ours(tmp_path)

    expected = logits_of_theirs(model, x)
    assert float(expected.std()) > 0.1
    with torch.inference_mode():
        torch.testing.assert_close(module(x.int()), expected, rtol=0, atol=TOLERANCE)


@every_model
def test_a_written_folder_is_loaded_by_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "theirs")
    x = padded(name)
    module, spec = ours(tmp_path / "theirs")

    write_ours(module, spec, tmp_path / "ours")

    again = theirs(tmp_path / "ours")
    assert again.num_parameters() == model.num_parameters()
    torch.testing.assert_close(logits_of_theirs(again, x), logits_of_theirs(model, x), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folder_of_several_files_is_read_and_written(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    module, spec = ours(tmp_path / "theirs")

    write_ours(module, spec, tmp_path / "ours", shard_bytes=20_000)

    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    x = rows()
    again = logits_of_theirs(theirs(tmp_path / "ours"), x)
    torch.testing.assert_close(again, logits_of_theirs(model, x), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gpt2", "llama 3"])
def test_a_body_without_a_head_is_read(name: str, tmp_path: Path) -> None:
    """As `gpt2` of the hub, whose names have no prefix."""
    model = save(name, tmp_path)
    model.base_model.save_pretrained(tmp_path)

    module, _ = ours(tmp_path)

    x = rows()
    with torch.inference_mode():
        torch.testing.assert_close(module(x.int()), logits_of_theirs(model, x), rtol=0, atol=TOLERANCE)


def test_bfloat16_is_read(tmp_path: Path) -> None:
    save("qwen2", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)

    module, _ = ours(tmp_path)

    x = rows()
    with torch.inference_mode():
        torch.testing.assert_close(
            module(x.int()), logits_of_theirs(theirs(tmp_path), x), rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {}),
        ("gpt", {"bias": "qkv", "tie": True, "activation": "gelu"}),
        ("bert", {"vocab": VOCAB, "objective": "masked"}),
        ("bert", {"vocab": VOCAB, "objective": "masked", "tie": False}),
        ("bert", {"vocab": VOCAB, "hidden": 20}),
    ],
)
def test_a_model_of_ours_is_written(name: str, options: dict[str, object], tmp_path: Path) -> None:
    classes = 4 if "hidden" in options else VOCAB
    spec = zoo.get(name, input_shape=(24,), classes=classes, width=32, layers=2, heads=4, **options)
    module = spec.build(3).eval()

    write_ours(module, spec, tmp_path)

    x = rows(least=1)
    found = logits_of_theirs(theirs(tmp_path), x)
    if "objective" in options:
        assert float(found[..., VOCAB].max()) < -1000  # the mask is never predicted
        found = found[..., :VOCAB]
    with torch.inference_mode():
        torch.testing.assert_close(found, module(x.int()), rtol=0, atol=TOLERANCE)
        module_again, _ = ours(tmp_path)
        torch.testing.assert_close(module_again(x.int())[..., :classes], module(x.int()), rtol=0, atol=1e-5)


def test_gpt2_of_124_million_parameters_has_so_many() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from models.hugging_face import decoders
    from models.hugging_face.keys import Keys
    from tests.models.hugging_face.folders import spec_of

    config = GPT2Config()
    found = decoders.read(Keys(config.to_dict()))
    with torch.device("meta"):
        described = {"name": "gpt", "options": found["options"], "input_shape": (1024,), "classes": 50257}
        module = spec_of({**described, "input_dtype": "int32", "task": "next_token"}).module()
        assert GPT2LMHeadModel(config).num_parameters() == 124_439_808
    assert sum(parameter.numel() for parameter in module.parameters()) == 124_439_808
