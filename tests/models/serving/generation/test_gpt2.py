"""`gpt` with a cache generates what transformers' models with the same weights do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.serving.generation import Engine, Options, Request
from models.zoo import gpt
from tests.models.hugging_face import folders
from tests.models.serving.generation.small import GREEDY, VOCAB, built, prompts, run, tokens_of
from tests.support import gpt2

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
def test_gpt_generates_what_transformers_gpt2_does(tie: bool) -> None:
    spec = gpt.spec((256,), VOCAB, width=48, layers=3, heads=4, tie=tie)
    module = built(spec)
    theirs = gpt2.of(module, spec)
    asked = prompts(30, 7)

    events = run(
        Engine(module, spec, Options()),
        *(Request(str(at), prompt, 200, GREEDY) for at, prompt in enumerate(asked)),
    )

    for at, prompt in enumerate(asked):
        with torch.inference_mode():
            generated = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=200, do_sample=False, output_logits=True,
                return_dict_in_generate=True, pad_token_id=0,
            )  # fmt: skip
        assert tokens_of(events[str(at)]) == generated.sequences[0, len(prompt) :].tolist()
        logprobs = torch.cat(generated.logits).log_softmax(-1).amax(-1).tolist()
        assert [event.logprob for event in events[str(at)]] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama 3", "qwen2"])
def test_a_published_model_generates_what_it_does_in_transformers(name: str, tmp_path: Path) -> None:
    """Their rotations are those of positions in a sequence, and their queries share keys, with a cache too."""
    theirs = folders.save(name, tmp_path)
    module, spec = folders.ours(tmp_path)
    asked = [prompt for prompt in prompts(3, 9) if max(prompt) < folders.VOCAB]
    options = Options(blocks=12, block_tokens=4, max_batch=2, prefill_chunk=4)

    events = run(
        Engine(module, spec, options),
        *(Request(str(at), prompt, 12, GREEDY) for at, prompt in enumerate(asked)),
    )

    for at, prompt in enumerate(asked):
        with torch.inference_mode():
            generated = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
            )
        assert tokens_of(events[str(at)]) == generated[0, len(prompt) :].tolist()
