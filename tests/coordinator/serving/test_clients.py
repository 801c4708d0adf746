"""Unmodified tritonclient, kserve and openai: every read and infer call of theirs gets what the protocols promise.

They run in an environment of their own, FEDLOOP_CLIENTS_PYTHON (an interpreter), else `.venv-clients` of `make clients`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.serving.grpc_api import open_inference_grpc_pb2 as pb
from edge_client.processes.process import tie_to_parent
from tests.support.require import require
from tests.support.serving import Server, letters_model, logits_of, serving, torch_model
from tests.support.unmodified_clients import fields_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "support" / "unmodified_clients.py"
ROWS = np.random.default_rng(5).random((3, 8, 8), np.float32)
"""Those that the program sends."""

Calls = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the clients' environment."""
    found = Path(os.environ.get("FEDLOOP_CLIENTS_PYTHON") or ROOT / ".venv-clients" / "bin" / "python")
    if not found.exists():
        require("clients", f"{found} does not exist; run `make clients`")
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a classifier of digits, a classifier of texts, and a model that continues texts."""
    folder = tmp_path_factory.mktemp("serving")
    with serving(folder / "home", "--grpc", "127.0.0.1:0") as running:
        plays = letters_model(folder / "plays", "charlm")
        moods = letters_model(folder / "moods", "textcls", classes=("calm", "wild"))
        for name, model in {"digits": torch_model(folder / "mlp"), "moods": moods, "plays": plays}.items():
            status, answer = running.deploy(name, model, slo_ms=30_000)
            assert status == 200, answer
        yield running


def calls(python: Path, kind: str, place: dict[str, Any], model: str) -> Calls:
    """What the clients' calls returned, by their names."""
    done = subprocess.run(
        [str(python), "-P", str(PROGRAM), kind, place["url"], place["grpc"], model],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {found.pop("call"): found for found in map(json.loads, done.stdout.splitlines())}


def errors(found: Calls) -> dict[str, str]:
    """Status of the calls that were refused."""
    return {name: each["error"]["status"] for name, each in found.items() if "error" in each}


def assert_predictions(found: Calls, expected: np.ndarray, count: int) -> None:
    """All calls that infer rows have the logits, and there are `count` of them."""
    inferred = {
        name: each["result"] for name, each in found.items() if " infer" in f" {name}" and "result" in each
    }
    logits = {name: each for name, each in inferred.items() if "request id" not in name}
    assert len(logits) == count, list(logits)
    for name, each in logits.items():
        assert np.allclose(each, expected, rtol=1e-4, atol=1e-5), name
    assert {each for name, each in inferred.items() if "request id" in name} <= {"a 7"}


def test_tritonclient(python: Path, server: Server) -> None:
    found = calls(python, "triton", dict(server.place), "digits")
    assert errors(found) == {
        "unknown model": "404",
        "unknown version": "404",
        "wrong shape": "400",
        "wrong name": "400",
        "classification": "400",
        "trace settings": "404",
        "grpc unknown model in a stream": "None",
        "grpc unknown model": "StatusCode.NOT_FOUND",
        "grpc unknown version": "StatusCode.NOT_FOUND",
        "grpc wrong shape": "StatusCode.INVALID_ARGUMENT",
        "grpc wrong name": "StatusCode.INVALID_ARGUMENT",
        "grpc trace settings": "StatusCode.UNIMPLEMENTED",
    }
    ours, theirs = fields_of(pb.DESCRIPTOR), found.pop("messages")["result"]
    assert {name: each for name, each in ours.items() if theirs.get(name) != each} == {}
    assert_predictions(found, logits_of(server.infer("digits", ROWS)[1]), 32)
    for name in ("server live", "server ready", "model ready"):
        assert [found[f"{of}{name}"]["result"] for of in ("", "aio ", "grpc ", "grpc aio ")] == [True] * 4
    for name in ("server metadata", "index", "model metadata", "config", "statistics"):
        assert_same_document(found, name)


def assert_same_document(found: Calls, name: str) -> None:
    """All clients got the same, except for figures that grow."""
    rest, rest_aio, grpc, grpc_aio = (
        plain(found[of + name]["result"]) for of in ("", "aio ", "grpc ", "grpc aio ")
    )
    if name == "index":
        rest, rest_aio = {"models": rest}, {"models": rest_aio}
        assert {
            "name": "digits",
            "version": found["model metadata"]["result"]["versions"][0],
            "state": "READY",
        } in rest["models"]
    if name == "config":
        rest, rest_aio = {"config": rest}, {"config": rest_aio}
    if name == "statistics":
        [first], *_ = each = [of["model_stats"] for of in (rest, rest_aio, grpc, grpc_aio)]
        assert {stats["name"] for [stats] in each} == {"digits"}
        assert {stats["version"] for [stats] in each} == {first["version"]}
        answered = [int(stats.get("inference_count", 0)) for [stats] in each]
        assert sorted(answered) == answered and answered[-1] >= 3 * 10
    else:
        assert rest == rest_aio == grpc == grpc_aio


def plain(document: Any) -> Any:
    """As JSON of messages is: without what is empty, and with numbers of 64 bits as texts."""
    if isinstance(document, dict):
        kept = {key: plain(value) for key, value in document.items()}
        return {key: value for key, value in kept.items() if value not in ("", "0", "False", [], {})}
    if isinstance(document, list):
        return [plain(each) for each in document]
    return str(document)


def test_kserve(python: Path, server: Server) -> None:
    found = calls(python, "kserve", dict(server.place), "digits")
    assert errors(found) == {}
    ours, theirs = fields_of(pb.DESCRIPTOR), found.pop("messages")["result"]
    both = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}
    assert both >= {
        "inference.ModelInferRequest.raw_input_contents",
        "inference.GRPCInferenceService.ModelInfer",
    }
    assert_predictions(found, logits_of(server.infer("digits", ROWS)[1]), 7)
    ready = [each["result"] for name, each in found.items() if name.endswith(("live", "ready"))]
    assert ready == [True] * 6


def test_openai(python: Path, server: Server) -> None:
    found = calls(python, "openai", dict(server.place), "plays")
    assert errors(found) == {
        "openai wrong field": "400",
        "openai unknown model": "404",
        "openai unknown model in a stream": "404",
    }
    assert found["openai wrong field"]["error"]["param"] == "logit_bias"
    results = {name: each["result"] for name, each in found.items() if "result" in each}
    assert results["openai models"] == results["openai aio models"] == ["plays"]
    assert results["openai model"] == "plays"
    completion = results["openai completion"]
    assert completion["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
    assert [len(each) for each in results["openai prompts"]] == [4] * 4
    assert results["openai stream"] == {
        "text": completion["choices"][0]["text"], "events": 5, "usage": completion["usage"],
    }  # fmt: skip
    assert results["openai aio stream"] == completion["choices"][0]["text"]
    logprobs = results["openai logprobs"]["logprobs"]
    assert "".join(logprobs["tokens"]) == results["openai logprobs"]["text"]
    assert all(len(each) in (2, 3) for each in logprobs["top_logprobs"])


def test_texts(python: Path, server: Server) -> None:
    found = calls(python, "texts", dict(server.place), "moods")
    assert errors(found) == {}
    assert {str(found[name]["result"]) for name in ("texts binary", "texts JSON", "texts grpc")} == {"[2, 2]"}
    assert found["texts labels"] == found["texts grpc labels"]
    assert set(found["texts labels"]["result"]) <= {"calm", "wild"}


def test_every_datatype_returns_as_it_was_sent(python: Path) -> None:
    process = subprocess.Popen(
        tie_to_parent([sys.executable, "-m", "tests.support.memory_server"]), stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        found = calls(python, "datatypes", json.loads(process.stdout.readline()), "echo_")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert len(found) == 3 * 13 - 1
    assert {name: each for name, each in found.items() if each != {"result": True}} == {}
