"""The parts of an installation: which distributions each needs, and which extra installs them."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

# Part -> the distributions it needs, the extra that installs them.
PARTS: dict[str, tuple[tuple[str, ...], str]] = {
    "LiteRT clients": (("ai-edge-litert",), "edge"),
    "PyTorch clients": (("torch",), "torch"),
    "TensorFlow clients": (("tensorflow-cpu",), "tensorflow"),
    "DP-SGD": (("opacus",), "privacy"),
    "export to LiteRT": (("torch", "litert-torch", "ai-edge-litert"), "datacenter"),
    "quantization": (("ai-edge-quantizer", "litert-torch", "ai-edge-litert"), "datacenter"),
    "ONNX": (("torch", "onnx", "onnxruntime", "onnxscript"), "onnx"),
    "reports": (("matplotlib",), "coordinator"),
    "inference serving": (
        ("grpcio", "httptools", "orjson", "prometheus-client", "protobuf", "uvicorn", "uvloop"),
        "serving",
    ),
    "Flower apps": (("flwr",), "flower"),
    "MLflow": (("mlflow-skinny",), "mlflow"),
    "TensorBoard": (("tensorboard",), "tensorboard"),
}

_PARTS_BY_RUNTIME = {
    "litert": ("LiteRT clients", "export to LiteRT"),
    "torch": ("PyTorch clients",),
    "tensorflow": ("TensorFlow clients",),
}


def missing(part: str) -> list[str]:
    """Distributions that `part` needs and that are not installed."""
    return [name for name in PARTS[part][0] if installed_version(name) is None]


def how_to_install(part: str) -> str:
    """The command that installs what `part` needs."""
    return f"pip install 'fedloop[{PARTS[part][1]}]'"


def problems_with(runtimes: Collection[str], mechanism: str | None = None) -> list[str]:
    """One sentence for each part that a simulation needs and that is not installed.

    `runtimes`: of its clients. `mechanism`: of differential privacy.
    """
    # Evaluation uses PyTorch, whatever the clients run.
    parts = {"PyTorch clients": "evaluating the model"}
    if mechanism == "example":
        parts["DP-SGD"] = 'privacy.mechanism = "example"'
    for runtime in runtimes:
        parts |= dict.fromkeys(_PARTS_BY_RUNTIME[runtime], f"federation.runtimes asks for {runtime}, which")
    return [
        f"{why} needs {', '.join(lacking)}, not installed here; {how_to_install(part)}"
        for part, why in parts.items()
        if (lacking := missing(part))
    ]


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
