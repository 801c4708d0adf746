"""`fedloop model export --format hugging-face`: registered models as folders that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coordinator.datacenter import hugging_face
from coordinator.errors import UserError
from tests.coordinator.registry.test_commands import fedloop, served
from tests.models.hugging_face.folders import logits_of_theirs, rows, save, theirs
from tests.support import model_folders as left
from tests.support.cli import run_cli
from tests.support.long import extended

pytestmark = pytest.mark.slow

FORMAT = ("--format", "hugging-face")


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with served(tmp_path_factory.mktemp("coordinator") / "home"):
        yield


@pytest.mark.parametrize("name", ["qwen2", *extended("gpt2", "llama 3", "bert", "bert classifier")])
def test_a_registered_model_is_loaded_by_transformers(name: str, coordinator: None, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    expected = save(name, tmp_path / "theirs")
    hugging_face.import_folder(tmp_path / "theirs", tmp_path / "ours")
    registered = name.replace(" ", "-")
    fedloop("add", tmp_path / "ours", "--name", registered)

    done = fedloop("export", registered, *FORMAT, "--out", tmp_path / "back", "--json")

    assert json.loads(done.stdout)["parameters"] == expected.num_parameters()
    assert {path.suffix for path in (tmp_path / "back").iterdir()} == {".json", ".safetensors"}
    found = theirs(tmp_path / "back")
    x = rows(least=1)
    torch.testing.assert_close(logits_of_theirs(found, x), logits_of_theirs(expected, x), rtol=0, atol=1e-4)


@pytest.mark.extended
def test_a_simulated_model_is_loaded_by_transformers_with_a_tokenizer(
    coordinator: None, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    sets = ("model.name=gpt", "model.width=16", "model.layers=1", "model.heads=2", "data.dataset=shakespeare",
            "data.partition=iid", "federation.rounds=1", "federation.clients=2", "federation.clients_per_round=2",
            "federation.runtimes={torch=1}", "local.epochs=1")  # fmt: skip
    done = run_cli(
        "simulate", *(part for each in sets for part in ("--set", each)), "--out", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    fedloop("add", tmp_path / "run", "--name", "plays")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text("{}")

    fedloop("export", "plays", *FORMAT, "--out", tmp_path / "back", "--tokenizer", tmp_path / "words")

    assert theirs(tmp_path / "back").config.model_type == "gpt2"
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


def test_a_model_without_a_counterpart_is_refused_naming_those_that_have_one(
    coordinator: None, tmp_path: Path
) -> None:
    left.pretrained(tmp_path / "logreg")
    fedloop("add", tmp_path / "logreg", "--name", "digits")
    (tmp_path / "m.safetensors").write_bytes(left.params(60))
    fedloop("import", tmp_path / "m.safetensors", "--name", "foreign")
    (tmp_path / "m.tflite").write_bytes(left.tflite(60))
    fedloop("import", tmp_path / "m.tflite", "--name", "small")
    out = ("--out", tmp_path / "back")
    for arguments, reason in (
        (("digits", *FORMAT), r"digits:1 is of model 'logreg', .* have one: gpt \(as GPT-2, .*\) or bert \(as BERT\)"),
        (("foreign", *FORMAT), r"foreign:1 is imported weights, which --format files fetches as they were"),
        (("small", *FORMAT), r"small:1 is tflite of stage import and has no model.safetensors; versions from pretrain"),
        (("digits", "--tokenizer", tmp_path), r"--tokenizer .*: is for --format hugging-face, and the format is files"),
        (("digits", "--format", "x"), r"--format x: expected files, onnx or hugging-face"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=reason):
            fedloop("export", *arguments, *out)
    assert not (tmp_path / "back").exists()


def test_code_of_ones_own_is_refused_unimported(tmp_path: Path) -> None:
    left.pretrained(tmp_path / "mine")
    described = json.loads((tmp_path / "mine" / "model.json").read_text())
    shape = {
        "name": "no_such_module:build",
        "input_shape": [4],
        "input_dtype": "float32",
        "task": "classification",
    }
    left.write(tmp_path / "mine", "model.json", {**described, **shape})
    with pytest.raises(UserError, match="mine is of model 'no_such_module:build', which has no counterpart"):
        hugging_face.export_folder(tmp_path / "mine", tmp_path / "out")
