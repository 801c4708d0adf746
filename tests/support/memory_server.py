"""`python -m tests.support.memory_server`: the front and gRPC over a service in memory; prints where they listen."""

from __future__ import annotations

import json
import sys

import uvicorn
import uvloop

from coordinator.option_parsers import Address
from coordinator.server.http_protocol import LimitedProtocol
from coordinator.server.listening import bound_socket
from coordinator.serving.front import Front, Limits
from coordinator.serving.grpc_api.server import start
from tests.support.memory_inference import MemoryInference


async def serve() -> None:
    service = MemoryInference()
    grpc = await start(service, Address("127.0.0.1", 0))
    config = uvicorn.Config(Front(service, Limits()), http=LimitedProtocol, lifespan="off", log_config=None)  # type: ignore[arg-type]
    with bound_socket("", Address("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        sys.stdout.write(json.dumps({"url": f"http://{host}:{port}", "grpc": str(grpc.address)}) + "\n")
        sys.stdout.flush()
        await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(serve())
