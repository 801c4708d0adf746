"""The export process: a request on standard input (or in a file), an answer on standard output, as JSON.

    python -P -m models.conversion.convert [REQUEST.json]

1. build the model, trace its training step and its logits (`models.conversion.trace`; a Keras model: `models.conversion.keras`)
2. look it up in the cache; a hit ends here, before anything slow is imported
3. convert both graphs into one `.tflite`
4. refuse operations that a runtime may lack (`models.conversion.operators`)
5. compute golden answers with the model's own framework and with the new file: a file with other answers is refused
6. store the file and its manifest

The answer is `{"tflite", "manifest", "cached", "seconds"}` or `{"error"}`. The output of the model's code and the
converter goes to standard error.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.fx import GraphModule, Node

from edge_client.processes.process import die_with_parent, own_stdout
from edge_client.train import golden
from edge_client.train.golden import SelfTestFailed
from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.train.torch_trainer import TorchRuntime
from edge_client.train.trainer import Runtime
from edge_client.wire.manifest import (
    ArraySummary,
    FileSpec,
    Fill,
    Golden,
    InputSpec,
    Lineage,
    Manifest,
    SignatureSpec,
    Tolerance,
)
from edge_client.wire.strict import InvalidDocument
from models import adaptation, zoo
from models.conversion import cache, int8_constants, request_cache
from models.conversion.operators import ForeignOperator, minimum_runtime, operators
from models.conversion.request import ExportRequest
from models.conversion.request_cache import ARTIFACTS
from models.conversion.trace import NotConvertible, NotTraceable, Traced, not_convertible, trace
from models.user_code import UserCodeError
from models.zoo.spec import ModelSpec, VocabularyUnknown, squared_error

if TYPE_CHECKING:
    from models.conversion.keras import KerasProgram

TOLERANCE = Tolerance(absolute=1e-5, relative=1e-4)
"""Tolerance of golden answers in float32, for sums of a few thousand products in another order."""

GOLDEN_LR = 1.0
"""With this learning rate the change of a tensor is its gradient."""

_USER_ERRORS = (
    InvalidDocument,
    zoo.KerasUnfit,
    VocabularyUnknown,
    zoo.ModelNotFound,
    UserCodeError,
    NotTraceable,
    NotConvertible,
    ForeignOperator,
)


class TorchProgram:
    """Both signatures of a torch model before the conversion; `models.conversion.keras.KerasProgram` is the same for Keras.

    Attributes:
        framework, makers: what made it, for messages and for the key of the file.
        tensors, values: all float tensors, and what they hold untrained.
    """

    framework = "PyTorch"
    makers: tuple[str, ...] = cache.MAKERS

    def __init__(self, spec: ModelSpec, batch_size: int) -> None:
        self._spec, self._traced = spec, trace(spec, batch_size)
        self.tensors = self._traced.tensors
        values = zip(self.tensors, self._traced.values, strict=True)
        self.values: Mapping[str, npt.NDArray[np.float32]] = {
            tensor.name: value.numpy() for tensor, value in values
        }

    @property
    def content(self) -> Iterable[bytes]:
        """Everything that determines the graphs."""
        return cache.content(self._traced)

    def tflite(self) -> bytes:
        """The file. Raises `NotConvertible`."""
        file = _convert_graphs(self._traced)
        # A frozen backbone is stored as the integers that it was made from.
        return int8_constants.store_as_int8(file) if self._spec.name == adaptation.MODEL else file

    def reference(self) -> Runtime:
        """The original model with its framework's own gradients, independent of the traced graphs."""
        return TorchRuntime(self._spec.build(seed=0), self._spec.loss)


def main() -> int:
    die_with_parent()
    answers = own_stdout()
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else sys.stdin.read()
    document = json.loads(text)
    torch.set_num_threads(1)
    try:
        answer = convert(ExportRequest.from_json(document["request"]), Path(document["cache_dir"]))
    except _USER_ERRORS as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"the cache cannot be used: {error}"}
    with answers:
        json.dump(answer, answers)
    return 1 if "error" in answer else 0


def convert(request: ExportRequest, cache_dir: Path) -> dict[str, Any]:
    """The answer to one request, as described in the module's docstring.

    Raises:
        ValueError: one of `_USER_ERRORS`, if the model cannot be exported.
    """
    seconds: dict[str, float] = {}
    spec = _spec(request)
    with _timed(seconds, "trace"):
        program = _program(spec, request.batch_size)
    draft = _draft(request, spec, program)
    folder = cache_dir / ARTIFACTS
    key = cache.key(program.content, draft.to_json(), program.makers)
    with cache.locked(folder, key):
        path = folder / f"{key}.json"
        exported = request_cache.read(path)
        if exported is None:
            with _timed(seconds, "convert"):
                tflite = program.tflite()
            with _timed(seconds, "check"):
                manifest = _verify(draft, program, tflite)
            exported = cache.store(path, tflite, manifest)
    return {
        "tflite": str(exported.tflite),
        "manifest": str(exported.manifest),
        "cached": exported.cached,
        "seconds": seconds,
    }


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[step] = round(time.perf_counter() - start, 3)


def _spec(request: ExportRequest) -> ModelSpec | zoo.KerasSpec:
    return zoo.find(
        request.model,
        input_shape=request.input_shape,
        classes=request.classes,
        input_dtype=request.input_dtype,
        task=request.task,
        **request.options,
    )


def _program(spec: ModelSpec | zoo.KerasSpec, batch_size: int) -> TorchProgram | KerasProgram:
    if isinstance(spec, ModelSpec):
        return TorchProgram(spec, batch_size)
    from models.conversion.keras import KerasProgram

    return KerasProgram(spec, batch_size)


def _draft(
    request: ExportRequest, spec: ModelSpec | zoo.KerasSpec, program: TorchProgram | KerasProgram
) -> Manifest:
    if isinstance(spec, ModelSpec) and spec.task == "regression" and spec.loss is not squared_error:
        raise NotConvertible(
            f"model {request.model!r} predicts a quantity with a loss of its own; LiteRT clients train with squared error"
        )
    names = [tensor.signature_name for tensor in program.tensors]
    changed = [tensor.signature_name for tensor in program.tensors if tensor.trainable]
    fills = {name: _fill(value) for name, value in program.values.items()}
    return Manifest(
        model=request.model,
        options=dict(spec.options or request.options),
        task=spec.task,
        classes=spec.classes,
        input=InputSpec(tuple(spec.input_shape), spec.input_dtype, spec.described_vocab),
        batch_size=request.batch_size,
        tensors=program.tensors,
        signatures={
            "train": SignatureSpec(("x", "y", "lr", *names), ("loss", *changed)),
            "infer": SignatureSpec(("x", *names), ("logits",)),
        },
        operators=(),
        minimum_runtime="",
        file=FileSpec("", 0),
        golden=Golden(
            fills=fills,
            x=Fill(0.5, 0.5),
            lr=GOLDEN_LR,
            padded_rows=request.batch_size // 4,
            logits=ArraySummary(0.0, ()),
            loss=0.0,
            changes={},
            tolerance=TOLERANCE,
        ),
        lineage=Lineage(
            pipeline_step="adapt" if request.model == adaptation.MODEL else "export",
            code_version=f"fedloop {version('fedloop')}",
        ),
    )


def _fill(value: npt.NDArray[np.float32]) -> Fill:
    """A fill with the spread of the untrained tensor, never constant, so that swapped elements are detected."""
    spread = float(value.std()) * math.sqrt(3)
    return Fill(offset=round(float(value.mean()), 3), scale=round(max(spread, 0.05), 3))


class _NamedGraph(nn.Module):
    """A traced graph with named inputs and outputs.

    Constants of the graph become buffers here and inputs there, because the converter's own tracing loses constants of a
    nested module.
    """

    def __init__(self, graph: GraphModule, signature: SignatureSpec) -> None:
        super().__init__()
        self._graph = copy.deepcopy(graph)
        self._signature = signature
        self._constants = []
        for name, value in _lift_constants(self._graph):
            self.register_buffer(name, value)
            self._constants.append(name)

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        constants = (getattr(self, name) for name in self._constants)
        outputs = self._graph(*(inputs[name] for name in self._signature.inputs), *constants)
        return dict(zip(self._signature.outputs, outputs, strict=True))


def _lift_constants(graph: GraphModule) -> list[tuple[str, torch.Tensor]]:
    """Turns the graph's constants into its last inputs; returns their values under new names."""
    inputs: dict[str, Node] = {}
    values: list[tuple[str, torch.Tensor]] = []
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        target = str(node.target)
        if target not in inputs:
            values.append((f"held_{len(inputs)}", getattr(graph, target).detach()))
            with graph.graph.inserting_after(last):
                last = inputs[target] = graph.graph.placeholder(values[-1][0])
        node.replace_all_uses_with(inputs[target])
        graph.graph.erase_node(node)
    for target in inputs:
        delattr(graph, target)
    graph.recompile()
    return values


def _convert_graphs(graphs: Traced) -> bytes:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    import litert_torch

    tensors = {t.signature_name: value for t, value in zip(graphs.tensors, graphs.values, strict=True)}
    changed = tuple(tensor.signature_name for tensor in graphs.trainable)
    train = _NamedGraph(graphs.train, SignatureSpec(("x", "y", "lr", *tensors), ("loss", *changed))).eval()
    infer = _NamedGraph(graphs.infer, SignatureSpec(("x", *tensors), ("logits",))).eval()
    try:
        converted = (
            litert_torch.signature(
                "train", train, (), {"x": graphs.x, "y": graphs.y, "lr": torch.tensor(0.1), **tensors}
            )
            .signature("infer", infer, (), {"x": graphs.x, **tensors})
            .convert()
        )
    except Exception as error:
        raise not_convertible(error) from error
    return bytes(converted.model_content())


def _verify(draft: Manifest, program: TorchProgram | KerasProgram, tflite: bytes) -> Manifest:
    """The complete manifest, after the file was found to agree with the model's framework."""
    manifest = replace(
        draft,
        operators=operators(tflite),
        minimum_runtime=minimum_runtime(tflite),
        file=FileSpec(hashlib.sha256(tflite).hexdigest(), len(tflite)),
    )
    manifest = replace(manifest, golden=_golden_answers(manifest, program))
    try:
        LiteRTRuntime(tflite, manifest).self_test()
    except SelfTestFailed as error:
        raise NotConvertible(
            f"the converted model does not compute what {program.framework} does ({error}); "
            f"train this model with {program.framework}, or report its architecture"
        ) from error
    return manifest


def _golden_answers(manifest: Manifest, program: TorchProgram | KerasProgram) -> Golden:
    answers = golden.run(program.reference(), manifest)
    numbers = [answers.loss, answers.logits.norm, *(change.norm for change in answers.changes.values())]
    if not all(map(math.isfinite, numbers)):
        raise NotTraceable("the model's loss, logits or gradients are not finite on ordinary inputs")
    return replace(manifest.golden, logits=answers.logits, loss=answers.loss, changes=answers.changes)


if __name__ == "__main__":
    sys.exit(main())
