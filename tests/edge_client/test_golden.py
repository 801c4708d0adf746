"""The golden inputs are the same everywhere, and wrong outputs are noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_client.data.examples import PADDING
from edge_client.train.golden import GoldenOutputs, SelfTestFailed, compare, golden_inputs, run
from edge_client.train.torch_trainer import TorchRuntime
from edge_client.wire.manifest import Fill, Golden, InputSpec
from models.zoo import get
from tests.support.manifests import linear


def word(stream: int, element: int) -> int:
    """The formula as the documentation has it, in plain integers."""

    def mix(n: int) -> int:
        n ^= n >> 16
        n = n * 0x7FEB352D % 2**32
        n ^= n >> 15
        n = n * 0x846CA68B % 2**32
        return n ^ n >> 16

    return mix((mix(stream + 1) + element) % 2**32)


def test_the_golden_inputs_follow_the_documented_formula() -> None:
    manifest = linear()

    inputs = golden_inputs(manifest)

    for stream, array, fill in (
        (0, inputs.x, Fill(0.5, 0.5)),
        (2, inputs.params["fc.weight"], Fill(0.0, 0.5)),
        (4, inputs.params["scale"], Fill(1.0, 0.1)),
    ):
        expected = [fill.offset + fill.scale * (word(stream, i) / 2**31 - 1) for i in range(array.size)]
        np.testing.assert_array_equal(array.reshape(-1), np.asarray(expected, np.float32))
    assert inputs.y.tolist() == [word(1, 0) % 2, word(1, 1) % 2, word(1, 2) % 2, PADDING]
    assert inputs.params["fc.weight"].shape == (2, 3)


def test_ids_stay_within_the_vocabulary() -> None:
    manifest = replace(linear(), input=InputSpec((500,), "int32", 7), task="next_token", classes=5)

    inputs = golden_inputs(manifest)

    assert inputs.x.dtype == inputs.y.dtype == np.int32
    assert inputs.y.shape == inputs.x.shape == (4, 500)
    assert set(inputs.x.reshape(-1)) == set(range(7))
    assert set(inputs.y.reshape(-1)) == {*range(5), PADDING}


def test_the_words_never_change() -> None:
    """Manifests in the field depend on them."""
    assert [word(0, 0), word(1, 0), word(2, 12345)] == [1492470133, 911671261, 1765087259]


def test_a_runtimes_own_answers_pass() -> None:
    got = answers()

    compare(got, expected(got))


@pytest.mark.parametrize("wrong", ["nan", "off"])
@pytest.mark.parametrize("where", ["logits", "loss", "fc.weight"])
def test_a_wrong_answer_is_refused_naming_where(where: str, wrong: str) -> None:
    right = answers()
    add = float("nan") if wrong == "nan" else 0.01
    match where:
        case "logits":
            got = replace(
                right,
                logits=replace(right.logits, first=(*right.logits.first[:-1], right.logits.first[-1] + add)),
            )
        case "loss":
            got = replace(right, loss=right.loss + add)
        case _:
            got = replace(
                right,
                changes=right.changes
                | {where: replace(right.changes[where], norm=right.changes[where].norm + add)},
            )

    with pytest.raises(SelfTestFailed, match=f"{where} with") as failed:
        compare(got, expected(right))

    assert failed.value.signature == ("infer" if where == "logits" else "train")
    assert failed.value.got != failed.value.expected


def answers() -> GoldenOutputs:
    """PyTorch's, for a model with the tensors of the manifest that are trainable."""
    spec = get("logreg", input_shape=(3,), classes=2)
    manifest = linear()
    return run(TorchRuntime(spec.build(seed=0), spec.loss), replace(manifest, tensors=manifest.tensors[:2]))


def expected(got: GoldenOutputs) -> Golden:
    return replace(linear().golden, logits=got.logits, loss=got.loss, changes=got.changes)
