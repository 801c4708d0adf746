"""Quantization-aware training: the module learns with the rounding of int8 in its forward pass, then becomes int8.

Jacob 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only inference", section 3: weights and
activations are rounded in the forward pass and gradients pass straight through; BatchNorm is folded into the convolutions that
are being rounded (section 3.2). Ranges of activations are moving averages, learnt along.

1. torch exports the module as a graph of any batch size, and torchao puts fake quantizers where litert-torch's quantizer says.
2. `models.compress.tuning` trains that graph, as it trains any module; with `distil` on the original's probabilities as well
   (Mishra, Marr 2018, "Apprentice").
3. torchao replaces the fake quantizers by real ones, and litert-torch writes static int8 with an int8 interface.

Where there is BatchNorm, step 3 takes half a minute more, whatever the size: torchao tries patterns. `fold` before it avoids that.

The params that were learnt come back in the float module as well, whose rounding is what they were trained for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from models.compress import distil, naming, quantize
from models.compress.recipes import SIGNATURE
from models.compress.step import Context, Data, Model, StepRefused
from models.compress.tuning import Tuning, labelled, tune
from models.options import bounded
from models.zoo.spec import ModelSpec


@dataclass(frozen=True)
class Options(Tuning):
    """How to train.

    Attributes:
        distil: learn the probabilities of the model the pipeline began with, too.
        temperature, alpha: as in `distil`.
        max_accuracy_drop: how far below float32 before this training the accuracy on test rows may fall, as a fraction.
    """

    epochs: int = bounded(3, 1, 100_000)
    lr: float = bounded(3e-4, 0.0, 1e3)
    weight_decay: float = bounded(0.0, 0.0, 1e3)
    distil: bool = False
    temperature: float = bounded(3.0, 0.01, 1e3)
    alpha: float = bounded(0.7, 0.0, 1.0)
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


def train(model: Model, data: Data, options: Options, context: Context) -> Model:
    """`model` as static int8, trained to be that.

    Raises:
        StepRefused: no row has a label, the module's graph cannot be quantized for training, or the result is too inaccurate.
    """
    spec, rows = model.spec, labelled(data)
    context.tell({"step": "prepare"})
    float32, _ = quantize.faithful(model, data.x_test)
    graph, quantizer = prepared(model.module, spec)
    losses = tune(
        graph,
        rows.x,
        rows.y,
        options,
        context.rng(),
        distil.objective([context.original.module], options.temperature, options.alpha, spec.loss)
        if options.distil
        else lambda module, x, y: spec.loss(module(x), y),
        on_epoch=lambda epoch, loss: context.tell({"epoch": epoch, "epochs": options.epochs, "loss": loss}),
    )
    module = _with_params_of(graph, model.module)
    context.tell({"step": "convert"})
    tflite = converted(graph, spec, quantizer)
    quantize.require_weights(tflite, "static-int8")
    facts = quantize.gated(float32, tflite, data, "static-int8", options.max_accuracy_drop)
    return Model(
        spec, module, tflite, "static-int8", {**facts, "first_loss": losses[0], "last_loss": losses[-1]}
    )


def prepared(module: nn.Module, spec: ModelSpec) -> tuple[torch.fx.GraphModule, Any]:
    """A copy of `module` as a graph that rounds as int8 does, [B, …] -> logits, and the quantizer that said where.

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
    allow_exported_model_train_eval(graph)  # exported modules refuse train() and eval() otherwise
    return graph, quantizer


def converted(graph: torch.fx.GraphModule, spec: ModelSpec, quantizer: Any) -> bytes:
    """The trained graph as `.tflite`, signature `infer(x[1, …]) -> logits[1, …]`; `graph` is used up."""
    import litert_torch
    from litert_torch.quantize.quant_config import QuantConfig
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    x, _ = spec.example_batch(1)
    # weights stay float with a quantizer behind them: litert-torch folds the two, not torchao
    integers = quantize.Inference(convert_pt2e(graph, fold_quantize=False))
    integers.training = False
    edge = litert_torch.signature(SIGNATURE, integers, (), {"x": x}).convert(
        quant_config=QuantConfig(pt2e_quantizer=quantizer)
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        edge.export(str(path))
        return naming.shortened(path.read_bytes())


def _with_params_of(graph: nn.Module, module: nn.Module) -> nn.Module:
    """A copy of `module` with what the graph learnt; the graph keeps the module's names and adds its quantizers'."""
    learnt = graph.state_dict()
    trained = copy.deepcopy(module)
    trained.load_state_dict({name: learnt[name] for name in trained.state_dict()})
    return trained.eval()


@contextmanager
def _patterns_as_modules() -> Iterator[None]:
    """litert-torch 0.10 gives torchao its patterns of convolution and BatchNorm as functions; torchao 0.18 exports modules only.

    So they are wrapped on the way, in the one name through which they go. Delete this when litert-torch passes modules itself
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
