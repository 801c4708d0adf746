"""What a server and its models say of themselves, for REST and gRPC alike.

Metadata are the Open Inference Protocol's; index, configuration and statistics are those of NVIDIA Triton's extensions of
the protocol, in their JSON, which is also the JSON of Triton's messages. All are read-only: models come and go with the
deployments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version as version_of
from typing import Any

from coordinator.errors import Refusal
from coordinator.serving.inference import Counters, InferenceService, ModelDescription, TensorSpec

EXTENSIONS = ("binary_tensor_data", "model_configuration", "schedule_policy", "statistics")
"""Extensions of the protocol that all models answer; `schedule_policy`: priorities and timeouts of requests."""

_MILLISECONDS = 1e3
_NANOSECONDS = 1e9


def server_metadata() -> dict[str, Any]:
    return {"name": "fedloop", "version": version_of("fedloop"), "extensions": list(EXTENSIONS)}


def model_metadata(model: ModelDescription) -> dict[str, Any]:
    def tensor(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}

    return {
        "name": model.name,
        "versions": list(model.versions),
        "platform": model.platform,
        "inputs": [tensor(each) for each in model.inputs],
        "outputs": [tensor(each) for each in model.outputs],
    }


def index(service: InferenceService, *, only_ready: bool = False) -> list[dict[str, Any]]:
    """One entry for each version that answers; one without a version for a deployment that has none yet."""
    found: list[dict[str, Any]] = []
    for name in service.names():
        try:
            models = list(_versions(service, name))
        except Refusal as refusal:  # being opened, or it could not be
            found.append({"name": name, "version": "", "state": "UNAVAILABLE", "reason": str(refusal)})
            continue
        found += [
            {
                "name": name,
                "version": model.version,
                "state": "READY" if model.is_ready else "UNAVAILABLE",
                "reason": "" if model.is_ready else "it is being opened",
            }
            for model in models
        ]
    return [each for each in found if each["state"] == "READY" or not only_ready]


def config(model: ModelDescription) -> dict[str, Any]:
    """Triton's ModelConfig. The axis of rows is not in `dims` but is what `max_batch_size` limits."""
    return {
        "name": model.name,
        "platform": model.platform,
        "backend": model.platform,
        "version_policy": {"specific": {"versions": _numbers(model.versions)}},
        "max_batch_size": model.max_batch_size,
        "input": [_configured(each) for each in model.inputs],
        "output": [_configured(each) for each in model.outputs],
        "dynamic_batching": {"preferred_batch_size": [], "max_queue_delay_microseconds": 0},
        "model_transaction_policy": {"decoupled": False},
    }


def statistics(service: InferenceService, model: str = "", version: str = "") -> dict[str, Any]:
    """Figures since each version was opened. `model` empty: of all; `version` empty: of all that answer.

    Raises: Refusal: as `InferenceService.describe`.
    """
    if model and version:
        described = [service.describe(model, version)]
    elif model:
        described = list(_versions(service, model))
    else:
        ready = dict.fromkeys(entry["name"] for entry in index(service, only_ready=True))
        described = [each for name in ready for each in _versions(service, name)]
    return {
        "model_stats": [_statistics(each, service.counters(each.name, each.version)) for each in described]
    }


def _versions(service: InferenceService, model: str) -> Iterator[ModelDescription]:
    first = service.describe(model)
    for version in first.versions or (first.version,):
        yield first if version == first.version else service.describe(model, version)


def _numbers(versions: Sequence[str]) -> list[int]:
    """Versions of the registry; others are hashes of folders, which Triton's configuration has no room for."""
    return [int(each) for each in versions if each.isdecimal() and int(each) < 2**63]


def _configured(spec: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    configured: dict[str, Any] = {
        "name": spec.name,
        "data_type": f"TYPE_{datatype}",
        "dims": list(spec.shape[1:]),
    }
    if not configured["dims"]:  # Triton's `dims` are never empty.
        configured |= {"dims": [1], "reshape": {"shape": []}}
    return configured


def _statistics(model: ModelDescription, counters: Counters) -> dict[str, Any]:
    answered = counters.success
    batches = sorted(counters.batches.items())
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": int(counters.last_answered * _MILLISECONDS),
        "inference_count": counters.rows,
        "execution_count": counters.executions,
        "inference_stats": {
            "success": _duration(answered, counters.success_seconds),
            "fail": _duration(counters.failed, 0.0),
            "queue": _duration(answered, counters.queue_seconds),
            "compute_input": _duration(answered, 0.0),
            "compute_infer": _duration(answered, counters.compute_seconds),
            "compute_output": _duration(answered, 0.0),
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _duration(count, 0.0),
                "compute_infer": _duration(count, seconds),
                "compute_output": _duration(count, 0.0),
            }
            for size, (count, seconds) in batches
        ],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * _NANOSECONDS)}
