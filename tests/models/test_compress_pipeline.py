"""The engine: options are checked, steps are kept by what they are a function of, and nothing done is done again."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models import zoo
from models.compress import pipeline
from models.compress.pipeline import PipelineError, PlannedStep, plan_steps
from models.compress.quantization import quantize
from models.compress.step import Context, Data, StepModel, StepRefused
from models.options import bounded
from models.zoo.spec import ModelSpec

# a model for the datacenter alone: nothing is converted for devices, so that the engine is quick
SPEC = zoo.get("lstm", input_shape=(4,), classes=5, input_dtype="int32", task="next_token", width=8, layers=1)


@dataclass(frozen=True)
class Scale:
    """Options of the step below."""

    by: float = bounded(2.0, -10.0, 10.0)


def scale(model: StepModel, data: Data, options: Scale, context: Context) -> StepModel:
    """All weights times a factor, and a little chance."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(options.by).add_(float(context.rng().normal()) * 1e-3)
    return replace(model, module=module, facts={"by": options.by})


def scales(*factors: float) -> list[PlannedStep]:
    return [PlannedStep("scale", Scale(by), scale) for by in factors]


@pytest.fixture
def source() -> StepModel:
    return StepModel(SPEC, SPEC.build(1).eval())


@pytest.fixture(scope="module")
def data() -> Data:
    rows = np.random.default_rng(0).integers(0, 5, (40, 5)).astype(np.int32)
    x, y = rows[:, :-1], rows[:, 1:]
    return Data(x[:30], y[:30], x[30:], y[30:])


def ran(
    steps: Sequence[PlannedStep], source: StepModel, data: Data, folder: Path, seed: int = 0
) -> list[str]:
    """Which steps had to be run, the source left out."""
    progress: list[Mapping[str, Any]] = []
    pipeline.run(steps, source, data, folder, seed, on_progress=progress.append)
    stages = [line for line in progress if "stage" in line]
    assert {line["stage"] for line in stages} <= {"compress", "kept"}
    return [line["pipeline_step"] for line in stages if line["stage"] == "compress" and line["pipeline_step"]]


def contents(folder: Path) -> dict[str, str]:
    """Hash of every file but the records, which tell of seconds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*.safetensors")
    }


def test_only_what_has_changed_is_run_again(source: StepModel, data: Data, tmp_path: Path) -> None:
    assert ran(scales(2, 3, 4), source, data, tmp_path) == [1, 2, 3]
    assert ran(scales(2, 3, 4), source, data, tmp_path) == []
    assert ran(scales(2, 3, 5), source, data, tmp_path) == [3]
    assert ran(scales(2, 6, 5), source, data, tmp_path) == [2, 3]
    assert ran(scales(2, 6), source, data, tmp_path) == []
    assert not (tmp_path / "step-03-scale").exists()
    assert ran(scales(2, 6), source, data, tmp_path, seed=1) == [1, 2]
    fewer = replace(data, x_train=data.x_train[:9], y_train=data.y_train[:9])
    assert ran(scales(2, 6), source, fewer, tmp_path) == [1, 2]
    other = replace(source, module=SPEC.build(2).eval())
    assert ran(scales(2, 6), other, fewer, tmp_path) == [1, 2]


def test_results_of_other_code_are_run_again(
    source: StepModel, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran(scales(2, 3), source, data, tmp_path) == [1, 2]
    monkeypatch.setattr(pipeline, "code_digest", lambda: "of another version")
    assert ran(scales(2, 3), source, data, tmp_path) == [1, 2]
    assert ran(scales(2, 3), source, data, tmp_path) == []


def test_a_model_that_cannot_be_converted_says_why_and_is_measured_by_its_params(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_tflite(module: nn.Module, spec: ModelSpec) -> bytes:
        raise NotImplementedError("aten.sort has no\nlowering")

    monkeypatch.setattr(quantize, "to_tflite", to_tflite)
    spec = zoo.get("logreg", input_shape=(4,), classes=5)
    x, y = np.zeros((3, 4), np.float32), np.arange(3, dtype=np.int32)
    done = pipeline.run([], StepModel(spec, spec.build(0).eval()), Data(x, y, x, y), tmp_path, 0)
    (row,) = pipeline.measure(done, Data(x, y, x, y))
    assert row["facts"] == {"not_converted": "NotImplementedError: aten.sort has no"}
    assert row["latency_us"] is None
    assert row["bytes"] == (done[0].folder / "model.safetensors").stat().st_size


def test_a_file_that_was_changed_is_made_again(source: StepModel, data: Data, tmp_path: Path) -> None:
    ran(scales(2, 3), source, data, tmp_path)
    before = contents(tmp_path)
    (tmp_path / "step-01-scale" / "model.safetensors").write_bytes(b"something else")
    assert ran(scales(2, 3), source, data, tmp_path) == [1]
    assert contents(tmp_path) == before


@pytest.mark.parametrize("stopped_at", [1, 2])
def test_stopped_within_a_step_it_goes_on_after_the_last_one_and_gives_the_same(
    stopped_at: int, source: StepModel, data: Data, tmp_path: Path
) -> None:
    ran(scales(2, 3), source, data, tmp_path / "whole")

    def stops(model: StepModel, data: Data, options: Scale, context: Context) -> StepModel:
        raise StepRefused("too much")

    steps = scales(2, 3)
    steps[stopped_at - 1] = replace(steps[stopped_at - 1], function=stops)
    with pytest.raises(StepRefused, match="too much"):
        pipeline.run(steps, source, data, tmp_path / "stopped", 0)
    unfinished = tmp_path / "stopped" / f"step-{stopped_at:02}-scale"
    unfinished.mkdir()  # what a kill leaves that comes before the record is written
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert ran(scales(2, 3), source, data, tmp_path / "stopped") == list(range(stopped_at, 3))
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_every_step_tells_what_it_was_made_from(source: StepModel, data: Data, tmp_path: Path) -> None:
    done = pipeline.run(scales(2, 3), source, data, tmp_path, 0)
    first, second, third = lines = pipeline.lineage(done)
    assert [line["parent_sha256"] for line in lines] == [
        None,
        first["params_sha256"],
        second["params_sha256"],
    ]
    for line, name in zip(lines, ("step-00-source", "step-01-scale", "step-02-scale"), strict=True):
        assert hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest() == line["params_sha256"]  # fmt: skip
        record = json.loads((tmp_path / name / "step.json").read_text())
        assert record["data_fingerprint"] == pipeline.fingerprint(data)
    assert third["tflite_sha256"] is None
    rows = pipeline.measure(done, data)
    assert [row["kind"] for row in rows] == ["source", "scale", "scale"]
    assert rows[2]["facts"] == {"by": 3}
    assert {row["latency_us"] for row in rows} == {None}


def test_a_change_that_names_and_shapes_do_not_tell_is_refused(
    source: StepModel, data: Data, tmp_path: Path
) -> None:
    class Louder(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.__dict__["module"] = module
            for name, child in module.named_children():
                setattr(self, name, child)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            louder: torch.Tensor = self.__dict__["module"](x) * 2
            return louder

    def hides(model: StepModel, data: Data, options: Scale, context: Context) -> StepModel:
        return replace(model, module=Louder(model.module))

    with pytest.raises(StepRefused, match=r"step-01-hides: .*names and shapes alone do not describe"):
        pipeline.run([PlannedStep("hides", Scale(), hides)], source, data, tmp_path, 0)
    assert not (tmp_path / "step-01-hides" / "step.json").exists()


@pytest.mark.parametrize(
    ("tables", "fault"),
    [
        ([{"epochs": 2}], r"my.toml: step 1 has no kind, expected one of distil, "),
        ([{"kind": "distil"}, {"kind": "prun"}], r"my.toml: step 2 has kind = 'prun', expected one of"),
        ([{"kind": "distil", "epoch": 2}], r"my.toml: step 1 \(distil\) has the unknown key 'epoch', did you mean 'epochs'"),
        ([{"kind": "distil", "lr": "fast"}], r"my.toml: step 1 \(distil\).lr is 'fast', expected a number from 0"),
        ([{"kind": "quantize", "precision": "int7"}], r"step 1 \(quantize\).precision is 'int7', expected one of"),
    ],
)  # fmt: skip
def test_a_problem_is_reported_with_step_kind_and_key(tables: list[dict[str, Any]], fault: str) -> None:
    with pytest.raises(PipelineError, match=fault):
        plan_steps(tables, "my.toml")


def test_the_packed_form_is_stored_verified_and_kept_until_the_weights_change(
    data: Data, tmp_path: Path
) -> None:
    spec = zoo.get(
        "gpt", input_shape=(4,), classes=5, input_dtype="int32", task="next_token", width=8, layers=1, heads=2
    )
    source = StepModel(spec, spec.build(1).eval())
    (gptq,) = plan_steps([{"kind": "gptq", "max_accuracy_drop": 1.0}], "small.toml")
    same = PlannedStep("same", None, lambda model, data, options, context: replace(model, facts={"same": 1}))
    steps = [gptq, same, *scales(2)]
    done = pipeline.run(steps, source, data, tmp_path, 0)

    file = tmp_path / "step-01-gptq" / "packed.safetensors"
    packed = [line["packed_sha256"] for line in pipeline.lineage(done)]
    assert packed == [None, hashlib.sha256(file.read_bytes()).hexdigest(), packed[1], None]
    assert [each.model.precision for each in done] == ["float32", "weight-int4", "weight-int4", "float32"]
    rows = pipeline.measure(done, data)
    assert rows[1]["bytes"] == rows[2]["bytes"] == file.stat().st_size < rows[0]["bytes"]
    assert not (tmp_path / "step-03-scale" / "packed.safetensors").exists()

    assert ran(steps, source, data, tmp_path) == []
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert ran(steps, source, data, tmp_path) == [1]
    assert file.read_bytes() == content
