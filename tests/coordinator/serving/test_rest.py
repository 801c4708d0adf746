"""The Open Inference Protocol over REST: what is answered, what is refused and with which code."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import Server, logits_of, rows, serving, torch_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

INFER = "/v2/models/digits/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serving")
    with serving(folder / "home") as running:
        model = torch_model(folder / "mlp")
        running.deployed("digits", model, max_rows=100, max_batch=16, max_queue=300)
        tokens = {"input_shape": [12], "classes": 3, "input_dtype": "int32", "options": {"vocab": 20}}
        running.deployed("tokens", torch_model(folder / "t", "textcls", **tokens))
        yield running


def tensor(x: Any, **changes: Any) -> dict[str, Any]:
    array = np.asarray(x, np.float32)
    known = {"name": "x", "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}
    return {**known, **changes}


def test_reads(server: Server) -> None:
    assert server.call("GET", "/v2/health/live") == (200, {"live": True})
    assert server.call("GET", "/v2/health/ready") == (200, {"ready": True})
    status, about = server.call("GET", "/v2")
    assert (status, about["name"]) == (200, "fedloop")
    assert "binary_tensor_data" in about["extensions"]
    status, model = server.call("GET", "/v2/models/digits")
    assert status == 200
    assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8, 8]}]
    assert model["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]
    version = model["versions"][0]
    assert server.call("GET", f"/v2/models/digits/versions/{version}")[1] == model
    assert server.call("GET", f"/v2/models/digits/versions/{version}/ready")[1]["ready"] is True
    status, index = server.call("POST", "/v2/repository/index")
    assert {"name": "digits", "version": version, "state": "READY", "reason": ""} in index
    status, text = server.call("GET", "/metrics")
    assert f'fedloop_serving_workers{{model="digits",version="{version}"}} 1.0' in text.decode()


def test_answers_are_those_of_the_model_in_every_encoding(server: Server) -> None:
    x = rows(5)
    status, plain = server.infer("digits", x)
    assert status == 200
    expected = logits_of(plain)
    nested = {"inputs": [tensor(x, data=x.tolist())], "id": "a"}
    status, answer = server.call("POST", INFER, nested)
    assert (status, answer["id"]) == (200, "a")
    assert np.array_equal(logits_of(answer), expected)
    body = json.dumps({"inputs": [tensor(x)]}).encode()
    for encoding, packed in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
        status, answer = server.call("POST", INFER, packed, **{"Content-Encoding": encoding})
        assert status == 200
        assert np.array_equal(logits_of(answer), expected)
    for datatype, array in (("FP64", x.astype(np.float64)), ("FP16", x.astype(np.float16))):
        status, answer = server.call("POST", INFER, {"inputs": [tensor(array, datatype=datatype)]})
        assert status == 200
        assert np.allclose(logits_of(answer), expected, atol=1e-2)


def test_binary_tensors_there_and_back(server: Server) -> None:
    x = rows(3)
    expected = logits_of(server.infer("digits", x)[1])
    content = x.tobytes()
    given = {
        "name": "x",
        "shape": [3, 8, 8],
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(content)},
    }
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    pool = server._pool
    answer = pool.request(
        "POST",
        server.url + INFER,
        body=head + content,
        headers={"Inference-Header-Content-Length": str(len(head))},
    )
    length = int(answer.headers["inference-header-content-length"])
    described = json.loads(answer.data[:length])["outputs"][0]
    assert described["parameters"]["binary_data_size"] == 3 * 10 * 4
    assert np.array_equal(np.frombuffer(answer.data[length:], np.float32).reshape(3, 10), expected)


def test_more_rows_than_a_batch_are_answered_in_order(server: Server) -> None:
    x = rows(50)
    together = logits_of(server.infer("digits", x)[1])
    alone = np.concatenate([logits_of(server.infer("digits", x[at : at + 1])[1]) for at in range(50)])
    assert np.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "malformed"),
        (b"[]", 400, "malformed"),
        ({}, 400, "malformed"),
        ({"inputs": []}, 400, "malformed"),
        ({"inputs": [3]}, 400, "malformed"),
        ({"inputs": [{"name": "x"}]}, 400, "wrong_datatype"),
        ({"inputs": [tensor(rows(1), datatype="FP31")]}, 400, "wrong_datatype"),
        ({"inputs": [tensor(rows(1), shape=[1, 8])]}, 400, "wrong_size"),
        ({"inputs": [tensor(rows(1), shape=[-1, 8, 8])]}, 400, "wrong_shape"),
        ({"inputs": [tensor(rows(1), shape=[2**31 - 1, 2**31 - 1])]}, 400, "wrong_shape"),
        ({"inputs": [tensor(rows(1), shape=[1, 64])]}, 400, "wrong_shape"),
        ({"inputs": [tensor(rows(1)[:0])]}, 400, "wrong_shape"),
        ({"inputs": [tensor(rows(1), data=["a"] * 64)]}, 400, "wrong_datatype"),
        ({"inputs": [tensor(rows(1), data=[[1.0], [1.0, 2.0]])]}, 400, "wrong_shape"),
        ({"inputs": [tensor(rows(1), data=[1e39] * 64)]}, 400, "not_finite"),
        ({"inputs": [tensor(rows(1), data=None)]}, 400, "malformed"),
        ({"inputs": [tensor(rows(1), name="y")]}, 400, "unknown_input"),
        ({"inputs": [tensor(rows(1)), tensor(rows(1))]}, 400, "duplicate_input"),
        ({"inputs": [tensor(rows(1))], "outputs": [{"name": "nothing"}]}, 400, "unknown_output"),
        ({"inputs": [tensor(rows(1))], "parameters": {"timeout": -1}}, 400, "bad_parameter"),
        ({"inputs": [tensor(rows(1))], "parameters": {"priority": "high"}}, 400, "bad_parameter"),
        ({"inputs": [tensor(rows(1))], "id": 7}, 400, "malformed"),
        ({"inputs": [tensor(rows(101))]}, 413, "too_many_rows"),
        ({"inputs": [tensor(rows(1))], "parameters": {"timeout": 1}}, 504, "deadline"),
    ],
)
def test_refused_with_a_stable_code(server: Server, body: Any, status: int, code: str) -> None:
    answered, error = server.call("POST", INFER, body)
    assert (answered, error["code"]) == (status, code)
    assert error["error"]


def test_refused_paths_headers_and_ids(server: Server) -> None:
    good = {"inputs": [tensor(rows(1))]}
    for path, code in (
        ("/v2/models/nothing/infer", "unknown_model"),
        ("/v2/models/digits/versions/7/infer", "unknown_version"),
        ("/v2/models/digits/versions/champion/infer", "unknown_version"),
        ("/v2/models/digits/answer", "unknown_path"),
    ):
        assert (server.call("POST", path, good)[0], server.call("POST", path, good)[1]["code"]) == (404, code)
    body = json.dumps(good).encode()
    for value in ("0", "-1", "x", str(len(body) + 1)):
        status, error = server.call("POST", INFER, body, **{"Inference-Header-Content-Length": value})
        assert (status, error["code"]) == (400, "wrong_size")
    status, error = server.call("POST", INFER, body, **{"Content-Encoding": "br"})
    assert (status, error["code"]) == (415, "unknown_encoding")
    bomb = gzip.compress(bytes(65 * 2**20))
    status, error = server.call("POST", INFER, bomb, **{"Content-Encoding": "gzip"})
    assert (status, error["code"]) == (413, "body_too_large")
    ids = {"name": "x", "shape": [1, 12], "datatype": "INT32", "data": [0] * 11 + [20]}
    status, error = server.call("POST", "/v2/models/tokens/infer", {"inputs": [ids]})
    assert (status, error["code"]) == (400, "unknown_id")
    assert server.call("POST", "/v2/models/tokens/infer", {"inputs": [{**ids, "data": [3] * 12}]})[0] == 200
    status, error = server.call("POST", "/v2/models/tokens/infer", {"inputs": [tensor(np.zeros((1, 12)))]})
    assert (status, error["code"]) == (400, "wrong_datatype")


def test_management_needs_its_token(server: Server) -> None:
    for headers, code in (({}, "no_token"), ({"Authorization": "Bearer guessed"}, "bad_token")):
        answer = server._pool.request("GET", f"{server.url}/fedloop/v1/deployments", headers=headers)
        assert (answer.status, json.loads(answer.data)["code"]) == (401, code)
    assert server.call("PUT", "/fedloop/v1/deployments/No", {"model": "x"})[1]["code"] == "bad_name"
    status, error = server.deploy("other", "/nowhere")
    assert status == 400 and "/nowhere" in error["error"]
    status, error = server.deploy("other", "/nowhere", slo_ms=-1, workers={"min": 3, "max": 2})
    assert status == 400 and "slo_ms" in error["error"]
    assert server.call("DELETE", "/fedloop/v1/deployments/other")[1]["code"] == "unknown_model"
    assert (
        server.call("POST", "/fedloop/v1/deployments/digits/scale", {"min": -1})[1]["code"] == "bad_parameter"
    )


def test_2000_malformed_requests_leave_the_server_as_it_was(server: Server) -> None:
    """Mutations of good requests, in JSON and binary: none is a 5xx, no worker ends, memory stays, and good ones get their own rows."""
    rng = np.random.default_rng(0)
    before = server.status("digits")
    x = rows(2)
    expected = logits_of(server.infer("digits", x)[1])
    content = x.tobytes()
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "shape": [2, 8, 8],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": len(content)},
                }
            ]
        }
    ).encode()
    plain = json.dumps({"inputs": [tensor(x)]}).encode()
    statuses: dict[int, int] = {}
    memory = 0
    for number in range(2000):
        is_binary = bool(number % 2)
        body = bytearray(head + content if is_binary else plain)
        for _ in range(int(rng.integers(1, 6))):
            match int(rng.integers(4)):
                case 0:
                    body[int(rng.integers(len(body)))] = int(rng.integers(256))
                case 1:
                    at = int(rng.integers(len(body)))
                    del body[at : at + int(rng.integers(1, 9))]
                case 2:
                    at = int(rng.integers(len(body)))
                    body[at:at] = rng.bytes(int(rng.integers(1, 9)))
                case 3:
                    del body[int(rng.integers(1, len(body))) :]
        headers = {"Inference-Header-Content-Length": str(len(head))} if is_binary else {}
        status, _ = server.call("POST", INFER, bytes(body), **headers)
        statuses[status] = statuses.get(status, 0) + 1
        if number == 1000:
            memory = resident(server.process.pid)
    assert all(status < 500 for status in statuses), statuses
    assert statuses.get(400, 0) > 1000
    assert resident(server.process.pid) < memory + 8 * 2**20
    assert np.array_equal(logits_of(server.infer("digits", x)[1]), expected)
    after = server.status("digits")
    assert (after["pids"], after["worker_restarts"]) == (before["pids"], 0)


def test_random_bytes_and_vanished_clients(server: Server) -> None:
    """Connections that send anything, end in the middle, or never read."""
    rng = np.random.default_rng(1)
    body = json.dumps({"inputs": [tensor(rows(64))]}).encode()
    request = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    for number in range(200):
        with socket.create_connection(("127.0.0.1", server.port)) as channel:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            channel.sendall(rng.bytes(100) if number % 2 else request[: int(rng.integers(1, len(request)))])
            if number % 4 == 0:
                channel.sendall(request)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    for channel in silent:
        channel.sendall(request)  # nobody reads the answers
    x = rows(1)
    assert server.infer("digits", x)[0] == 200
    for channel in silent:
        channel.close()
    assert server.status("digits")["worker_restarts"] == 0
    wait_until(lambda: server.infer("digits", rows(100))[0] == 200)


def test_nobody_gets_the_rows_of_another(server: Server) -> None:
    xs = [rows(int(size), seed=int(size)) for size in range(1, 21)]
    alone = [logits_of(server.infer("digits", x)[1]) for x in xs]

    async def ask(x: Any) -> Any:
        return await asyncio.to_thread(server.infer, "digits", x)

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(ask(x) for _ in range(5) for x in xs))

    for place, (status, answer) in enumerate(asyncio.run(ask_all())):
        assert status == 200
        assert np.allclose(logits_of(answer), alone[place % len(xs)], atol=1e-5)


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
