"""Quantization-aware training: trains the module with int8 rounding in its forward pass, then quantizes it.

Jacob 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only inference", section 3: weights and
activations are rounded in the forward pass and gradients pass straight through; BatchNorm is folded into the rounded
convolutions (section 3.2). Ranges of activations are moving averages, updated during the training.

1. torch exports the module as a graph of any batch size, and torchao inserts fake quantizers where litert-torch's quantizer requires them.
2. `models.compress.tuning` trains that graph like any module; with `distil` also on the original's probabilities
   (Mishra, Marr 2018, "Apprentice").
3. torchao replaces the fake quantizers by real ones, and litert-torch writes static int8 with an int8 interface.

With BatchNorm, step 3 takes half a minute longer, whatever the size, because torchao tries patterns. A `fold` step before avoids that.

The float module also gets the trained params.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.compress import distil
from models.compress.quantization import quantize, tensor_names
from models.compress.quantization.recipes import SIGNATURE
from models.compress.step import Context, Data, StepModel, StepRefused
from models.compress.tuning import Tuning, labelled_rows, own_loss, tune
from models.options import bounded
from models.zoo.spec import ModelSpec


@dataclass(frozen=True)
class QATOptions(Tuning):
    """Options of the training.

    Attributes:
        distil: also learn the probabilities of the pipeline's source model.
        temperature, alpha: as in `distil`.
        max_accuracy_drop: how far the accuracy on test rows may fall below float32 before this training, as a fraction.
    """

    epochs: int = bounded(3, 1, 100_000)
    lr: float = bounded(3e-4, 0.0, 1e3)
    weight_decay: float = bounded(0.0, 0.0, 1e3)
    distil: bool = False
    temperature: float = bounded(3.0, 0.01, 1e3)
    alpha: float = bounded(0.7, 0.0, 1.0)
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


def train(model: StepModel, data: Data, options: QATOptions, context: Context) -> StepModel:
    """`model` as static int8, after quantization-aware training.

    Raises:
        StepRefused: no row has a label, the module's graph cannot be prepared, or the result loses too much accuracy.
    """
    spec, rows = model.spec, labelled_rows(data)
    context.on_progress({"step": "prepare"})
    float32, _ = quantize.convert_checked(model, data.x_test)
    graph, quantizer = prepare(model.module, spec)
    losses = tune(
        graph,
        rows,
        options,
        context.rng(),
        distil.objective([context.original.module], options.temperature, options.alpha, spec.loss)
        if options.distil
        else own_loss(spec),
        on_epoch=context.report_epochs(epochs=options.epochs),
    )
    module = _with_params_of(graph, model.module)
    context.on_progress({"step": "convert"})
    tflite = convert(graph, spec, quantizer)
    quantize.require_weights(tflite, "static-int8")
    facts = quantize.evaluate(float32, tflite, data, "static-int8", options.max_accuracy_drop)
    return StepModel(
        spec, module, tflite, "static-int8", {**facts, "first_loss": losses[0], "last_loss": losses[-1]}
    )


def prepare(module: nn.Module, spec: ModelSpec) -> tuple[torch.fx.GraphModule, Any]:
    """A copy of `module` as a graph with fake int8 quantizers, [B, …] -> logits, and the quantizer that placed them.

    Raises:
        StepRefused: torch cannot export the module, or torchao cannot prepare it.
    """
    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config
    from torchao.quantization.pt2e import allow_exported_model_train_eval
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

    quantizer = PT2EQuantizer().set_global(
        get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    )
    x, _ = spec.example_batch(4)
    batch = torch.export.Dim("batch", min=1)
    try:
        exported = torch.export.export(
            copy.deepcopy(module).train(), (x,), dynamic_shapes=({0: batch},)
        ).module()
        with _patterns_as_modules():
            graph = prepare_qat_pt2e(exported, quantizer)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        raise StepRefused(
            f"{spec.name} cannot be prepared for quantization-aware training ({str(error).splitlines()[0][:200]}); use "
            "`quantize` or `mixed`"
        ) from error
    allow_exported_model_train_eval(graph)  # otherwise exported modules refuse train() and eval()
    return graph, quantizer


def convert(graph: torch.fx.GraphModule, spec: ModelSpec, quantizer: Any) -> bytes:
    """The trained graph as `.tflite`, signature `infer(x[1, …]) -> logits[1, …]`; `graph` is consumed."""
    import litert_torch
    from litert_torch.quantize.quant_config import QuantConfig
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    x, _ = spec.example_batch(1)
    # weights stay float, followed by a quantizer: litert-torch folds the two, not torchao
    integers = quantize.Inference(convert_pt2e(graph, fold_quantize=False))
    integers.training = False
    edge = litert_torch.signature(SIGNATURE, integers, (), {"x": x}).convert(
        quant_config=QuantConfig(pt2e_quantizer=quantizer)
    )
    return tensor_names.shorten(edge.model_content())


def _with_params_of(graph: nn.Module, module: nn.Module) -> nn.Module:
    state = graph.state_dict()
    trained = copy.deepcopy(module)
    trained.load_state_dict({name: state[name] for name in trained.state_dict()})
    return trained.eval()


@contextmanager
def _patterns_as_modules() -> Iterator[None]:
    """litert-torch 0.10 passes its patterns of convolution and BatchNorm to torchao as functions; torchao 0.18 exports modules only.

    This wraps them in the one function that they pass through. Delete it when litert-torch passes modules itself
    (https://github.com/google-ai-edge/litert-torch, `pt2e_quantizer_utils._get_aten_graph_module_for_pattern`).
    """
    from litert_torch.quantize import pt2e_quantizer_utils

    original = pt2e_quantizer_utils._get_aten_graph_module_for_pattern

    def wrapped(pattern: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return original(
            pattern if isinstance(pattern, nn.Module) else _Pattern(pattern), *arguments, **options
        )

    pt2e_quantizer_utils._get_aten_graph_module_for_pattern = wrapped
    try:
        yield
    finally:
        pt2e_quantizer_utils._get_aten_graph_module_for_pattern = original


class _Pattern(nn.Module):
    def __init__(self, pattern: Callable[..., Any]) -> None:
        super().__init__()
        self.pattern = pattern

    def forward(self, *arguments: Any) -> Any:
        return self.pattern(*arguments)
