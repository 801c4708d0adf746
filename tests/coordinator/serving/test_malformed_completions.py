"""Malformed requests for completions: every one is refused as the client's mistake, in OpenAI's words, and nothing else notices."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import Server, letters_model, serving

pytestmark = pytest.mark.slow

REQUESTS = 2_000
MIB = 2**20
GOOD = {"model": "plays", "prompt": "to be", "max_tokens": 4, "temperature": 0}
WRONG: dict[str, list[Any]] = {
    "model": ["", "nobody", "plays\0", "n" * 100_000, 3, ["plays"], {}],
    "prompt": [
        "", "TO BE", "é", "a" * 33, "a" * 1_000_000, [], [""], [[]], [27], [-1], [2**40], [1.0], [True], [None],
        [1] * 100, [[1], "a"], [[1], []], {"a": 1}, 3, True, ["a"] * 200, [[27], [1]], [[0] * 64],
    ],
    "max_tokens": [0, -1, 1.5, "4", True, 2**31, 1e300, []],
    "temperature": [-1, 3, "hot", True, [], 1e308],
    "top_p": [-0.1, 1.1, "all", {}],
    "top_k": [-1, 0.5, "k", 2**40],
    "n": [0, 129, -1, "2", 1.0],
    "best_of": [0, 200, "b"],
    "echo": ["yes", 1, []],
    "logprobs": [-1, 6, True, 2.5, "all"],
    "stop": ["", [""], ["a"] * 5, [1], 7, {}, [["a"]]],
    "seed": ["s", 1.5, 2**64, [1]],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": 1}, [], "usage", {"other": True}],
    "suffix": ["end"],
    "logit_bias": [{"3": 1}, [], 1],
    "presence_penalty": [1, "p"],
    "frequency_penalty": [-2, True],
    "messages": [[{"role": "user", "content": "to be"}], ""],
    "a\0b": [1],
}  # fmt: skip
BODIES = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'"to be"', b"{}" * 2, b'{"model": "plays"', b"[" * 100_000,
    b'{"model": "plays", "prompt": "\\ud800"}', b'{"model": "plays", "prompt": NaN}', b"{" + b'"a":{' * 10_000,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serving")
    with serving(folder / "home") as running:
        status, answer = running.deploy("plays", letters_model(folder / "plays", "charlm"))
        assert status == 200, answer
        yield running


def malformed(random: np.random.Generator) -> bytes:
    """A body with one to three wrong fields, or none that is JSON."""
    if random.random() < 0.1:
        return BODIES[random.integers(len(BODIES))]
    names = random.choice(sorted(WRONG), int(random.integers(1, 4)), replace=False)
    wrong = {str(name): WRONG[name][random.integers(len(WRONG[name]))] for name in names}
    good = {name: value for name, value in GOOD.items() if random.random() < 0.95 or name in wrong}
    streamed = {"stream": True} if random.random() < 0.2 else {}
    return json.dumps({**good, **streamed, **wrong}).encode()


def test_malformed_completions_are_the_clients_mistake(server: Server) -> None:
    random = np.random.default_rng(13)
    expected = text(server)
    pids = server.status("plays")["pids"]
    found = Counter[Any]()
    for number in range(REQUESTS):
        if number == REQUESTS // 4:
            before = memory_bytes(server)
        if number % 50 == 0:
            assert text(server) == expected
        body = malformed(random)
        status, answer = server.call("POST", "/v1/completions", body)
        assert status in (400, 404), (status, body[:300], answer)
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert error["code"] and len(error["message"]) < 2_000
        found[error["code"]] += 1
    assert len(found) > 5, found
    assert server.status("plays")["pids"] == pids
    assert memory_bytes(server) - before < 16 * MIB
    assert text(server) == expected


def test_long_texts_are_read_no_further_than_the_model_does(server: Server) -> None:
    def infer(*texts: str) -> tuple[int, Any]:
        tensor = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
        return server.call("POST", "/v2/models/plays/infer", {"inputs": [tensor]})

    long = "to be or not " * 100_000
    assert infer(long)[1]["outputs"] == infer(long[-32:])[1]["outputs"]
    status, answer = infer(*["to be"] * 5_000)
    assert (status, answer["code"]) == (413, "too_many_rows")
    for prompt in (long, [1] * 33, [1] * (2**20 + 1)):
        status, answer = server.call("POST", "/v1/completions", {**GOOD, "prompt": prompt})
        assert (status, answer["error"]["param"]) == (400, "prompt")


def text(server: Server) -> str:
    status, answer = server.call("POST", "/v1/completions", GOOD)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def memory_bytes(server: Server) -> int:
    """Of the front."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
