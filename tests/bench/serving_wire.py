"""JSON, the binary extension of REST, and gRPC, with little, middling and large rows: bytes on the wire and requests per CPU-second.

The model is one linear layer, so that nearly all of the time is the protocol's. JSON has the shortest digits that float32 needs.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import orjson

from coordinator.serving.grpc_api import open_inference_grpc_pb2 as pb
from tests.bench.serving_rates import Load, Turn, in_turns, ratio, run
from tests.support import serving_load as loads
from tests.support.proxies import Address, Line
from tests.support.serving import Server, cpu_seconds, rows, serving, torch_model

SHAPES: Mapping[str, tuple[int, ...]] = {"256 B": (8, 8), "12 KB": (32, 32, 3), "600 KB": (224, 224, 3)}
_TOTALS: Mapping[str, Mapping[str, int]] = {
    "256 B": {"JSON": 4000, "binary": 4000, "gRPC": 1500},
    "12 KB": {"JSON": 1500, "binary": 3000, "gRPC": 1200},
    "600 KB": {"JSON": 40, "binary": 250, "gRPC": 150},
}
_COUNTED = 20
_METHOD = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class GrpcLoad(Load):
    """The same by gRPC; each connection has a channel of its own. `requests`: messages."""

    def turn(self) -> Turn:
        before, began = cpu_seconds(self.pid), time.perf_counter()
        seconds = asyncio.run(_calls(self.port, self.requests[0], self.connections, self.total))
        wall, used = time.perf_counter() - began, cpu_seconds(self.pid) - before
        return Turn(self.total / used, self.total / wall, statistics.median(seconds))


def protocols(folder: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    with serving(folder / "wire-home", "--grpc", "127.0.0.1:0") as server:
        for size, shape in SHAPES.items():
            name = "".join(size.lower().split())
            server.deployed(
                name, torch_model(folder / name, "logreg", input_shape=list(shape)), slo_ms=60_000
            )
            figures |= _of_size(server, size, name, rows(1, shape))
    return figures


def _of_size(server: Server, size: str, name: str, x: npt.NDArray[np.float32]) -> dict[str, float]:
    path = f"/v2/models/{name}/infer"
    http = ("127.0.0.1", server.port)
    far = ("127.0.0.1", int(server.place["grpc"].rpartition(":")[2]))
    contents: dict[str, tuple[type[Load], Address, bytes]] = {
        "JSON": (Load, http, _json_request(path, x)),
        "binary": (Load, http, loads.binary_request(path, x)),
        "gRPC": (GrpcLoad, far, _message(name, x)),
    }
    ways = {
        way: kind(server.process.pid, place[1], [content], _TOTALS[size][way])
        for way, (kind, place, content) in contents.items()
    }
    sent = {
        way: _bytes_of_one(place, lambda port, total, load=ways[way]: _send(load, port, total))
        for way, (_, place, _) in contents.items()
    }
    turns = in_turns(ways)
    figures: dict[str, float] = {}
    for way in ("binary", "gRPC"):
        figures[f"{size}, {way}: bytes / JSON's"] = sent[way] / sent["JSON"]
        figures[f"{size}, {way}: rate / JSON's"] = ratio(turns[way], turns["JSON"])
    for way in ways:
        figures[f"{size}, {way}: bytes"] = sent[way]
        figures[f"{size}, {way}: requests per CPU-second"] = statistics.median(t.rate for t in turns[way])
        figures[f"{size}, {way}: requests per second"] = statistics.median(t.wall for t in turns[way])
    return figures


def _send(load: Load, port: int, total: int) -> None:
    """Requests one after the other over one connection."""
    if isinstance(load, GrpcLoad):
        asyncio.run(_calls(port, load.requests[0], 1, total))
    else:
        run(loads.closed_loop(port, load.requests, 1, total=total))


def _bytes_of_one(place: Address, send: Callable[[int, int], None]) -> float:
    """Bytes of a request and its answer in both directions, without what a connection costs once."""
    with Line(place) as line:
        counts = [0]
        for total in (1, 1 + _COUNTED):
            send(line.address[1], total)
            time.sleep(0.1)  # the line ends its connections after their clients
            counts.append(line.bytes_up + line.bytes_down)
    return ((counts[2] - counts[1]) - counts[1]) / _COUNTED


def _json_request(path: str, x: npt.NDArray[np.float32]) -> bytes:
    tensor = {"name": "x", "shape": x.shape, "datatype": "FP32", "data": x.ravel()}
    document = {"inputs": [tensor], "outputs": [{"name": "logits"}]}
    return loads.http_request(path, orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))


def _message(name: str, x: npt.NDArray[np.float32]) -> bytes:
    message = pb.ModelInferRequest(model_name=name, raw_input_contents=[x.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    message.outputs.add(name="logits")
    return bytes(message.SerializeToString())


async def _calls(port: int, message: bytes, connections: int, total: int) -> list[float]:
    """Seconds of each call."""
    left = itertools.count()
    seconds = []

    async def run_one() -> None:
        options: Any = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call = channel.unary_unary(_METHOD)
            while next(left) < total:
                began = time.perf_counter()
                await call(message)
                seconds.append(time.perf_counter() - began)

    await asyncio.gather(*(run_one() for _ in range(connections)))
    return seconds
