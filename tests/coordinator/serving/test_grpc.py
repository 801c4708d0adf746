"""Inference over gRPC: every call, every datatype, every refusal's status, and calls that end early."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import uvicorn

from coordinator.errors import Refusal, UserError
from coordinator.option_parsers import Address
from coordinator.serving.grpc_api import open_inference_grpc_pb2 as pb
from coordinator.serving.grpc_api import servicer, status
from coordinator.serving.grpc_api.server import GrpcServer, start
from coordinator.serving.inference import DATATYPES, InferRequest
from tests.support import grpc_messages
from tests.support.memory_inference import MemoryInference, logits

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
X = np.random.default_rng(1).random((2, 8, 8), np.float32)
ANSWERS = {
    "ServerLive": pb.ServerLiveResponse,
    "ServerReady": pb.ServerReadyResponse,
    "ModelReady": pb.ModelReadyResponse,
    "ServerMetadata": pb.ServerMetadataResponse,
    "ModelMetadata": pb.ModelMetadataResponse,
    "ModelInfer": pb.ModelInferResponse,
    "ModelConfig": pb.ModelConfigResponse,
    "ModelStatistics": pb.ModelStatisticsResponse,
    "RepositoryIndex": pb.RepositoryIndexResponse,
}

OPEN_TO_ALL = {"ServerLive", "ServerReady", "ServerMetadata"}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}  # as in `fedloop serving start`


@pytest.fixture(scope="module", autouse=True)
async def event_loop_of_all_tests(anyio_backend: Any) -> AsyncIterator[None]:
    """One for all: what gRPC still has to say of a test must not come after the end of its event loop."""
    yield


@pytest.fixture
def service() -> MemoryInference:
    return MemoryInference()


@pytest.fixture
async def server(service: MemoryInference) -> AsyncIterator[GrpcServer]:
    started = await start(service, Address("127.0.0.1", 0), max_message_bytes=2**20)
    yield started
    await started.stop(0)


@pytest.fixture
async def client(server: GrpcServer) -> AsyncIterator[Client]:
    async with connected(server.address.port) as opened:
        yield opened


class Client:
    """Calls by name. A message goes as it is; bytes go as whatever they are."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def __call__(self, name: str, message: Any = b"", **options: Any) -> Any:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        call = self.channel.unary_unary(f"/{servicer.NAME}/{name}", None, ANSWERS[name].FromString)
        return await call(data, **options)

    async def refused(self, name: str, message: Any = b"", **options: Any) -> tuple[Any, str, str]:
        """Status, stable code and message of a call that is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self(name, message, **options)
        error = caught.value
        return error.code(), dict(error.trailing_metadata()).get(status.CODE, ""), error.details()

    def stream(self, messages: Any) -> Any:
        path = f"/{servicer.NAME}/ModelStreamInfer"
        return self.channel.stream_stream(path, None, pb.ModelStreamInferResponse.FromString)(messages)


@asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", **options) as channel:
        yield Client(channel)


def request(x: np.ndarray = X, model: str = "digits", **fields: Any) -> pb.ModelInferRequest:
    """For float32 rows, in raw contents."""
    message = pb.ModelInferRequest(model_name=model, **fields)
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    message.raw_input_contents.append(x.tobytes())
    return message


def rows_of(response: pb.ModelInferResponse) -> np.ndarray:
    [output], [raw] = response.outputs, response.raw_output_contents
    return np.frombuffer(raw, DATATYPES[output.datatype]).reshape(output.shape)


async def test_server_and_models_say_what_they_are(client: Client, service: MemoryInference) -> None:
    assert (await client("ServerLive")).live
    assert (await client("ServerReady")).ready
    service.is_ready = False
    assert not (await client("ServerReady")).ready
    assert (await client("ModelReady", pb.ModelReadyRequest(name="digits"))).ready
    assert not (await client("ModelReady", pb.ModelReadyRequest(name="opening"))).ready
    metadata = await client("ServerMetadata")
    assert (metadata.name, "statistics" in metadata.extensions) == ("fedloop", True)
    model = await client("ModelMetadata", pb.ModelMetadataRequest(name="digits"))
    assert list(model.versions) == ["2", "3"]
    [x] = model.inputs
    assert (x.name, x.datatype, list(x.shape)) == ("x", "FP32", [-1, 8, 8])


async def test_extensions_of_triton_can_be_read(client: Client) -> None:
    index = await client("RepositoryIndex")
    states = {(each.name, each.version): each.state for each in index.models}
    assert states["digits", "3"] == states["digits", "2"] == "READY"
    assert states["opening", ""] == "UNAVAILABLE"
    ready = await client("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
    assert {each.state for each in ready.models} == {"READY"}

    config = (await client("ModelConfig", pb.ModelConfigRequest(name="digits"))).config
    assert (config.max_batch_size, list(config.input[0].dims)) == (64, [8, 8])
    assert config.input[0].data_type == pb.TYPE_FP32
    assert list(config.version_policy.specific.versions) == [2, 3]
    text = (await client("ModelConfig", pb.ModelConfigRequest(name="plays"))).config.input[0]
    assert (text.data_type, list(text.dims), text.HasField("reshape")) == (pb.TYPE_STRING, [1], True)

    statistics = await client("ModelStatistics", pb.ModelStatisticsRequest(name="digits", version="3"))
    [stats] = statistics.model_stats
    assert (stats.inference_count, stats.execution_count, stats.last_inference) == (5, 2, 1_700_000_000_500)
    assert (stats.inference_stats.success.count, stats.inference_stats.success.ns) == (3, 500_000_000)
    assert [each.batch_size for each in stats.batch_stats] == [1, 4]
    both = await client("ModelStatistics", pb.ModelStatisticsRequest(name="digits"))
    assert [each.version for each in both.model_stats] == ["2", "3"]
    everything = await client("ModelStatistics")
    assert {each.name for each in everything.model_stats} >= {"digits", "plays", "echo_BYTES"}


async def test_raw_and_typed_contents_get_the_same_answer(client: Client) -> None:
    raw = await client("ModelInfer", request(id="7", model_version="champion"))
    typed = pb.ModelInferRequest(model_name="digits")
    typed.inputs.add(name="x", datatype="FP32", shape=X.shape, contents={"fp32_contents": X.ravel().tolist()})
    assert (raw.model_name, raw.model_version, raw.id) == ("digits", "3", "7")
    assert np.array_equal(rows_of(raw), logits(X))
    assert np.array_equal(rows_of(await client("ModelInfer", typed)), logits(X))


@pytest.mark.parametrize("datatype", DATATYPES)
async def test_every_datatype_returns_as_it_was_sent(client: Client, datatype: str) -> None:
    values: dict[str, list[Any]] = {
        "BOOL": [True, False, True],
        "INT8": [-128, 0, 127],
        "INT16": [-(2**15), 0, 2**15 - 1],
        "INT32": [-(2**31), 0, 2**31 - 1],
        "INT64": [-(2**63), 0, 2**63 - 1],
        "UINT8": [0, 1, 255],
        "UINT16": [0, 1, 2**16 - 1],
        "UINT32": [0, 1, 2**32 - 1],
        "UINT64": [0, 1, 2**64 - 1],
        "BYTES": [b"", b"two", "München".encode()],
    }
    sent = values.get(datatype, [0.5, -2.0, float("inf")])
    if datatype == "BYTES":
        raw = b"".join(struct.pack("<I", len(each)) + each for each in sent)
    else:
        raw = np.array(sent, DATATYPES[datatype]).tobytes()
    message = pb.ModelInferRequest(model_name=f"echo_{datatype}", raw_input_contents=[raw])
    message.inputs.add(name="x", datatype=datatype, shape=[1, 3])
    answer = await client("ModelInfer", message)
    assert (list(answer.outputs[0].shape), answer.outputs[0].datatype) == ([1, 3], datatype)
    assert list(answer.raw_output_contents) == [raw]

    del message.raw_input_contents[:]
    fields = {"BOOL": "bool", "FP32": "fp32", "FP64": "fp64", "BYTES": "bytes"}
    whole = datatype.lower() if "64" in datatype else datatype.lower().rstrip("0123456789")
    if datatype == "FP16":
        assert (await client.refused("ModelInfer", message))[:2] == (Code.INVALID_ARGUMENT, "wrong_datatype")
        return
    getattr(message.inputs[0].contents, f"{fields.get(datatype, whole)}_contents").extend(sent)
    assert list((await client("ModelInfer", message)).raw_output_contents) == [raw]


async def test_timeout_priority_and_deadline_reach_the_service(
    client: Client, service: MemoryInference
) -> None:
    parameters = {
        "timeout": pb.InferParameter(int64_param=60_000_000),
        "priority": pb.InferParameter(uint64_param=2),
        "binary_data_output": pb.InferParameter(bool_param=True),
    }
    await client("ModelInfer", request(parameters=parameters))
    await client("ModelInfer", request(parameters=parameters), timeout=20)
    await client("ModelInfer", request(), timeout=20)
    await client("ModelInfer", request())
    asked = [each for each in service.asked if isinstance(each, InferRequest)]
    assert [each.priority for each in asked] == [2, 2, 0, 0]
    first, second, third, fourth = (each.timeout_seconds for each in asked)
    assert (first, fourth) == (60, None)
    assert second is not None and 0 < second < 21  # gRPC rounds up
    assert third is not None and 0 < third < 21


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown datatype": ({"datatype": "FP8"}, "wrong_datatype"),
    "negative dimension": ({"shape": [-1, 8, 8]}, "wrong_shape"),
    "huge dimension": ({"shape": [2**62, 2**62]}, "wrong_shape"),
    "zero beside huge": ({"shape": [0, 2**62, 2**62]}, "wrong_shape"),
    "many dimensions": ({"shape": [1] * 1000}, "wrong_shape"),
    "too few bytes": ({"shape": [3, 8, 8]}, "wrong_size"),
    "shared memory": (
        {"parameters": {"shared_memory_region": pb.InferParameter(string_param="r")}},
        "bad_parameter",
    ),
    "raw and typed": ({"contents": {"fp32_contents": [1.0]}}, "malformed"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_input_that_no_tensor_can_be_is_refused(client: Client, case: str) -> None:
    fields, code = WRONG[case]
    message = pb.ModelInferRequest(model_name="digits", raw_input_contents=[X.tobytes()])
    message.inputs.add(**{"name": "x", "datatype": "FP32", "shape": X.shape} | fields)
    assert (await client.refused("ModelInfer", message))[:2] == (Code.INVALID_ARGUMENT, code)


async def test_typed_contents_that_do_not_fit_are_refused(client: Client) -> None:
    async def code(datatype: str, shape: list[int], **contents: Any) -> str:
        message = pb.ModelInferRequest(model_name=f"echo_{datatype}")
        message.inputs.add(name="x", datatype=datatype, shape=shape, contents=contents)
        return (await client.refused("ModelInfer", message))[1]

    assert await code("FP32", [1, 3], fp32_contents=[1.0]) == "wrong_size"
    assert await code("BYTES", [1, 3], bytes_contents=[b""] * 4) == "wrong_size"
    assert await code("FP32", [1, 3], fp64_contents=[1.0] * 3) == "wrong_datatype"
    assert await code("INT8", [1, 3], int_contents=[1, 2, 128]) == "wrong_value"
    assert await code("UINT16", [1, 3], uint_contents=[1, 2, 2**16]) == "wrong_value"


async def test_raw_contents_that_do_not_fit_are_refused(client: Client) -> None:
    async def code(datatype: str, *raw: bytes) -> str:
        message = pb.ModelInferRequest(model_name=f"echo_{datatype}", raw_input_contents=raw)
        message.inputs.add(name="x", datatype=datatype, shape=[1, 3])
        return (await client.refused("ModelInfer", message))[1]

    element = struct.pack("<I", 1) + b"a"
    assert await code("FP32", b"", b"") == "malformed"
    assert await code("BOOL", b"\0\1\2") == "wrong_value"
    assert await code("BYTES", element * 2) == "wrong_size"
    assert await code("BYTES", element * 4) == "wrong_size"
    assert await code("BYTES", element * 2 + element[:3]) == "wrong_size"
    assert await code("BYTES", element * 2 + struct.pack("<I", 2**32 - 1)) == "wrong_size"


async def test_parameters_that_are_not_supported_are_named(client: Client) -> None:
    for name, value in {
        "timeout": {"int64_param": -1},
        "priority": {"string_param": "high"},
        "sequence_id": {"int64_param": 3},
    }.items():
        parameters = {name: pb.InferParameter(**value)}
        found, _, details = await client.refused("ModelInfer", request(parameters=parameters))
        assert (found, name in details) == (Code.INVALID_ARGUMENT, True)
    message = request()
    message.outputs.add(name="logits", parameters={"classification": pb.InferParameter(int64_param=3)})
    assert (await client.refused("ModelInfer", message))[1] == "bad_parameter"


@pytest.mark.parametrize(
    ("http", "expected"),
    [
        (400, Code.INVALID_ARGUMENT),
        (404, Code.NOT_FOUND),
        (413, Code.RESOURCE_EXHAUSTED),
        (429, Code.RESOURCE_EXHAUSTED),
        (503, Code.UNAVAILABLE),
        (504, Code.DEADLINE_EXCEEDED),
    ],
)
async def test_refusals_have_the_status_of_grpc(
    client: Client, service: MemoryInference, http: int, expected: Any
) -> None:
    service.refusal = Refusal(http, "stable", "München " * 2_000, retry_after_seconds=1.5)
    call = client.channel.unary_unary(f"/{servicer.NAME}/ModelInfer")(request().SerializeToString())
    assert await call.code() == expected
    assert dict(await call.trailing_metadata()) == {status.CODE: "stable", status.RETRY: "2"}
    assert (await call.details()).startswith("München")


async def test_failure_is_logged_and_its_text_stays_here(client: Client, service: MemoryInference) -> None:
    service.failure = RuntimeError("secret")
    found, code, details = await client.refused("ModelInfer", request())
    assert (found, code, "secret" in details) == (Code.INTERNAL, "internal", False)


async def test_bytes_that_are_no_message_are_refused(client: Client) -> None:
    for name in ANSWERS:
        found, code, _ = await client.refused(name, b"\xff" * 40)
        assert (name, found, code) == (name, Code.INVALID_ARGUMENT, "malformed")
    assert (await client.refused("ModelMetadata"))[1] == "unknown_model"


async def test_large_messages_are_refused_also_compressed_ones(client: Client) -> None:
    large = request(np.zeros((2**14, 8, 8), np.float32))
    assert (await client.refused("ModelInfer", large))[0] == Code.RESOURCE_EXHAUSTED
    compressed = await client.refused("ModelInfer", large, compression=grpc.Compression.Gzip)
    assert compressed[0] == Code.RESOURCE_EXHAUSTED
    small = await client("ModelInfer", request(), compression=grpc.Compression.Gzip)
    assert np.array_equal(rows_of(small), logits(X))


async def test_prediction_ends_when_its_client_vanishes(client: Client, service: MemoryInference) -> None:
    service.is_held = True
    waiting = asyncio.ensure_future(client("ModelInfer", request()))
    await service.held.wait()
    waiting.cancel()
    await service.cancelled.wait()
    assert service.cancelled.is_set()  # else it would wait until the test's time is over


async def test_prediction_ends_at_its_deadline(client: Client, service: MemoryInference) -> None:
    service.is_held = True
    found, _, _ = await client.refused("ModelInfer", request(), timeout=1)
    assert found == Code.DEADLINE_EXCEEDED
    await service.cancelled.wait()


async def test_stream_answers_in_order_and_survives_a_refusal(client: Client) -> None:
    async def messages() -> AsyncIterator[bytes]:
        for number in range(200):
            model = "nobody" if number == 7 else "digits"
            yield request(X + number, model, id=str(number)).SerializeToString()
        yield b"\xff"

    answers = [each async for each in client.stream(messages())]
    assert [each.infer_response.id for each in answers] == [str(number) for number in range(200)] + [""]
    assert [at for at, each in enumerate(answers) if each.error_message] == [7, 200]
    assert np.array_equal(rows_of(answers[9].infer_response), logits(X + 9))
    assert answers[9].infer_response.parameters["triton_final_response"].bool_param


async def test_stream_ends_what_it_waits_for(client: Client, service: MemoryInference) -> None:
    service.is_held = True

    async def messages() -> AsyncIterator[bytes]:
        yield request().SerializeToString()
        await asyncio.Event().wait()

    call = client.stream(messages())
    await service.held.wait()
    call.cancel()
    await service.cancelled.wait()
    assert service.cancelled.is_set()


async def test_every_call_about_models_needs_the_token(service: MemoryInference) -> None:
    server = await start(service, Address("127.0.0.1", 0), token="secret")
    try:
        async with connected(server.address.port) as client:
            for name in ANSWERS.keys() - OPEN_TO_ALL:
                assert (await client.refused(name))[:2] == (Code.UNAUTHENTICATED, "no_token")
            wrong = (("authorization", "Bearer secrets"),)
            assert (await client.refused("RepositoryIndex", metadata=wrong))[1] == "bad_token"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.stream(iter([b""])).read()
            assert caught.value.code() == Code.UNAUTHENTICATED
            right = (("authorization", "Bearer secret"),)
            assert (await client("RepositoryIndex", metadata=right)).models
            for name in OPEN_TO_ALL:
                await client(name)
    finally:
        await server.stop(0)


async def test_address_that_is_taken_is_refused(server: GrpcServer, service: MemoryInference) -> None:
    with pytest.raises(UserError, match="cannot be listened"):
        await start(service, server.address)


async def test_grpc_and_http_share_an_event_loop(client: Client) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient() as browser:
        both = [call for _ in range(50) for call in (client("ModelInfer", request()), browser.get(url))]
        answers = await asyncio.gather(*both)
    assert all(np.array_equal(rows_of(each), logits(X)) for each in answers[::2])
    assert {each.status_code for each in answers[1::2]} == {204}
    http.should_exit = True
    await serving


def test_generated_messages_are_current(tmp_path: Path) -> None:
    grpc_messages.generate(tmp_path)
    for name in grpc_messages.GENERATED:
        assert (tmp_path / name).read_bytes() == (grpc_messages.FOLDER / name).read_bytes()
