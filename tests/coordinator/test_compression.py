"""Wrong folders for `fedloop compress` and `fedloop export`, and the leftovers of a failed export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.datacenter import compression, release_export
from coordinator.datacenter.compression_pipeline import Pipeline
from coordinator.datacenter.compression_request import parse_request
from coordinator.datacenter.compression_sources import Source, SourceReader
from coordinator.datacenter.jobs import Environment
from coordinator.errors import UserError


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    """The files of a compression that another one reads; its rows are missing."""
    folder = tmp_path / "compressed"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"params")
    about = {"name": "cnn", "options": {}, "input_shape": [8, 8, 1], "classes": 10, "input_dtype": "float32"}
    (folder / "model.json").write_text(json.dumps(about | {"task": "classification"}))
    lineage = {"seed": 7, "model_sha256": hashlib.sha256(b"params").hexdigest()}
    (folder / "lineage.json").write_text(json.dumps(lineage))
    (folder / "pipeline.toml").write_text("")
    return folder


def edit(name: str, text: str | None) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink() if text is None else (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (edit("model.json", "{"), "model.json is not JSON"),
        (edit("model.json", "[]"), "holds list, expected an object"),
        (edit("model.json", '{"name": "cnn"}'), "model.json lacks the key 'options'"),
        (edit("lineage.json", None), "there is no lineage.json here"),
        (edit("lineage.json", '{"seed": 7}'), "lineage.json lacks the key 'model_sha256'"),
        (edit("model.safetensors", "other"), "it was replaced since"),
        (edit("model.safetensors", None), "there is no model.safetensors here"),
        (lambda folder: None, "the rows of that compression cannot be read"),
    ],
)
def test_a_modified_folder_is_refused(
    compressed: Path, corrupt: Callable[[Path], object], message: str
) -> None:
    corrupt(compressed)
    with pytest.raises(UserError, match=message):
        SourceReader(Pipeline(), compressed / "scratch", Environment()).read(compressed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int3"}, "--precision int3: is unknown; known: float32"),
        ({"tflite": Path("none.tflite")}, "--tflite none.tflite: there is no such file"),
        ({"precision": "static-int8"}, "only float32 is made from params; compress the model first"),
        ({"tflite": Path(__file__)}, "its precision is unknown; give --precision"),
    ],
)
def test_an_impossible_export_is_refused(compressed: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        release_export.export(
            compressed,
            release_export.ReleaseRequest("digits", **options),
            compressed.parent / "out",
            Environment(),
        )
    (compressed / "model.safetensors").unlink()
    with pytest.raises(UserError, match="nothing to release"):
        release_export.export(
            compressed, release_export.ReleaseRequest("digits"), compressed.parent / "out", Environment()
        )


def test_a_killed_export_can_be_repeated(tmp_path: Path) -> None:
    out, nothing = tmp_path / "out", tmp_path / "nothing"
    out.mkdir()
    for left in ("report.json", "model.tflite"):
        (out / left).touch()
        with pytest.raises(UserError, match=r"nothing: there is no model\.json here"):
            release_export.export(nothing, release_export.ReleaseRequest("digits"), out, Environment())
    (out / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="the folder is not empty"):
        release_export.export(nothing, release_export.ReleaseRequest("digits"), out, Environment())


@pytest.mark.parametrize("name", ["textcls", "cnn", "gpt"])
def test_without_a_pipeline_the_precision_is_measured(name: str) -> None:
    source = Source({"name": name, "options": {}}, Path(), {}, 7, {})
    steps = compression._complete(parse_request(None, None, []), source).step
    assert steps[-1] == {"kind": "quantize", "precision": "auto"}


def test_a_larger_or_slower_model_is_reported() -> None:
    before = {"bytes": 1000, "latency_us": 36.0}
    slow = {"bytes": 400, "latency_us": 193.0, "precision": "static-int8", "facts": {}}

    slower, advice = compression.notices(before, slow)

    assert slower == "SLOWER than the source: 193.0 us a row, before 36.0 us (5.4 times)"
    assert "--set quantize.precision=auto" in advice
    assert compression.notices(before, {**slow, "latency_us": 36.5}) == []
    larger, _ = compression.notices(before, {**slow, "bytes": 1200, "latency_us": None})
    assert larger == "LARGER than the source: 1,200 bytes, before 1,000"
