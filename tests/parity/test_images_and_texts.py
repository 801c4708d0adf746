"""Images and texts in natural form become the very arrays that the model was trained on, and are predicted alike everywhere."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from edge_client.data import DataConfig, open_data
from edge_client.data.connector import DataProblem
from edge_client.data.contract import require_inputs
from edge_client.serving.predict import of_inputs
from edge_client.serving.rows import Reading, concatenate, read_inputs
from edge_client.serving.texts import token_name
from edge_client.wire import schema as schemas
from edge_client.wire.preprocessing import ImageSchema, TextSchema
from edge_client.wire.schema import DataSchema
from edge_client.wire.strict import InvalidDocument
from models.datasets import corpus, load
from tests.support.cli import run_cli
from tests.support.require import data_dir

EDGE = Path(sys.executable).parent / "fedloop-edge"
COLOUR = ImageSchema("CHW", 255, 255.0, (0.5, 0.25, 0.0), (0.5, 1.0, 2.0))


def save_image(path: Path, pixels: np.ndarray) -> Path:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(pixels).save(path)
    return path


def test_pixels_become_the_inputs_that_training_had(tmp_path: Path) -> None:
    digits = load("digits", seed=0)
    np.savez(tmp_path / "a.npz", x=np.rint(digits.x * 16).astype(np.uint8), y=digits.y)
    np.save(tmp_path / "b.npy", digits.x)

    found = read_inputs(tmp_path / "a.npz", digits.described, "digits")

    np.testing.assert_array_equal(found.x, digits.x)
    np.testing.assert_array_equal(found.y, digits.y)
    np.testing.assert_array_equal(read_inputs(tmp_path / "b.npy", digits.described, "digits").x, digits.x)


def test_a_loader_that_returns_bytes_has_images(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), np.uint8)
    np.savez(tmp_path / "own.npz", x=pixels, y=[0, 1, 0, 1, 0, 1], test=np.ones(6) == [0, 0, 0, 0, 1, 1])
    own = load("npz", path=tmp_path / "own.npz")
    np.save(tmp_path / "new.npy", pixels)

    assert own.described.kind == "image" and own.described.image == ImageSchema("HWC", 255, 1.0)
    np.testing.assert_array_equal(read_inputs(tmp_path / "new.npy", own.described, "own").x, own.x)


def test_image_files_are_scaled_by_channel_and_their_folders_are_classes(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    first = save_image(tmp_path / "in" / "cat" / "1.png", pixels)
    second = save_image(tmp_path / "in" / "dog" / "2.png", 255 - pixels)
    schema = DataSchema("image", (3, 4, 5), "float32", ("dog", "cat"), image=COLOUR)

    found = read_inputs(tmp_path / "in", schema, "pets")
    one_by_one = concatenate([read_inputs(path, schema, "pets") for path in (first, second)])

    expected = (pixels / 255 - COLOUR.mean) / COLOUR.deviation
    np.testing.assert_allclose(found.x[0], expected.transpose(2, 0, 1), atol=1e-6)
    assert found.y is not None and found.y.tolist() == [1, 0]
    assert found.sources == (str(first), str(second)) == one_by_one.sources
    np.testing.assert_array_equal(found.x, one_by_one.x)
    np.save(tmp_path / "p.npy", pixels.transpose(2, 0, 1))
    np.testing.assert_array_equal(read_inputs(tmp_path / "p.npy", schema, "pets").x, found.x[:1])


def test_images_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    digits = load("digits", seed=0).described
    np.save(tmp_path / "big.npy", np.full((1, 8, 8), 17, np.uint8))
    np.save(tmp_path / "wide.npy", np.zeros((2, 8, 9), np.uint8))
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("big.npy", "pixels are 17 to 17, those the model was trained on 0 to 16"),
        ("wide.npy", r"images are \[8, 9\], expected 8 x 8 pixels in grey"),
        ("text.png", "cannot be read as an image"),
        ("empty", "holds no image"),
        ("missing.png", "No such file"),
    ):
        with pytest.raises(DataProblem, match=message):
            read_inputs(tmp_path / name, digits, "digits")
    with pytest.raises(DataProblem, match="has 9 x 8 pixels, expected 8 x 8"):
        read_inputs(save_image(tmp_path / "9.png", np.zeros((8, 9), np.uint8)), digits, "digits")


def test_a_machine_without_pillow_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataProblem, match="images need Pillow"):
        read_inputs(tmp_path / "a.png", load("digits", seed=0).described, "digits")


def test_a_device_reads_a_folder_of_images_as_the_model_was_trained(tmp_path: Path) -> None:
    schema = load("digits", seed=0).described
    pixels = np.array([[0, 255], [51, 102]], np.uint8).repeat(4, 0).repeat(4, 1)
    save_image(tmp_path / "3" / "a.png", pixels)
    save_image(tmp_path / "7" / "b.png", pixels)
    config = DataConfig("images", tmp_path, {"held_out": 0.0})
    read = open_data(config, schema).train()
    expected = read_inputs(tmp_path / "3" / "a.png", schema, "digits").x[0]
    np.testing.assert_allclose(read.x, [expected, expected], rtol=1e-6)
    assert sorted(read.y.tolist()) == [3, 7]
    require_inputs(read.x, schema)
    for option, value, message in (
        ("scale", 1.0, "scale says 1.0"),
        ("shape", [16, 16], "shape says"),
        ("classes", ["3", "7"], "option classes says"),
    ):
        with pytest.raises(DataProblem, match=message):
            open_data(replace(config, options={option: value}), schema)
    bank = DataSchema("text", (4,), "int32", text=TextSchema("words", "class", ("up", "down"), 2, 0, 1))
    with pytest.raises(DataProblem, match="trained on data of kind text"):
        open_data(config, bank)


def test_arrays_that_cannot_be_what_the_model_was_trained_on_are_refused() -> None:
    digits = load("digits", seed=0)
    require_inputs(digits.x, digits.described)
    with pytest.raises(DataProblem, match=r"pixels from 0 to 16, the model's images from 0 to 1; .*`scale`"):
        require_inputs(digits.x * 16, digits.described)
    bank = DataSchema("text", (4,), "int32", text=TextSchema("words", "class", ("up", "down"), 2, 0, 1))
    require_inputs(np.array([[0, 1, 2, 3]], np.int32), bank)
    with pytest.raises(DataProblem, match="token ids from 0 to 4, the model's vocabulary of words 0 to 3"):
        require_inputs(np.array([[0, 4, 2, 3]], np.int32), bank)


def test_sentences_become_the_ids_that_training_had(tmp_path: Path) -> None:
    name = "financial_phrasebank.csv"
    bank = load("phrasebank", data_dir=data_dir(name), seed=0, length=8, vocab=100)
    with (data_dir(name) / name).open(newline="", encoding="utf-8") as file:
        sentences = [row[-1].replace("\n", " ") for row in csv.reader(file)][-50:]
    (tmp_path / "s.txt").write_text("\n".join(sentences) + "\n")

    found = read_inputs(tmp_path / "s.txt", bank.described, "bank")

    np.testing.assert_array_equal(found.x, bank.x[-50:])
    assert found.last is None


def test_the_token_after_the_last_one_of_a_line_is_predicted(tmp_path: Path) -> None:
    schema = DataSchema("text", (4,), "int32", text=TextSchema("characters", "next_token", ("a", "b", "")))
    path = tmp_path / "t.txt"
    path.write_text("ab\naaaabb\n")
    inputs = read_inputs(path, schema, "letters")
    logits = np.zeros((2, 4, 3), np.float32)
    logits[0, 1, 0] = logits[1, 3, 2] = 3

    first, second = of_inputs(logits, "letters", schema, inputs)

    assert inputs.x.tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]  # the second is the end of its line
    assert (first.class_name, second.class_name) == ("a", "#2")
    assert first.line(2).startswith("'a' 0.9")
    path.write_text("abc\n")
    with pytest.raises(DataProblem, match="line 1: 'c' is none of the 2 characters"):
        read_inputs(path, schema, "letters")
    path.write_text("ab\n\n")
    with pytest.raises(DataProblem, match="line 2: is empty"):
        read_inputs(path, schema, "letters")
    with pytest.raises(DataProblem, match="--leave-out is for tables"):
        read_inputs(path, schema, "letters", Reading(("x",)))


def test_a_schema_names_no_rare_character_of_private_text(tmp_path: Path) -> None:
    path = tmp_path / "private.txt"
    path.write_text("abc " * 40 + "ß" * 9, "utf-8")
    prepared = corpus.prepare(path, tmp_path / "tokens", "characters")

    schema = corpus.schema_of(prepared, 8)

    assert "ß" not in schema.to_json() and schema.text is not None
    assert schema.text.vocabulary == (" ", "a", "b", "c", "")


def test_lines_become_the_pairs_that_training_had(tmp_path: Path) -> None:
    path = tmp_path / "private.txt"
    path.write_text("der müde Löwe träumt\n" * 40 + "geheim " * 9, "utf-8")
    prepared = corpus.prepare(path, tmp_path / "tokens", "bpe", 300)
    schema = schemas.from_json(corpus.schema_of(prepared, 12).to_json())
    assert schema.text is not None and len(schema.text.vocabulary) == prepared.vocab > 256
    assert "geh" not in schema.to_json() and "heim" not in schema.to_json()
    lines = ["der Löwe", "träumt müde", "日本 🦁"]
    (tmp_path / "new.txt").write_text("\n".join(lines), "utf-8")

    inputs = read_inputs(tmp_path / "new.txt", schema, "lion")

    learnt = json.loads((tmp_path / "tokens" / corpus.ENCODING).read_text("utf-8"))["tokenizer"]
    tokenizer = Tokenizer.from_str(json.dumps(learnt))
    assert inputs.last is not None
    for row, line in enumerate(lines):
        ids = tokenizer.encode(line).ids
        assert inputs.x[row, : len(ids)].tolist() == ids[-12:] and inputs.last[row] == len(ids[-12:]) - 1
    assert token_name(schema.text, inputs.x[0, 0]) == "der"
    assert token_name(schema.text, 0) == "!" and token_name(schema.text, 255) == r"\xad"


def test_a_file_that_is_no_tokenizer_is_refused() -> None:
    text = TextSchema("bpe", "next_token", ("a", "b"), merges=("a b",))
    with pytest.raises(InvalidDocument, match="2 tokens, and there are 256 bytes"):
        schemas.from_json(DataSchema("text", (4,), "int32", text=text).to_json())
    tokens = tuple(chr(place) for place in range(1000, 1256))
    for merges in (("a b",), ("ab",), (f"{tokens[0]} {tokens[1]}",)):
        wrong = DataSchema("text", (4,), "int32", text=TextSchema("bpe", "next_token", tokens, merges=merges))
        with pytest.raises(InvalidDocument, match="a pair that the vocabulary lacks"):
            schemas.from_json(wrong.to_json())


def test_schemas_are_read_back_and_those_of_other_data_have_no_new_key() -> None:
    digits = load("digits", seed=0).described
    letters = DataSchema("text", (4,), "int32", text=TextSchema("bytes", "next_token"))
    for schema in (digits, letters):
        assert schemas.from_json(schema.to_json()) == schema
    plain = DataSchema("array", (2,), "float32")
    assert not {"image", "text"} & set(json.loads(plain.to_json()))
    assert digits.image is not None
    for wrong in (
        replace(digits, image=replace(digits.image, divisor=0.0)),
        replace(digits, image=replace(digits.image, layout="CHW")),
        replace(digits, kind="array"),
        replace(letters, text=replace(letters.text, unit="words")),
    ):
        with pytest.raises(InvalidDocument):
            schemas.from_json(wrong.to_json())


@pytest.mark.extended
@pytest.mark.slow
def test_run_release_and_device_predict_images_alike(tmp_path: Path) -> None:
    digits = load("digits", seed=0)
    for row in range(10):
        save_image(
            tmp_path / "in" / str(digits.y[row]) / f"{row}.png", np.rint(digits.x[row] * 255).astype(np.uint8)
        )
    sets = ["model.name=mlp", "model.hidden=[8]", "federation.rounds=2", "federation.runtimes.torch=1"]
    options = [part for each in sets for part in ("--set", each)]
    for command in (
        ["simulate", *options, "--out", "run"],
        ["export", "run", "--name", "digits", "--precision", "float32", "--out", "release"],
    ):
        done = run_cli(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    answers = [run_cli("predict", model, "in", cwd=tmp_path).stdout for model in ("run", "release")]
    device = subprocess.run(
        [EDGE, "predict", "--release", "release", "in"], cwd=tmp_path, capture_output=True, text=True
    )

    assert device.returncode == 0 and len(device.stdout.splitlines()) == 10
    assert answers == [device.stdout, device.stdout]
    assert "accuracy" in device.stderr
