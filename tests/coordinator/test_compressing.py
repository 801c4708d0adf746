"""What people point `fedloop compress` and `fedloop export` at by mistake, and what an export that failed leaves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator import compressing, exporting
from coordinator.compressing import Pipeline
from coordinator.errors import UserError
from coordinator.pretraining import Surroundings


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    """A folder as a compression leaves it, as far as another one reads it; its rows are gone."""
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
    ("spoil", "words"),
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
def test_a_folder_that_was_changed_is_one_message(
    compressed: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(compressed)
    with pytest.raises(UserError, match=words):
        compressing.source_in(compressed, Pipeline(), compressed / "scratch", Surroundings())


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"precision": "int3"}, "--precision int3: is unknown; known: float32"),
        ({"tflite": Path("none.tflite")}, "--tflite none.tflite: there is no such file"),
        ({"precision": "static-int8"}, "only float32 is made from params; compress the model first"),
        ({"tflite": Path(__file__)}, "its precision is unknown; give --precision"),
    ],
)
def test_what_cannot_be_exported_is_told(compressed: Path, wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        exporting.export(
            compressed, exporting.Wanted("digits", **wanted), compressed.parent / "out", Surroundings()
        )
    (compressed / "model.safetensors").unlink()
    with pytest.raises(UserError, match="nothing to release"):
        exporting.export(compressed, exporting.Wanted("digits"), compressed.parent / "out", Surroundings())


def test_an_export_that_failed_can_be_given_again(tmp_path: Path) -> None:
    out, nothing = tmp_path / "out", tmp_path / "nothing"
    for left in ("compressed", "export", "model.tflite"):
        (out / left).mkdir(parents=True)
        with pytest.raises(UserError, match=r"nothing: there is no model\.json here"):
            exporting.export(nothing, exporting.Wanted("digits"), out, Surroundings())
    (out / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="the folder is not empty"):
        exporting.export(nothing, exporting.Wanted("digits"), out, Surroundings())
