"""Manifests are read strictly: what does not fit is refused with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.wire.manifest import ManifestError, from_json, require_file, signature_name
from tests.support.manifests import linear


def test_reading_what_was_written_gives_the_manifest_back() -> None:
    assert from_json(linear().to_json()) == linear()


def test_the_same_manifest_is_always_the_same_bytes() -> None:
    assert linear().to_json() == from_json(linear().to_json()).to_json()


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (["batch_size"], "4", "m.json.batch_size is '4', expected a whole number"),
        (["batch_size"], True, "m.json.batch_size is True, expected a whole number"),
        (["batch_size"], 0, "m.json.batch_size is not positive"),
        (["classes"], 1.5, "m.json.classes is 1.5, expected a whole number"),
        (
            ["tensors", 1, "shape"],
            [2, "3"],
            r"m.json.tensors\[1\].shape\[1\] is '3', expected a whole number",
        ),
        (["tensors", 1, "dtype"], "float16", r"m.json.tensors\[1\].dtype is 'float16', expected 'float32'"),
        (["tensors", 1, "name"], "fc.weight", "m.json.tensors: a name occurs twice"),
        (["tensors", 1, "shape"], [-2], "m.json.tensors: an extent is not positive"),
        (["input"], None, "m.json.input is None, expected an object"),
        (["input", "dtype"], "int32", "m.json.input.vocab is needed for int32"),
        (
            ["task"],
            "ranking",
            "m.json.task is 'ranking', expected one of 'classification', 'next_token', 'regression'",
        ),
        (["task"], "regression", "expected 1 for the task regression"),
        (["signatures", "train", "outputs"], ["loss"], "m.json.signatures: expected"),
        (["golden", "lr"], "high", "m.json.golden.lr is 'high', expected a number"),
        (["golden", "logits", "first"], {}, "m.json.golden.logits.first is {}, expected a list"),
        (["golden", "changes", "fc.bias"], 3, r"m.json.golden.changes\['fc.bias'\] is 3, expected an object"),
        (["golden", "changes"], {}, "m.json.golden.changes: not one for every trainable"),
        (["golden", "padded_rows"], 4, "m.json.golden.padded_rows is not within the batch"),
        (["lineage", "parent"], 5, "m.json.lineage.parent is 5, expected a string"),
        (["surprise"], 1, "m.json has the unknown key 'surprise'"),
        (["golden", "surprise"], 1, "m.json.golden has the unknown key 'surprise'"),
        (["format"], 2, "m.json: format is 2, this software reads format 1"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_place(
    path: list[Any], value: Any, complaint: str
) -> None:
    document = json.loads(linear().to_json())
    at = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value

    with pytest.raises(ManifestError, match=complaint):
        from_json(json.dumps(document), "m.json")


@pytest.mark.parametrize("key", ["model", "file", "golden", "tensors"])
def test_a_missing_key_is_named(key: str) -> None:
    document = json.loads(linear().to_json())
    del document[key]

    with pytest.raises(ManifestError, match=f"m.json lacks the key '{key}'"):
        from_json(json.dumps(document), "m.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\udcff", "[]", "null", "7"])
def test_a_document_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        from_json(text)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ManifestError, match=r"m.json is not JSON"):
        from_json(b"\xff\xfe\x00{", "m.json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_not_finite_is_refused(number: str) -> None:
    document = linear().to_json().replace('"loss": 0.7', f'"loss": {number}')

    with pytest.raises(ManifestError, match=r"golden.loss is .*, expected a finite number"):
        from_json(document)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_document_is_read_or_refused(document: Any) -> None:
    for full in (
        document,
        {"format": 1, "golden": document},
        json.loads(linear().to_json()) | {"golden": document},
    ):
        with pytest.raises(ManifestError):
            from_json(json.dumps(full))


def test_a_file_that_is_not_the_manifests_is_refused() -> None:
    manifest = linear(b"the file")

    require_file(manifest.file, b"the file")
    with pytest.raises(ManifestError, match=r"model.tflite has SHA-256"):
        require_file(manifest.file, b"the fi1e", "model.tflite")
    with pytest.raises(ManifestError, match=r"model.tflite has 9 bytes, its manifest says 8"):
        require_file(manifest.file, b"the files", "model.tflite")


@pytest.mark.parametrize(
    ("name", "bound"),
    [("fc.weight", "fc__weight"), ("stages.1.conv1.weight", "stages__1__conv1__weight"), ("0.bias", "_0__bias"), ("a-b", "a_b")],
)  # fmt: skip
def test_signature_names_are_identifiers(name: str, bound: str) -> None:
    assert signature_name(name) == bound
    assert bound.isidentifier()
