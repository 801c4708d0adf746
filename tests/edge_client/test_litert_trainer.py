"""The LiteRT runtime on a real artifact: what it accepts, what it refuses, what it leaves alone."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import flatbuffers
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from edge_client.data.examples import Examples
from edge_client.train.golden import SelfTestFailed, golden_inputs
from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.wire.manifest import FileSpec, InputSpec, Manifest, ManifestError
from strategies.client_rules import Correction
from tests.support.artifacts import BATCH, exported

NAME = "cnn"


@pytest.mark.slow
def test_the_self_test_passes_where_the_runtime_is_right() -> None:
    found, manifest = exported(NAME)

    LiteRTRuntime(found.tflite, manifest).self_test()


def test_the_self_test_refuses_a_file_that_computes_something_else() -> None:
    """Every SUB made an ADD, manifest and file consistent: it runs, and climbs where it should descend."""
    found, manifest = exported(NAME)
    other = with_operation(found.tflite.read_bytes(), schema.BuiltinOperator.SUB, schema.BuiltinOperator.ADD)
    runtime = LiteRTRuntime(other, described_as(manifest, other))

    with pytest.raises(SelfTestFailed, match=r"self-test failed: train gave loss") as failed:
        runtime.self_test()

    assert failed.value.signature == "train"
    assert failed.value.expected == pytest.approx(manifest.golden.loss)


def test_the_self_test_refuses_wrong_logits() -> None:
    found, manifest = exported(NAME)
    golden = manifest.golden
    first = (golden.logits.first[0] + 0.01, *golden.logits.first[1:])
    wrong = replace(manifest, golden=replace(golden, logits=replace(golden.logits, first=first)))

    with pytest.raises(SelfTestFailed, match=r"infer gave logits with element 0 .*, expected"):
        LiteRTRuntime(found.tflite, wrong).self_test()


def test_a_file_with_one_bit_changed_is_refused() -> None:
    found, manifest = exported(NAME)
    content = bytearray(found.tflite.read_bytes())
    content[len(content) // 2] ^= 1

    with pytest.raises(ManifestError, match="artifact has SHA-256"):
        LiteRTRuntime(bytes(content), manifest)


def test_a_file_that_is_no_model_is_refused() -> None:
    _, manifest = exported(NAME)

    with pytest.raises(ManifestError, match="LiteRT cannot load the artifact"):
        LiteRTRuntime(b"not a model" * 9, described_as(manifest, b"not a model" * 9))


def test_a_manifest_of_another_input_shape_is_refused() -> None:
    """The interpreter itself would resize its input and go on."""
    found, manifest = exported(NAME)

    with pytest.raises(
        ManifestError, match=r"input x is float32 \[8, 8, 8\], the manifest says float32 \[8, 8, 9\]"
    ):
        LiteRTRuntime(found.tflite, replace(manifest, input=InputSpec((8, 9), "float32")))


def test_a_batch_too_large_for_the_artifact_is_refused_with_both_sizes() -> None:
    found, manifest = exported(NAME)
    requested = golden_inputs(manifest)
    twice = Examples(np.concatenate([requested.x, requested.x]), np.concatenate([requested.y, requested.y]))

    with pytest.raises(
        ValueError, match=f"a batch of {2 * BATCH} rows does not fit this artifact, made for {BATCH}"
    ):
        LiteRTRuntime(found.tflite, manifest).take_steps(requested.params, [twice], 0.1, Correction(), 0)


def test_given_params_and_results_are_never_written_to() -> None:
    found, manifest = exported(NAME)
    requested = golden_inputs(manifest)
    for array in (*requested.params.values(), requested.x, requested.y):
        array.flags.writeable = False
    runtime = LiteRTRuntime(found.tflite, manifest)
    offset = {name: np.ones_like(requested.params[name]) for name in runtime.trainable}
    batches = [Examples(requested.x, requested.y)] * 2

    first, _ = runtime.take_steps(requested.params, batches, 0.1, Correction(mu=0.5, offset=offset), 0)
    logits = runtime.logits(requested.params, requested.x)
    kept = {name: value.copy() for name, value in first.items()}, logits.copy()
    runtime.take_steps(first, batches, 0.5, Correction(), 0)
    runtime.logits(first, requested.x + 1)

    for name, value in first.items():
        np.testing.assert_array_equal(value, kept[0][name])
        assert value.dtype == np.float32 and value.flags.c_contiguous and value.flags.owndata
    np.testing.assert_array_equal(logits, kept[1])
    assert all((value == 1).all() for value in offset.values())


def test_no_step_at_all_returns_copies() -> None:
    found, manifest = exported(NAME)
    requested = golden_inputs(manifest)

    trained, losses = LiteRTRuntime(found.tflite, manifest).take_steps(
        requested.params, [], 0.1, Correction(), 0
    )

    assert losses == []
    for name, value in trained.items():
        np.testing.assert_array_equal(value, requested.params[name])
        assert not np.shares_memory(value, requested.params[name])


@pytest.mark.parametrize("rows", [0, 1, BATCH, BATCH + 1, 3 * BATCH - 1])
def test_logits_of_a_row_do_not_depend_on_the_rows_beside_it(rows: int) -> None:
    found, manifest = exported(NAME)
    requested = golden_inputs(manifest)
    x = np.random.default_rng(0).standard_normal((rows, *manifest.input.shape)).astype(np.float32)
    runtime = LiteRTRuntime(found.tflite, manifest)

    together = runtime.logits(requested.params, x)

    assert together.shape == (rows, manifest.classes) and together.dtype == np.float32
    for row in range(rows):
        np.testing.assert_allclose(
            together[row], runtime.logits(requested.params, x[row : row + 1])[0], atol=1e-6
        )


def test_params_of_another_layout_are_taken() -> None:
    """Fortran order and float64, as an aggregation may hand out."""
    found, manifest = exported(NAME)
    requested = golden_inputs(manifest)
    runtime = LiteRTRuntime(found.tflite, manifest)
    other: dict[str, Any] = {
        name: np.asfortranarray(value, np.float64) for name, value in requested.params.items()
    }

    np.testing.assert_array_equal(
        runtime.logits(other, requested.x), runtime.logits(requested.params, requested.x)
    )


def described_as(manifest: Manifest, content: bytes) -> Manifest:
    return replace(manifest, file=FileSpec(hashlib.sha256(content).hexdigest(), len(content)))


def with_operation(content: bytes, old: int, new: int) -> bytes:
    """The file with one operation taken for another throughout."""
    model: Any = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(content, 0))
    for code in model.operatorCodes:
        if max(code.builtinCode, code.deprecatedBuiltinCode) == old:
            code.builtinCode = code.deprecatedBuiltinCode = new
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
