"""Generation with cached keys and values: `gpt` of 6 layers of width 256, one thread, tokens per CPU second of this process.

Beside it: the model without a cache, one sequence after the other, static batching (a batch runs until its longest answer
ends, and what ended before is computed on, as in transformers' `generate`), and transformers' continuous batching of the
same weights. All run in turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from models.pretrain.params import save
from models.pretrain.plan import parse
from models.serving.generation import Engine, Options, Request, Sampling
from models.serving.generation.parallel import Parallel, Ranks
from models.zoo import ModelSpec, gpt

LENGTH, VOCAB, LAYERS, WIDTH, HEADS = 512, 512, 6, 256, 8
REPEATS = 3
GREEDY = Sampling(temperature=0.0)
LEAST = {
    "cache / none": 4.0,
    "16 streams / one": 3.0,
    "continuous / static, mixed lengths": 1.5,
    "continuous / static, equal lengths": 0.9,
    "engine / transformers' continuous batching": 3.0,
    "prefill, 320 of 352 tokens shared / none": 3.0,
}
MOST = {
    "step with a piece of a joining prompt / without": 2.0,
    "deterministic step / step": 1.15,
}


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    spec = gpt.spec((LENGTH,), VOCAB, width=WIDTH, layers=LAYERS, heads=HEADS)
    module = spec.build(0).eval()
    figures: dict[str, Any] = {
        **one_stream(module, spec),
        **batching(module, spec),
        **against_transformers(module, spec),
        **shared_prefix(module, spec),
        **joining(module, spec),
        **deterministic(module, spec),
        **parallel(module, spec),
    }
    for name, value in figures.items():
        bound = (
            f"  (at least {LEAST[name]})"
            if name in LEAST
            else f"  (at most {MOST[name]})"
            if name in MOST
            else ""
        )
        print(f"{name:55} {value:10.2f}{bound}")
    missed = [
        f"{name} is {figures[name]:.2f}, at least {least} promised"
        for name, least in LEAST.items()
        if figures.get(name, least) < least
    ]
    missed += [
        f"{name} is {figures[name]:.2f}, at most {most} promised"
        for name, most in MOST.items()
        if figures[name] > most
    ]
    return figures | ({"failures": missed} if missed else {})


def one_stream(module: nn.Module, spec: ModelSpec) -> dict[str, float]:
    request = Request("a", prompt(32, 0), 256, GREEDY)
    many = [Request(str(at), prompt(32, at), 128, GREEDY) for at in range(16)]
    seconds = medians(
        {
            "none": lambda: without_cache(module, request),
            "one": lambda: serve(engine_of(module, spec), [request]),
            "16": lambda: serve(engine_of(module, spec), many),
        }
    )
    rates = {"none": 256 / seconds["none"], "one": 256 / seconds["one"], "16": 16 * 128 / seconds["16"]}
    return {
        "tokens/s, no cache": rates["none"],
        "tokens/s, one stream": rates["one"],
        "tokens/s, 16 streams": rates["16"],
        "cache / none": rates["one"] / rates["none"],
        "16 streams / one": rates["16"] / rates["one"],
    }


def batching(module: nn.Module, spec: ModelSpec) -> dict[str, float]:
    """64 requests; mixed answers have from 8 to 256 tokens, short ones more often (log-uniform)."""
    random = np.random.default_rng(0)
    mixed = np.exp(random.uniform(np.log(8), np.log(256), 64)).astype(int).tolist()
    requests = [Request(str(at), prompt(32, at), count, GREEDY) for at, count in enumerate(mixed)]
    equal = [replace(request, max_tokens=64) for request in requests]
    seconds = medians(
        {
            "continuous": lambda: serve(engine_of(module, spec), requests),
            "static": lambda: serve_static(engine_of(module, spec), requests),
            "continuous, equal": lambda: serve(engine_of(module, spec), equal),
            "static, equal": lambda: serve_static(engine_of(module, spec), equal),
        }
    )
    return {
        "continuous / static, mixed lengths": seconds["static"] / seconds["continuous"],
        "continuous / static, equal lengths": seconds["static, equal"] / seconds["continuous, equal"],
    }


def against_transformers(module: nn.Module, spec: ModelSpec) -> dict[str, float]:
    """16 streams of 64 tokens. With its defaults transformers sizes the cache by the free memory, which costs it most of
    its time on a CPU, so it is measured with a cache as large as needed, too."""
    try:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        from tests.support import gpt2
    except ImportError:
        return {}
    theirs = gpt2.of(module, spec)
    generation = GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=512, page_size=32)
    requests = [Request(str(at), prompt(32, at), 64, GREEDY) for at in range(16)]
    prompts = [list(request.prompt) for request in requests]

    def generate(batching: Any) -> None:
        found = theirs.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching
        )
        assert sum(len(answer.generated_tokens) for answer in found.values()) == 16 * 64

    seconds = medians(
        {
            "ours": lambda: serve(engine_of(module, spec), requests),
            "small cache": lambda: generate(small),
        }
    )
    seconds["defaults"], _ = timed(lambda: generate(ContinuousBatchingConfig()))  # once, as it takes long
    return {
        "tokens/s, transformers' continuous batching": 16 * 64 / seconds["defaults"],
        "tokens/s, the same with a small cache": 16 * 64 / seconds["small cache"],
        "engine / transformers' continuous batching": seconds["defaults"] / seconds["ours"],
        "engine / the same with a small cache": seconds["small cache"] / seconds["ours"],
    }


def shared_prefix(module: nn.Module, spec: ModelSpec) -> dict[str, float]:
    """One token each of 16 prompts, the first of which has been answered before."""
    shared = [Request(str(at), (*prompt(320, 0), *prompt(32, 100 + at)), 1, GREEDY) for at in range(17)]
    apart = [Request(str(at), prompt(352, at), 1, GREEDY) for at in range(17)]

    def seconds(requests: Sequence[Request]) -> float:
        engine = engine_of(module, spec)
        serve(engine, requests[:1])
        began = time.process_time()
        serve(engine, requests[1:])
        return time.process_time() - began

    taken = [(seconds(apart), seconds(shared)) for _ in range(REPEATS)]
    return {
        "prefill, 320 of 352 tokens shared / none": statistics.median(first / then for first, then in taken)
    }


def joining(module: nn.Module, spec: ModelSpec) -> dict[str, float]:
    """CPU time of steps of 15 streams, before a prompt of 400 tokens joins and while it is computed."""
    ratios = []
    for _ in range(REPEATS):
        engine = engine_of(module, spec)
        for at in range(15):
            engine.add(Request(str(at), prompt(64, at), 400, GREEDY))
        while engine.statistics.tokens_generated < 15 * 64:
            engine.step()
        before = [timed(engine.step)[0] for _ in range(16)]
        engine.add(Request("joining", prompt(400, 99), 1, GREEDY))
        during = []
        while True:
            seconds, events = timed(engine.step)
            during.append(seconds)
            if any(event.id == "joining" for event in events):
                break
        ratios.append(statistics.median(during) / statistics.median(before))
    return {"step with a piece of a joining prompt / without": statistics.median(ratios)}


def deterministic(module: nn.Module, spec: ModelSpec) -> dict[str, float]:
    """CPU time of steps that generate for all 16 sequences."""
    engines = []
    for fixed in (False, True):
        engine = engine_of(module, spec, deterministic=fixed)
        for at in range(16):
            engine.add(Request(str(at), prompt(64, at), 400, GREEDY))
        while engine.statistics.tokens_generated < 16 * 32:
            engine.step()
        engines.append(engine)
    usual, fixed_shapes = ([], [])  # type: tuple[list[float], list[float]]
    for _ in range(150):
        for engine, taken in zip(engines, (usual, fixed_shapes), strict=True):
            taken.append(timed(engine.step)[0])
    return {
        "step of 16, ms": 1000 * statistics.median(usual),
        "deterministic step / step": statistics.median(fixed_shapes) / statistics.median(usual),
    }


def parallel(module: nn.Module, spec: ModelSpec) -> dict[str, float]:
    """Tokens per second of wall time, of 4 streams, in one process and in two with half of every matrix. On two cores that
    other programs use as well, messages between processes cost more than halving the work saves."""
    requests = [Request(str(at), prompt(32, at), 32, GREEDY) for at in range(4)]
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(module, path)
        start = Parallel(spec.described(), path, parse("tp=2"))
        for name in ("one process", "tp=2"):
            executors: list[Ranks] = []

            def executor(blocks: int, started: list[Ranks] = executors) -> Ranks:
                started.append(start(blocks))
                return started[-1]

            engine = Engine(module, spec, executor=executor if name == "tp=2" else None)
            serve(engine, requests[:1])
            began = time.perf_counter()
            serve(engine, requests)
            rates[f"tokens/s of wall time, {name}"] = 4 * 32 / (time.perf_counter() - began)
            for ranks in executors:
                ranks.close()
    return rates


def engine_of(module: nn.Module, spec: ModelSpec, deterministic: bool = False) -> Engine:
    return Engine(module, spec, Options(max_batch=16, deterministic=deterministic))


def prompt(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(VOCAB, size=count).tolist())


def serve(engine: Engine, requests: Sequence[Request]) -> int:
    """Tokens generated for requests that come all at once."""
    for request in requests:
        engine.add(request)
    return sum(len(engine.step()) for _ in iter(lambda: engine.has_work, False))


def serve_static(engine: Engine, requests: Sequence[Request]) -> None:
    """Batches of 16 in the order of arrival, each as long as its longest answer."""
    for start in range(0, len(requests), 16):
        batch = requests[start : start + 16]
        longest = max(request.max_tokens for request in batch)
        serve(engine, [replace(request, max_tokens=longest) for request in batch])


@torch.inference_mode()
def without_cache(module: nn.Module, request: Request) -> None:
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        tokens.append(int(module(torch.tensor([tokens]))[0, -1].argmax()))


def medians(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median CPU seconds of this process for each way, in turns; the first turn is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(REPEATS + 1):
        for name, way in ways.items():
            seconds, _ = timed(way)
            if turn:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def timed(way: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = way()
    return time.process_time() - began, result
