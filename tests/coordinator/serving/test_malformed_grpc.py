"""Malformed requests over gRPC: every one is refused as the client's mistake, and nothing else notices."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.serving.grpc_api import open_inference_grpc_pb2 as pb
from coordinator.serving.grpc_api import servicer, status
from tests.support.serving import Server, logits_of, rows, serving, torch_model

pytestmark = pytest.mark.slow

REQUESTS = 2_000
MIB = 2**20
METHODS = {
    "ServerLive": pb.ServerLiveRequest,
    "ServerReady": pb.ServerReadyRequest,
    "ModelReady": pb.ModelReadyRequest,
    "ServerMetadata": pb.ServerMetadataRequest,
    "ModelMetadata": pb.ModelMetadataRequest,
    "ModelInfer": pb.ModelInferRequest,
    "ModelConfig": pb.ModelConfigRequest,
    "ModelStatistics": pb.ModelStatisticsRequest,
    "RepositoryIndex": pb.RepositoryIndexRequest,
}
CLIENTS_MISTAKE = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
DATATYPES = ["BOOL", "INT8", "INT64", "UINT16", "FP16", "FP32", "FP64", "BYTES", "FP8", "", "fp32", "\0"]
SHAPES: list[list[int]] = [
    [], [0], [-1], [1], [2, 8], [2, 8, 8, 1], [2, 64], [0, 8, 8], [2, 8, 9], [2**31, 8, 8], [2**62] * 3,
    [-(2**63), 1, 1], [1] * 100, [0, 2**31 - 1, 2**31 - 1, 2**31 - 1], [5_000, 8, 8],
]  # fmt: skip
NAMES = ["", "y", "x\0", "X", "é" * 1_000, "n" * 100_000, "digits", "../../etc/passwd"]
NUMBERS = [float("nan"), float("inf"), -float("inf"), 1e300]
PARAMETERS: list[tuple[str, dict[str, Any]]] = [
    ("timeout", {"int64_param": -1}), ("timeout", {"string_param": "soon"}), ("timeout", {}),
    ("timeout", {"double_param": float("nan")}), ("priority", {"uint64_param": 2**64 - 1}),
    ("priority", {"bool_param": True}), ("sequence_id", {"int64_param": 1}), ("", {"bool_param": True}),
    ("p" * 10_000, {}),
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serving")
    with serving(folder / "home", "--grpc", "127.0.0.1:0") as running:
        status_code, answer = running.deploy("digits", torch_model(folder / "mlp"), slo_ms=60_000)
        assert status_code == 200, answer
        yield running


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(
        server.place["grpc"], options=[("grpc.max_send_message_length", -1)]
    ) as opened:
        yield opened


def call(channel: grpc.Channel, method: str, data: bytes) -> tuple[Any, bytes]:
    """Status and answer."""
    try:
        return grpc.StatusCode.OK, channel.unary_unary(f"/{servicer.NAME}/{method}")(data, timeout=30)
    except grpc.RpcError as error:
        assert (
            dict(error.trailing_metadata()).get(status.CODE)
            or error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        return error.code(), error.details().encode()


def valid(x: np.ndarray) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="digits", id="7")
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    message.raw_input_contents.append(x.tobytes())
    return message


class Malformed:
    """Requests of many kinds, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._kinds: list[Callable[[], tuple[str, bytes]]] = [
            self.noise, self.damaged, self.wrong_tensor, self.wrong_contents, self.wrong_names, self.wrong_values,
        ]  # fmt: skip

    def one(self) -> tuple[str, bytes]:
        return self._kinds[self.random.integers(len(self._kinds))]()

    def noise(self) -> tuple[str, bytes]:
        """Bytes that are rarely a message of any method."""
        return self.choice(list(METHODS)), b"\xff" + self.random.bytes(int(self.random.integers(200)))

    def damaged(self) -> tuple[str, bytes]:
        """A request of which a field has another number, a length lies, or the end is missing."""
        data = bytearray(valid(rows(2)).SerializeToString())
        for at in self.random.integers(0, 60, self.random.integers(1, 5)):
            data[at] = self.random.integers(256)
        return "ModelInfer", bytes(data[: self.random.integers(1, len(data))])

    def wrong_tensor(self) -> tuple[str, bytes]:
        message = valid(rows(2))
        tensor = message.inputs[0]
        if self.random.random() < 0.7:
            del tensor.shape[:]
            tensor.shape.extend(self.choice(SHAPES))
        else:
            tensor.datatype = self.choice([each for each in DATATYPES if each != "FP32"])
        if self.random.random() < 0.3:
            message.raw_input_contents[0] = self.random.bytes(int(self.random.integers(600)))
        return "ModelInfer", message.SerializeToString()

    def wrong_contents(self) -> tuple[str, bytes]:
        """Typed contents in other fields or numbers, raw contents beside them, or other numbers of those."""
        message = valid(rows(2))
        contents = message.inputs[0].contents
        for field in contents.DESCRIPTOR.fields:
            if self.random.random() < 0.3:
                value: Any = b"\0" if field.name == "bytes_contents" else 1
                getattr(contents, field.name).extend([value] * int(self.random.integers(1, 200)))
        del message.raw_input_contents[int(self.random.integers(2)) :]
        message.raw_input_contents.extend([b""] * int(self.random.integers(1, 3)))
        return "ModelInfer", message.SerializeToString()

    def wrong_names(self) -> tuple[str, bytes]:
        message = valid(rows(2))
        match int(self.random.integers(5)):
            case 0:
                message.model_name = self.choice(NAMES[:-2])
            case 1:
                message.model_version = self.choice(NAMES[1:])
            case 2:
                message.inputs[0].name = self.choice(NAMES)
            case 3:
                message.outputs.add(name=self.choice(NAMES))
            case 4:
                name, value = self.choice(PARAMETERS)
                message.parameters[name].CopyFrom(pb.InferParameter(**value))
        return "ModelInfer", message.SerializeToString()

    def wrong_values(self) -> tuple[str, bytes]:
        """Numbers that are not finite, an input twice, or none."""
        x = rows(2).astype(np.float64)
        x[1, 3, 3] = self.choice(NUMBERS)
        message = pb.ModelInferRequest(model_name="digits")
        for _ in range(int(self.random.integers(3))):
            message.inputs.add(name="x", datatype="FP64", shape=x.shape)
            message.raw_input_contents.append(x.tobytes())
        return "ModelInfer", message.SerializeToString()

    def choice(self, listed: list[Any]) -> Any:
        return listed[self.random.integers(len(listed))]


def test_malformed_requests_are_the_clients_mistake(server: Server, channel: grpc.Channel) -> None:
    good = rows(2, seed=3)
    expected = logits_of(server.infer("digits", good)[1])
    requests = Malformed(7)
    found = Counter[Any]()
    pids = server.status("digits")["pids"]
    for number in range(REQUESTS):
        if number == REQUESTS // 4:  # by then every kind has been there
            before = memory_bytes(server)
        if number % 20 == 0:
            assert_answers(channel, good, expected)
        method, data = requests.one()
        code, answer = call(channel, method, data)
        found[code] += 1
        # Damage may leave a request sound: in a name that is not read, in a row's values.
        assert code in CLIENTS_MISTAKE or (code is grpc.StatusCode.OK and is_sound(data)), (
            method,
            data[:300],
            answer,
        )
    assert found[grpc.StatusCode.OK] < REQUESTS / 20, found
    assert server.status("digits")["pids"] == pids
    assert memory_bytes(server) - before < 16 * MIB


def is_sound(data: bytes) -> bool:
    message = pb.ModelInferRequest.FromString(data)
    return message.model_name == "digits" and [each.name for each in message.inputs] == ["x"]


def assert_answers(channel: grpc.Channel, x: np.ndarray, expected: np.ndarray) -> None:
    code, answer = call(channel, "ModelInfer", valid(x).SerializeToString())
    assert code is grpc.StatusCode.OK
    response = pb.ModelInferResponse.FromString(answer)
    logits = np.frombuffer(response.raw_output_contents[0], np.float32)
    assert np.allclose(logits.reshape(expected.shape), expected, atol=1e-5)


def memory_bytes(server: Server) -> int:
    """Of the front."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def test_requests_that_are_too_large_are_refused(server: Server, channel: grpc.Channel) -> None:
    message = valid(rows(2))
    message.raw_input_contents[0] = bytes(65 * MIB)
    data = message.SerializeToString()
    before = memory_bytes(server)
    for compression in (None, grpc.Compression.Gzip, grpc.Compression.Gzip):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{servicer.NAME}/ModelInfer")(data, timeout=60, compression=compression)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert memory_bytes(server) - before < 80 * MIB
    x = rows(2)
    assert_answers(channel, x, logits_of(server.infer("digits", x)[1]))


def test_streams_of_malformed_requests_are_answered_one_by_one(channel: grpc.Channel) -> None:
    requests = Malformed(11)
    sent = [data for method, data in (requests.one() for _ in range(200)) if method == "ModelInfer"]
    stream = channel.stream_stream(f"/{servicer.NAME}/ModelStreamInfer")
    answers = [pb.ModelStreamInferResponse.FromString(each) for each in stream(iter(sent), timeout=60)]
    assert len(answers) == len(sent)
    for data, answer in zip(sent, answers, strict=True):
        assert answer.error_message or is_sound(data)


def test_bytes_that_are_no_http2_harm_nobody(server: Server, channel: grpc.Channel) -> None:
    host, _, port = server.place["grpc"].rpartition(":")
    random = np.random.default_rng(3)
    for _ in range(50):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(random.bytes(int(random.integers(1, 400))))
    x = rows(2)
    assert_answers(channel, x, logits_of(server.infer("digits", x)[1]))
