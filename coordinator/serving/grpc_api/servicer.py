"""The service GRPCInferenceService: each call is parsed, asked of the inference service, and its answer serialized.

Requests arrive as bytes and are parsed here, so that bytes that are no message are refused rather than failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
import structlog
from google.protobuf import json_format

from coordinator.errors import Refusal
from coordinator.serving import triton
from coordinator.serving.grpc_api import messages, status
from coordinator.serving.grpc_api import open_inference_grpc_pb2 as pb
from coordinator.serving.inference import InferenceService, invalid

NAME = "inference.GRPCInferenceService"

# Of one stream; the answers leave in the order of the requests.
_IN_FLIGHT = 64

_log = structlog.get_logger("fedloop.serving")
_Context: TypeAlias = grpc.aio.ServicerContext
_Q = TypeVar("_Q")
_A = TypeVar("_A")


def handler(service: InferenceService) -> grpc.GenericRpcHandler:
    """All calls of the protocol."""
    calls = _Calls(service)
    return grpc.method_handlers_generic_handler(
        NAME,
        {
            "ServerLive": _unary(pb.ServerLiveRequest, calls.server_live),
            "ServerReady": _unary(pb.ServerReadyRequest, calls.server_ready),
            "ModelReady": _unary(pb.ModelReadyRequest, calls.model_ready),
            "ServerMetadata": _unary(pb.ServerMetadataRequest, calls.server_metadata),
            "ModelMetadata": _unary(pb.ModelMetadataRequest, calls.model_metadata),
            "ModelInfer": _unary(pb.ModelInferRequest, calls.model_infer),
            "ModelStreamInfer": _stream(calls.model_infer),
            "ModelConfig": _unary(pb.ModelConfigRequest, calls.model_config),
            "ModelStatistics": _unary(pb.ModelStatisticsRequest, calls.model_statistics),
            "RepositoryIndex": _unary(pb.RepositoryIndexRequest, calls.repository_index),
        },
    )


class _Calls:
    """The calls, message for message. All raise what the service raises."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def server_live(self, request: pb.ServerLiveRequest, context: _Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: pb.ServerReadyRequest, context: _Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._service.is_ready)

    async def model_ready(self, request: pb.ModelReadyRequest, context: _Context) -> pb.ModelReadyResponse:
        try:
            return pb.ModelReadyResponse(ready=self._service.describe(request.name, request.version).is_ready)
        except Refusal as refusal:
            if refusal.status != 503:
                raise
            return pb.ModelReadyResponse(ready=False)

    async def server_metadata(
        self, request: pb.ServerMetadataRequest, context: _Context
    ) -> pb.ServerMetadataResponse:
        return _filled(pb.ServerMetadataResponse, triton.server_metadata())

    async def model_metadata(
        self, request: pb.ModelMetadataRequest, context: _Context
    ) -> pb.ModelMetadataResponse:
        model = self._service.describe(request.name, request.version)
        return _filled(pb.ModelMetadataResponse, triton.model_metadata(model))

    async def model_config(self, request: pb.ModelConfigRequest, context: _Context) -> pb.ModelConfigResponse:
        model = self._service.describe(request.name, request.version)
        return _filled(pb.ModelConfigResponse, {"config": triton.config(model)})

    async def model_statistics(
        self, request: pb.ModelStatisticsRequest, context: _Context
    ) -> pb.ModelStatisticsResponse:
        figures = triton.statistics(self._service, request.name, request.version)
        return _filled(pb.ModelStatisticsResponse, figures)

    async def repository_index(
        self, request: pb.RepositoryIndexRequest, context: _Context
    ) -> pb.RepositoryIndexResponse:
        if request.repository_name:
            raise invalid(
                "unknown_repository", "repositories have no names here; leave repository_name empty"
            )
        models = triton.index(self._service, only_ready=request.ready)
        return _filled(pb.RepositoryIndexResponse, {"models": models})

    async def model_infer(self, request: pb.ModelInferRequest, context: _Context) -> pb.ModelInferResponse:
        asked = messages.infer_request(request, deadline_seconds=context.time_remaining())
        return messages.infer_response(await self._service.infer(asked))


def _unary(kind: type[_Q], call: Callable[[_Q, _Context], Awaitable[Any]]) -> grpc.RpcMethodHandler:
    """A call of one request and one answer. What nobody foresaw is logged, and its text stays here."""

    async def answer(data: bytes, context: _Context) -> bytes:
        try:
            response = await call(messages.parse(kind, data), context)
            return bytes(response.SerializeToString())
        except Refusal as refusal:
            await status.abort(context, refusal)
        except Exception:
            _log.exception("grpc_call_failed", request=kind.__name__)
            await status.abort(context, _failure())
        raise AssertionError("a call goes on after its end")

    return grpc.unary_unary_rpc_method_handler(answer)


def _stream(
    call: Callable[[pb.ModelInferRequest, _Context], Awaitable[pb.ModelInferResponse]],
) -> grpc.RpcMethodHandler:
    """A stream of requests, answered together where the scheduler can, and in order. A refusal does not end it."""

    async def one(data: bytes, context: _Context) -> bytes:
        try:
            request = messages.parse(pb.ModelInferRequest, data)
        except Refusal as refusal:
            return _refused(refusal, "")
        try:
            response = await call(request, context)
            response.parameters["triton_final_response"].bool_param = True
            return bytes(pb.ModelStreamInferResponse(infer_response=response).SerializeToString())
        except Refusal as refusal:
            return _refused(refusal, request.id)
        except Exception:
            _log.exception("grpc_call_failed", request="ModelStreamInfer")
            return _refused(_failure(), request.id)

    async def answers(requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        waiting: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(_IN_FLIGHT)
        tasks: set[asyncio.Task[bytes]] = set()

        async def read() -> None:
            async for data in requests:
                task = asyncio.create_task(one(data, context))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                await waiting.put(task)
            await waiting.put(None)

        reader = asyncio.create_task(read())
        try:
            while task := await waiting.get():
                yield await task
        finally:
            for each in (reader, *tasks):
                each.cancel()

    return grpc.stream_stream_rpc_method_handler(answers)


def _refused(refusal: Refusal, request_id: str) -> bytes:
    response = pb.ModelStreamInferResponse(
        error_message=status.details_of(refusal), infer_response=pb.ModelInferResponse(id=request_id)
    )
    response.infer_response.parameters[status.CODE].string_param = refusal.code
    return bytes(response.SerializeToString())


def _failure() -> Refusal:
    return Refusal(500, "internal", "the server failed; its log says why")


def _filled(kind: type[_A], document: dict[str, Any]) -> _A:
    """A message from its JSON."""
    message = kind()
    json_format.ParseDict(document, message)
    return message
