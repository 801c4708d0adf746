"""Texts from a real server: the same alone and in company, through SIGKILLs of workers, and for clients that go away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_client.wire.preprocessing import TextSchema
from edge_client.wire.schema import DataSchema
from tests.support.long import extended
from tests.support.processes import read_proc
from tests.support.serving import Background, Server, serving, torch_model, tree

pytestmark = pytest.mark.slow

VOCABULARY = "abcdefghijklmnopqrstuvwxyz .,\n"
TOKENS = {"input_shape": [256], "classes": len(VOCABULARY), "input_dtype": "int32", "task": "next_token"}


def text_model(folder: Path, name: str, **options: Any) -> Path:
    """An untrained model with the schema of texts in `VOCABULARY`."""
    torch_model(folder, name, options=options, **TOKENS)
    text = TextSchema("characters", "next_token", tuple(VOCABULARY))
    schema = DataSchema("text", (256,), "int32", classes=tuple(VOCABULARY), text=text)
    (folder / "schema.json").write_text(schema.to_json())
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serving")
    with serving(folder / "home") as running:
        small = {"width": 32, "layers": 2, "heads": 2}
        model = text_model(folder / "gpt", "gpt", **small)
        running.deployed("plays", model, generation={"deterministic": True})
        running.deployed("small", text_model(folder / "charlm", "charlm", **small))
        running.deployed("digits", torch_model(folder / "mlp"))
        yield running


def complete(server: Server, model: str = "plays", **changes: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": "to be or not", "max_tokens": 60, "seed": 5, "logprobs": 2, **changes}
    return server.call("POST", "/v1/completions", body)


def test_texts_are_continued_and_wrong_requests_refused(server: Server) -> None:
    assert [each["id"] for each in server.call("GET", "/v1/models")[1]["data"]] == ["plays", "small"]
    for model in ("plays", "small"):
        status, answer = complete(server, model)
        choice = answer["choices"][0]
        assert (status, choice["finish_reason"]) == (200, "length")
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert len(choice["text"]) == 60
        assert answer["usage"] == {"prompt_tokens": 12, "completion_tokens": 60, "total_tokens": 72}
        ids = [VOCABULARY.index(each) for each in "to be or not"]
        assert complete(server, model, prompt=ids)[1]["choices"] == answer["choices"]
    stop = complete(server)[1]["choices"][0]["text"][10:13]
    stopped = complete(server, stop=[stop])[1]["choices"][0]
    assert (stopped["finish_reason"], stop in stopped["text"]) == ("stop", False)
    for changes, code in (
        ({"model": "digits"}, "does_not_generate"),
        ({"model": "nothing"}, "unknown_model"),
        ({"prompt": "TO BE"}, "wrong_row"),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": [30]}, "token_out_of_vocabulary"),
        ({"prompt": "a" * 257}, "prompt_too_long"),
    ):
        status, error = complete(server, **changes)
        assert error["error"]["code"] == code, error
        assert status in (400, 404)


def test_company_changes_nothing(server: Server) -> None:
    alone = [complete(server, seed=seed)[1]["choices"] for seed in range(12)]
    together = [Background(lambda seed=seed: complete(server, seed=seed)) for seed in range(12)]
    assert [each.result()[1]["choices"] for each in together] == alone


def test_killed_workers_lose_no_text(server: Server) -> None:
    expected = complete(server, max_tokens=200)[1]["choices"]
    for _ in range(3):
        before = server.status("plays")
        texts = [Background(lambda: complete(server, max_tokens=200)) for _ in range(4)]
        time.sleep(0.15)
        os.kill(before["pids"][0], signal.SIGKILL)
        assert [each.result()[1].get("choices") for each in texts] == [expected] * 4
        assert server.status("plays")["worker_restarts"] == before["worker_restarts"] + 1


def test_a_client_that_goes_away_ends_its_text(server: Server) -> None:
    body = json.dumps({"model": "plays", "prompt": "a", "max_tokens": 255, "stream": True}).encode()
    request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as channel:
            channel.sendall(request + body)
            assert b"200" in channel.recv(12)
    until = time.monotonic() + 60
    while server.status("plays")["texts"]:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_streams_say_what_the_whole_answer_says(server: Server) -> None:
    whole = complete(server)[1]["choices"][0]["text"]

    async def stream() -> str:
        body = json.dumps(
            {"model": "plays", "prompt": "to be or not", "max_tokens": 60, "seed": 5, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        text = (await reader.read()).decode()
        writer.close()
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        return "".join(json.loads(each)["choices"][0]["text"] for each in events)

    assert asyncio.run(stream()) == whole


@pytest.mark.parametrize("plan", ["tp=2", *extended("pp=2", "tp=2,pp=2")])
def test_a_split_model_generates_the_same_also_when_a_rank_is_killed(server: Server, plan: str) -> None:
    model = server.home.parent / "gpt"
    expected = complete(server, temperature=0, max_tokens=100)[1]["choices"][0]["text"]
    server.deployed("split", model, generation={"plan": plan})
    assert complete(server, "split", temperature=0, max_tokens=100)[1]["choices"][0]["text"] == expected
    ranks = [pid for pid in tree(server.process.pid) if "generation.rank" in read_proc(pid, "cmdline")]
    text = Background(lambda: complete(server, "split", temperature=0, max_tokens=200))
    time.sleep(0.2)
    os.kill(ranks[-1], signal.SIGKILL)
    assert text.result()[1]["choices"][0]["text"].startswith(expected)
    assert server.status("split")["worker_restarts"] == 0
    server.call("DELETE", "/fedloop/v1/deployments/split")
    assert server.deploy("split", model, generation={"plan": "tp=3"})[0] == 400
    assert server.deploy("split", model, generation={"plan": "dp=2"})[0] == 400
    assert server.deploy("split", model, generation={"plan": "tp=2"}, dtype="bfloat16")[0] == 400
