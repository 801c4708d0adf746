"""A table of texts with classes, next to whose tokenizer a model's description may lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.datasets.dataset import DataError
from models.datasets.labelled_texts import load
from tests.models.hugging_face import small_tokenizers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_tokenizers.word_pieces().save(str(tmp_path / "tokenizer.json"))
    rows = [f"text {number},{('sad', 'glad')[number % 2]}" for number in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,mood", *rows]))
    return tmp_path


def classes(folder: Path) -> tuple[str, ...]:
    return load(folder / "rows.csv", "text", "mood", 8, folder, 1).class_names


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"classes": ["sad", "glad"]}, ("sad", "glad")),
        ({"classes": ["sad", "other"]}, ("glad", "sad")),
        ({"classes": [["sad"], {}]}, ("glad", "sad")),
        ({"classes": 3}, ("glad", "sad")),
        ({}, ("glad", "sad")),
    ],
)
def test_classes_have_the_order_of_the_model_that_has_the_same(
    folder: Path, described: dict[str, Any], expected: tuple[str, ...]
) -> None:
    (folder / "schema.json").write_text(json.dumps(described))
    assert classes(folder) == expected


@pytest.mark.parametrize("name", ["schema.json", "config.json"])
@pytest.mark.parametrize(
    ("content", "reason"), [("{", "is not JSON"), ("[]", "holds list, expected an object")]
)
def test_a_damaged_description_is_refused_by_name(folder: Path, name: str, content: str, reason: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=f"{name}.*{reason}"):
        classes(folder)
