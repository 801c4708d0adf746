"""Training with rounding in the forward pass gives int8 that works, in the file and in the float params that come back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from models.compress import report
from models.compress.quantization import qat
from models.compress.step import StepRefused
from models.compress.tuning import Tuning, tune
from models.pretrain.data.batches import Arrays
from models.zoo.spec import ModelSpec
from tests.support.compressing import cnn, context, digits, trained

pytestmark = pytest.mark.slow

QUICK = qat.QATOptions(epochs=1, batch_size=32)


class Normed(nn.Module):
    """One convolution with BatchNorm, which training has to fold while it is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.norm(self.conv(x.reshape(-1, 1, 8, 8))).relu().flatten(1))
        return logits


SPEC = ModelSpec("normed", Normed, (8, 8), 10)


def test_int8_comes_out_and_the_params_that_it_was_made_of() -> None:
    before = {name: value.clone() for name, value in cnn().module.state_dict().items()}

    made = qat.train(cnn(), digits(), QUICK, context(cnn()))

    assert made.precision == "static-int8"
    assert made.tflite is not None
    runner = report.Runner(made.tflite)
    assert runner.input["dtype"] == runner.output["dtype"] == np.int8
    assert made.facts["weights"] == {"int8": 1.0}
    assert set(made.facts["operators"]) <= {
        "RESHAPE",
        "CONV_2D",
        "DEPTHWISE_CONV_2D",
        "PAD",
        "TRANSPOSE",
        "FULLY_CONNECTED",
    }
    assert made.facts["accuracy"] >= made.facts["float32_accuracy"] - 0.02
    agreement = report.logits(made.module, digits().x_test).argmax(1) == report.logits(
        made.tflite, digits().x_test
    ).argmax(1)
    assert agreement.mean() > 0.97
    assert not torch.equal(made.module.get_parameter("conv2.weight"), before["conv2.weight"])
    assert all(torch.equal(value, before[name]) for name, value in cnn().module.state_dict().items())


@pytest.mark.extended
def test_with_distillation_alone_the_labels_do_not_matter() -> None:
    wrong = replace(digits(), y_train=(digits().y_train + 1) % 10)
    taught = replace(QUICK, lr=3e-3, distil=True, alpha=1.0)
    assert qat.train(cnn(), wrong, taught, context(cnn())).facts["accuracy"] > 0.9


@pytest.mark.extended
def test_batchnorm_is_trained_with_rounding_and_the_patch_of_litert_torch_is_taken_back() -> None:
    """What becomes of it in the file takes torchao half a minute to work out: the bench looks at that."""
    from litert_torch.quantize import pt2e_quantizer_utils
    from torchao.quantization.pt2e import utils

    original = trained(SPEC, Tuning(epochs=6, lr=4e-3, batch_size=32))
    graph, _ = qat.prepare(original.module, SPEC)
    tune(
        graph,
        Arrays(digits().x_train, digits().y_train),
        QUICK,
        np.random.default_rng(0),
        lambda m, x, y: SPEC.loss(m(x), y),
    )
    rounded = report.quality(graph, digits().x_test, digits().y_test)
    assert rounded >= report.quality(original.module, digits().x_test, digits().y_test) - 0.02
    assert any("fake_quant_enabled" in name for name in graph.state_dict())
    assert pt2e_quantizer_utils._get_aten_graph_module_for_pattern is utils._get_aten_graph_module_for_pattern


def test_a_module_without_one_graph_is_refused() -> None:
    spec = replace(SPEC, name="branching", module=Branching)
    with pytest.raises(StepRefused, match="branching cannot be prepared for quantization-aware training"):
        qat.prepare(spec.build(0), spec)


class Branching(Normed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if float(x.sum()) > 0 else -x)
