"""Calls of other projects' clients, each printed as one line of JSON: its name, and its result or its error.

    python unmodified_clients.py triton|kserve|openai|texts|datatypes URL GRPC_ADDRESS MODEL

Runs in the environment of tests/support/clients.txt and imports nothing of this project. tritonclient and kserve each bring the
protocol's messages, so that one process imports one of them. MODEL takes `x`, FP32 rows of 8 × 8, and answers `logits`. For openai
it generates text; for texts it takes `text`, BYTES; for datatypes it is the beginning of names such as `echo_INT8`.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

ROWS = np.random.default_rng(5).random((3, 8, 8), np.float32)
URL, GRPC, MODEL = sys.argv[2:] if __name__ == "__main__" else ("", "", "")


def report(name: str, call: Callable[[], Any]) -> None:
    try:
        _print(name, result=call())
    except Exception as error:
        _print(name, error=_described(error))


async def report_async(name: str, call: Callable[[], Awaitable[Any]]) -> None:
    try:
        _print(name, result=await call())
    except Exception as error:
        _print(name, error=_described(error))


def _print(name: str, **found: Any) -> None:
    sys.stdout.write(json.dumps({"call": name, **found}, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.decode() if isinstance(value, bytes) else str(value)


def _described(error: Exception) -> dict[str, Any]:
    status = (
        getattr(error, "status", None) or getattr(error, "status_code", None) or getattr(error, "code", None)
    )
    return {
        "type": type(error).__name__,
        "status": str(status() if callable(status) else status),
        "message": str(error)[:500],
        "param": getattr(error, "param", None),
    }


def fields_of(*files: Any) -> dict[str, list[Any]]:
    """Number, type, whether it repeats, and message or enum of each field of all messages; numbers of enums and kinds of calls."""
    found: dict[str, list[Any]] = {}

    def add(message: Any) -> None:
        for field in message.fields:
            kind = field.message_type or field.enum_type
            found[field.full_name] = [field.number, field.type, field.is_repeated, kind and kind.full_name]
        for nested in message.nested_types:
            add(nested)

    for file in files:
        for message in file.message_types_by_name.values():
            add(message)
        for enum in file.enum_types_by_name.values():
            found |= {f"{enum.full_name}.{value.name}": [value.number] for value in enum.values}
        for service in file.services_by_name.values():
            for call in service.methods:
                types = [call.input_type.full_name, call.output_type.full_name]
                found[call.full_name] = [*types, call.client_streaming, call.server_streaming]
    return found


def triton_http() -> None:
    import tritonclient.http as triton

    def tensor(x: Any = ROWS, datatype: str = "FP32", name: str = "x", binary: bool = True) -> Any:
        made = triton.InferInput(name, x.shape, datatype)
        made.set_data_from_numpy(x, binary_data=binary)
        return made

    def logits(**options: Any) -> Any:
        return client.infer(MODEL, options.pop("inputs", [tensor()]), **options).as_numpy("logits")

    client = triton.InferenceServerClient(URL.removeprefix("http://"))
    report("server live", client.is_server_live)
    report("server ready", client.is_server_ready)
    report("server metadata", client.get_server_metadata)
    report("index", client.get_model_repository_index)
    report("model ready", lambda: client.is_model_ready(MODEL))
    report("model metadata", lambda: client.get_model_metadata(MODEL))
    report("config", lambda: client.get_model_config(MODEL))
    report("statistics", lambda: client.get_inference_statistics(MODEL))
    report("statistics of all", client.get_inference_statistics)
    version = client.get_model_metadata(MODEL)["versions"][-1]
    report("version ready", lambda: client.is_model_ready(MODEL, version))
    report("version metadata", lambda: client.get_model_metadata(MODEL, version))
    report("version config", lambda: client.get_model_config(MODEL, version))
    report("version statistics", lambda: client.get_inference_statistics(MODEL, version))
    for sent in (True, False):
        for wanted in (True, False):
            outputs = [triton.InferRequestedOutput("logits", binary_data=wanted)]
            name = f"infer {'binary' if sent else 'JSON'} to {'binary' if wanted else 'JSON'}"
            report(name, lambda s=sent, o=outputs: logits(inputs=[tensor(binary=s)], outputs=o))
    report("infer without outputs", logits)
    report("infer version", lambda: logits(model_version=version))
    report("infer request id", lambda: client.infer(MODEL, [tensor()], request_id="a 7").get_response()["id"])
    report("infer priority and timeout", lambda: logits(priority=2, timeout=5_000_000))
    many = np.tile(ROWS, (20, 1, 1))
    for algorithm in ("gzip", "deflate"):
        both = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
        report(f"infer {algorithm}", lambda b=both: logits(**b))
        report(f"infer much {algorithm}", lambda b=both: logits(inputs=[tensor(many)], **b)[:3])
        report(
            f"infer much JSON {algorithm}",
            lambda b=both: logits(
                inputs=[tensor(many, binary=False)],
                outputs=[triton.InferRequestedOutput("logits", binary_data=False)],
                **b,
            )[:3],
        )
    report("infer async", lambda: client.async_infer(MODEL, [tensor()]).get_result().as_numpy("logits"))

    def by_hand() -> Any:
        body, length = triton.InferenceServerClient.generate_request_body([tensor()])
        headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
        response = client._post(f"v2/models/{MODEL}/infer", body, headers, None)
        found = triton.InferenceServerClient.parse_response_body(
            response.read(), header_length=int(response.get("inference-header-content-length"))
        )
        return found.as_numpy("logits")

    report("infer by hand", by_hand)
    report("unknown model", lambda: client.infer("nobody", [tensor()]))
    report("unknown version", lambda: client.infer(MODEL, [tensor()], model_version="77"))
    report("wrong shape", lambda: client.infer(MODEL, [tensor(ROWS[:, :4])]))
    report("wrong name", lambda: client.infer(MODEL, [tensor(name="y")]))
    report("classification", lambda: logits(outputs=[triton.InferRequestedOutput("logits", class_count=3)]))
    report("trace settings", client.get_trace_settings)

    async def aio() -> None:
        import tritonclient.http.aio as triton_aio

        async with triton_aio.InferenceServerClient(URL.removeprefix("http://")) as client:
            await report_async("aio server live", client.is_server_live)
            await report_async("aio server ready", client.is_server_ready)
            await report_async("aio server metadata", client.get_server_metadata)
            await report_async("aio index", client.get_model_repository_index)
            await report_async("aio model ready", lambda: client.is_model_ready(MODEL))
            await report_async("aio model metadata", lambda: client.get_model_metadata(MODEL))
            await report_async("aio config", lambda: client.get_model_config(MODEL))
            await report_async("aio statistics", lambda: client.get_inference_statistics(MODEL))

            async def infer(**options: Any) -> Any:
                return (
                    await client.infer(MODEL, [tensor(binary=options.pop("binary", True))], **options)
                ).as_numpy("logits")

            await report_async("aio infer binary", infer)
            await report_async("aio infer JSON", lambda: infer(binary=False))
            both = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "gzip"}
            await report_async("aio infer gzip", lambda: infer(**both))
            both = {"request_compression_algorithm": "deflate", "response_compression_algorithm": "deflate"}
            await report_async("aio infer deflate", lambda: infer(**both))

    asyncio.run(aio())


def triton_grpc() -> None:
    import tritonclient.grpc as triton

    def tensor(x: Any = ROWS, name: str = "x") -> Any:
        made = triton.InferInput(name, x.shape, "FP32")
        made.set_data_from_numpy(x)
        return made

    def logits(**options: Any) -> Any:
        return client.infer(MODEL, [tensor()], **options).as_numpy("logits")

    report("messages", lambda: fields_of(triton.service_pb2.DESCRIPTOR, triton.model_config_pb2.DESCRIPTOR))
    client = triton.InferenceServerClient(GRPC)
    version = client.get_model_metadata(MODEL).versions[-1]
    reads: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("server metadata", client.get_server_metadata, ()),
        ("index", client.get_model_repository_index, ()),
        ("model metadata", client.get_model_metadata, (MODEL,)),
        ("config", client.get_model_config, (MODEL,)),
        ("statistics", client.get_inference_statistics, (MODEL,)),
        ("statistics of all", client.get_inference_statistics, ()),
        ("version metadata", client.get_model_metadata, (MODEL, version)),
        ("version config", client.get_model_config, (MODEL, version)),
        ("version statistics", client.get_inference_statistics, (MODEL, version)),
    ]
    report("grpc server live", client.is_server_live)
    report("grpc server ready", client.is_server_ready)
    report("grpc model ready", lambda: client.is_model_ready(MODEL))
    report("grpc version ready", lambda: client.is_model_ready(MODEL, version))
    for name, call, arguments in reads:
        report(f"grpc {name}", lambda c=call, a=arguments: c(*a, as_json=True))
        report(f"grpc {name} as message", lambda c=call, a=arguments: type(c(*a)).__name__)
    report("grpc infer", logits)
    report("grpc infer outputs", lambda: logits(outputs=[triton.InferRequestedOutput("logits")]))
    report("grpc infer version", lambda: logits(model_version=version))
    report(
        "grpc infer request id", lambda: client.infer(MODEL, [tensor()], request_id="a 7").get_response().id
    )
    report(
        "grpc infer priority and timeout", lambda: logits(priority=2, timeout=5_000_000, client_timeout=20)
    )
    for algorithm in ("gzip", "deflate"):
        report(f"grpc infer {algorithm}", lambda a=algorithm: logits(compression_algorithm=a))
    answers: queue.Queue[Any] = queue.Queue()

    def put(result: Any, error: Any) -> None:
        answers.put(error or result.as_numpy("logits"))

    def taken() -> Any:
        found = answers.get(timeout=30)
        if isinstance(found, Exception):
            raise found
        return found

    def by_callback() -> Any:
        client.async_infer(MODEL, [tensor()], put)
        return taken()

    report("grpc infer async", by_callback)
    client.start_stream(put)
    for number in range(3):
        client.async_stream_infer(
            MODEL, [tensor()], request_id=str(number), enable_empty_final_response=number == 1
        )
        report(f"grpc infer stream {number}", taken)
    client.async_stream_infer("nobody", [tensor()])
    report("grpc unknown model in a stream", taken)
    client.stop_stream()
    report("grpc unknown model", lambda: client.infer("nobody", [tensor()]))
    report("grpc unknown version", lambda: client.infer(MODEL, [tensor()], model_version="77"))
    report("grpc wrong shape", lambda: client.infer(MODEL, [tensor(ROWS[:, :4])]))
    report("grpc wrong name", lambda: client.infer(MODEL, [tensor(name="y")]))
    report("grpc trace settings", client.get_trace_settings)

    async def aio() -> None:
        import tritonclient.grpc.aio as triton_aio

        async with triton_aio.InferenceServerClient(GRPC) as client:
            await report_async("grpc aio server live", client.is_server_live)
            await report_async("grpc aio server ready", client.is_server_ready)
            await report_async("grpc aio server metadata", lambda: client.get_server_metadata(as_json=True))
            await report_async("grpc aio index", lambda: client.get_model_repository_index(as_json=True))
            await report_async("grpc aio model ready", lambda: client.is_model_ready(MODEL))
            await report_async(
                "grpc aio model metadata", lambda: client.get_model_metadata(MODEL, as_json=True)
            )
            await report_async("grpc aio config", lambda: client.get_model_config(MODEL, as_json=True))
            await report_async(
                "grpc aio statistics", lambda: client.get_inference_statistics(MODEL, as_json=True)
            )

            async def infer(**options: Any) -> Any:
                return (await client.infer(MODEL, [tensor()], **options)).as_numpy("logits")

            await report_async("grpc aio infer", infer)
            await report_async(
                "grpc aio infer priority and timeout",
                lambda: infer(priority=1, timeout=5_000_000, client_timeout=20),
            )

            async def requests() -> Any:
                for number in range(2):
                    yield {"model_name": MODEL, "inputs": [tensor()], "request_id": str(number)}

            async def stream() -> Any:
                found = [each async for each in client.stream_infer(requests())]
                assert all(error is None for _, error in found) and len(found) == 2
                return found[1][0].as_numpy("logits")

            await report_async("grpc aio infer stream", stream)

    asyncio.run(aio())


def triton_texts() -> None:
    import tritonclient.grpc as by_grpc
    import tritonclient.http as by_http

    texts = np.array([b"to be", b"or not to be"], object)
    http = by_http.InferenceServerClient(URL.removeprefix("http://"))
    grpc = by_grpc.InferenceServerClient(GRPC)

    def infer(triton: Any, client: Any, **binary: bool) -> Any:
        made = triton.InferInput("text", texts.shape, "BYTES")
        made.set_data_from_numpy(texts, **{f"{key}_data": value for key, value in binary.items()})
        return client.infer(MODEL, [made])

    report("texts binary", lambda: infer(by_http, http, binary=True).as_numpy("logits").shape)
    report("texts JSON", lambda: infer(by_http, http, binary=False).as_numpy("logits").shape)
    report("texts grpc", lambda: infer(by_grpc, grpc).as_numpy("logits").shape)
    for triton, client, name in ((by_http, http, "texts"), (by_grpc, grpc, "texts grpc")):
        report(f"{name} labels", lambda t=triton, c=client: infer(t, c).as_numpy("label").tolist())


def triton_datatypes() -> None:
    import tritonclient.grpc as by_grpc
    import tritonclient.http as by_http
    from tritonclient.utils import triton_to_np_dtype

    http = by_http.InferenceServerClient(URL.removeprefix("http://"))
    grpc = by_grpc.InferenceServerClient(GRPC)

    def echo(triton: Any, client: Any, datatype: str, **binary: bool) -> bool:
        dtype = np.dtype(triton_to_np_dtype(datatype))
        sent = np.array([[0, 1, 100], [3, 2, 1]]).astype(dtype)
        if datatype == "BYTES":
            sent = np.array([[b"", "Zürich".encode(), b"a,b"], [b"1", b"2", b"3"]], object)
        made = triton.InferInput("x", sent.shape, datatype)
        made.set_data_from_numpy(sent, **{f"{key}_data": value for key, value in binary.items()})
        outputs = [
            triton.InferRequestedOutput("y", **{f"{key}_data": value for key, value in binary.items()})
        ]
        found = client.infer(MODEL + datatype, [made], outputs=outputs).as_numpy("y")
        if datatype == "BYTES":  # of JSON they are texts
            found = np.vectorize(lambda each: each.encode() if isinstance(each, str) else each, [object])(
                found
            )
        return found.shape == sent.shape and bool((found == sent).all()) and found.dtype == sent.dtype

    for datatype in [
        "BOOL",
        "UINT8",
        "UINT16",
        "UINT32",
        "UINT64",
        "INT8",
        "INT16",
        "INT32",
        "INT64",
        "FP16",
        "FP32",
        "FP64",
        "BYTES",
    ]:
        report(f"{datatype} binary", lambda d=datatype: echo(by_http, http, d, binary=True))
        if datatype != "FP16":  # which the client sends in binary only
            report(f"{datatype} JSON", lambda d=datatype: echo(by_http, http, d, binary=False))
        report(f"{datatype} grpc", lambda d=datatype: echo(by_grpc, grpc, d))


async def kserve_all() -> None:
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
    from kserve.protocol.grpc import grpc_predict_v2_pb2
    from kserve.protocol.infer_type import RequestedOutput

    def asked(binary: bool, **fields: Any) -> Any:
        made = InferInput("x", list(ROWS.shape), "FP32")
        made.set_data_from_numpy(ROWS, binary_data=binary)
        return InferRequest(model_name=MODEL, infer_inputs=[made], **fields)

    report("messages", lambda: fields_of(grpc_predict_v2_pb2.DESCRIPTOR))
    rest = InferenceRESTClient(RESTConfig(protocol="v2", timeout=30))
    await report_async("kserve server live", lambda: rest.is_server_live(URL))
    await report_async("kserve server ready", lambda: rest.is_server_ready(URL))
    await report_async("kserve model ready", lambda: rest.is_model_ready(URL, MODEL))

    async def by_rest(binary: bool, **fields: Any) -> Any:
        return (await rest.infer(URL, asked(binary, **fields), model_name=MODEL)).outputs[0].as_numpy()

    binary_output = [RequestedOutput("logits", {"binary_data": True})]
    await report_async("kserve infer JSON", lambda: by_rest(False))
    await report_async("kserve infer binary", lambda: by_rest(True))
    await report_async("kserve infer binary to binary", lambda: by_rest(True, request_outputs=binary_output))
    await report_async(
        "kserve infer all binary", lambda: by_rest(True, parameters={"binary_data_output": True})
    )
    await rest.close()
    async with InferenceGRPCClient(GRPC) as client:
        await report_async("kserve grpc server live", client.is_server_live)
        await report_async("kserve grpc server ready", client.is_server_ready)
        await report_async("kserve grpc model ready", lambda: client.is_model_ready(MODEL))

        async def by_grpc(binary: bool, **fields: Any) -> Any:
            return (await client.infer(asked(binary, **fields))).outputs[0].as_numpy()

        await report_async("kserve grpc infer typed", lambda: by_grpc(False))
        await report_async("kserve grpc infer raw", lambda: by_grpc(True))
        await report_async("kserve grpc infer outputs", lambda: by_grpc(True, request_outputs=binary_output))


def openai_all() -> None:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0)
    create = client.completions.create
    common: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 4, "temperature": 0}
    report("openai models", lambda: [each.id for each in client.models.list()])
    report("openai model", lambda: client.models.retrieve(MODEL).id)
    report("openai completion", lambda: create(**common).to_dict())
    report(
        "openai prompts",
        lambda: [each.text for each in create(**common | {"prompt": ["a", "k"]}, n=2).choices],
    )
    report("openai ids", lambda: create(**common | {"prompt": [1, 2]}).choices[0].text)
    report(
        "openai sampled",
        lambda: create(**common | {"temperature": 0.5}, top_p=0.9, seed=3, stop=["d"]).choices[0].to_dict(),
    )
    report("openai logprobs", lambda: create(**common, logprobs=2).choices[0].to_dict())

    def stream() -> Any:
        events = list(create(**common, stream=True, stream_options={"include_usage": True}))
        text = "".join(each.text for event in events for each in event.choices)
        assert events[-1].usage is not None
        return {"text": text, "events": len(events), "usage": events[-1].usage.to_dict()}

    report("openai stream", stream)
    report("openai wrong field", lambda: create(**common, logit_bias={"3": 1}))
    report("openai unknown model", lambda: create(**common | {"model": "nobody"}))
    report("openai unknown model in a stream", lambda: create(**common | {"model": "nobody"}, stream=True))

    async def aio() -> None:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0) as client:
            await report_async("openai aio models", lambda: _names(client))

            async def stream() -> str:
                events = await client.completions.create(**common, stream=True)
                return "".join([each.choices[0].text async for each in events])

            await report_async("openai aio stream", stream)

    asyncio.run(aio())


async def _names(client: Any) -> list[str]:
    return [each.id async for each in client.models.list()]


def triton_all() -> None:
    triton_http()
    triton_grpc()


if __name__ == "__main__":
    {
        "triton": triton_all,
        "kserve": lambda: asyncio.run(kserve_all()),
        "openai": openai_all,
        "texts": triton_texts,
        "datatypes": triton_datatypes,
    }[sys.argv[1]]()
