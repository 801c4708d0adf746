"""Texts for models of Hugging Face folders, by the folder's tokenizer: predicted, served and generated as transformers does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.hugging_face import small_tokenizers
from tests.support.cli import assert_refused, options, run_cli, run_here
from tests.support.long import extended
from tests.support.serving import Server, logits_of, serving

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

LENGTH = 24
LINES = ("To be, or not to be", "The sheep don't sleep: 你好", "naïve café " * 20)
GPT2 = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA = {
    "max_position_embeddings": LENGTH, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BERT = {
    "max_position_embeddings": LENGTH, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "id2label": {0: "sad", 1: "neutral", 2: "glad"}, "mask_token_id": 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2, small_tokenizers.byte_level, {"eos_token": small_tokenizers.END}),
    "llama": ("LlamaForCausalLM", LLAMA, small_tokenizers.sentence_pieces, {"eos_token": "</s>"}),
    "bert": ("BertForSequenceClassification", BERT, small_tokenizers.word_pieces, {"pad_token": "[PAD]"}),
}


def folder_of(name: str, path: Path) -> Path:
    """A model of transformers with random weights and its tokenizer, as people save them. Its embedding has rows that no token has."""
    import torch

    kind, sizes, make, names = MODELS[name]
    tokenizer, cls = make(), getattr(transformers, kind)
    ids = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(3)
    model = cls(cls.config_class(**{**sizes, **ids, "vocab_size": tokenizer.get_vocab_size() + 5}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return small_tokenizers.save(tokenizer, path, **names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`name` is a folder of Hugging Face, and `ours/name` what it is imported as."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        done = run_here("pretrain", "import", folder_of(name, folder / name), "--out", folder / "ours" / name)
        assert done.returncode == 0, done.stderr
        assert "it reads texts by tokenizer.json" in done.stdout
    (folder / "lines.txt").write_text("\n".join(LINES))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder / "home") as running:
        for name in MODELS:
            running.deployed(name, folder / "ours" / name)
        yield running


def theirs(folder: Path) -> tuple[Any, Any]:
    """Tokenizer and model of a folder as transformers loads them."""
    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, getattr(transformers, kind).from_pretrained(folder).eval()


def logits_of_theirs(tokenizer: Any, model: Any, line: str) -> Any:
    import torch

    tokenizer.truncation_side = "left" if model.config.model_type != "bert" else "right"
    given = tokenizer(line, truncation=True, max_length=LENGTH, return_tensors="pt")
    given.pop("token_type_ids", None)
    with torch.inference_mode():
        return model(**given).logits[0].numpy()


@pytest.mark.parametrize("name", ["gpt2", *extended("llama")])
def test_texts_are_continued_as_transformers_continues_them(name: str, folder: Path, server: Server) -> None:
    tokenizer, model = theirs(folder / name)
    prompt = "To be, or"
    given = tokenizer(prompt, return_tensors="pt")
    count = given["input_ids"].shape[1]
    generated = model.generate(**given, max_new_tokens=LENGTH - count, do_sample=False, pad_token_id=0)[0]
    text = tokenizer.decode(generated, skip_special_tokens=True)
    body = {"model": name, "prompt": prompt, "max_tokens": LENGTH - count, "temperature": 0}

    status, answer = server.call("POST", "/v1/completions", body)

    assert status == 200, answer
    assert prompt + answer["choices"][0]["text"] == text
    assert answer["usage"]["prompt_tokens"] == count
    ids = server.call("POST", "/v1/completions", {**body, "prompt": given["input_ids"][0].tolist()})[1]
    assert ids["choices"] == answer["choices"]
    long = server.call("POST", "/v1/completions", {**body, "prompt": "to be " * 100_000})
    assert (long[0], long[1]["error"]["code"]) == (400, "prompt_too_long")


def test_texts_are_classified_as_transformers_classifies_them(folder: Path, server: Server) -> None:
    tensor = {"name": "text", "shape": [len(LINES)], "datatype": "BYTES", "data": list(LINES)}
    status, answer = server.call("POST", "/v2/models/bert/infer", {"inputs": [tensor]})

    assert status == 200, answer
    tokenizer, model = theirs(folder / "bert")
    expected = [logits_of_theirs(tokenizer, model, line) for line in LINES]
    for found, logits in zip(logits_of(answer), expected, strict=True):
        assert found == pytest.approx(logits, abs=1e-4)
    labels = next(each["data"] for each in answer["outputs"] if each["name"] == "label")
    assert labels == [model.config.id2label[int(each.argmax())] for each in expected]
    assert len(set(labels)) > 1 or len({each.tobytes() for each in expected}) == len(LINES)


@pytest.mark.parametrize("name", ["gpt2", "bert", *extended("llama")])
def test_predictions_of_lines_are_those_of_transformers(name: str, folder: Path) -> None:
    """Also of a line that is too long: one to continue loses its beginning, another one its end."""
    done = run_here("predict", folder / "ours" / name, folder / "lines.txt", "--json")

    assert done.returncode == 0, done.stderr
    tokenizer, model = theirs(folder / name)
    for found, line in zip(json.loads(done.stdout)["predictions"], LINES, strict=True):
        logits = logits_of_theirs(tokenizer, model, line)
        logits = logits if name == "bert" else logits[-1]
        assert found["label"] == int(logits.argmax())
        exponentials = np.exp(logits - logits.max())
        assert found["probability"] == pytest.approx(float(exponentials.max() / exponentials.sum()), abs=1e-4)
        if name == "bert":
            assert found["class_name"] == model.config.id2label[found["label"]]


def test_a_broken_tokenizer_is_not_served(folder: Path, server: Server, tmp_path: Path) -> None:
    schema = json.loads((folder / "ours" / "gpt2" / "schema.json").read_text())
    schema["text"]["tokenizer"] = "{}"
    status, answer = server.deploy(
        "broken", changed(folder / "ours" / "gpt2", tmp_path / "broken", schema=schema)
    )
    assert (status, "is no tokenizer.json: Model missing" in str(answer)) == (400, True), answer


def changed(folder: Path, to: Path, **files: Any) -> Path:
    """A copy of a folder with other files; None: without one."""
    shutil.copytree(folder, to)
    for name, content in files.items():
        path = to / f"{name}.json"
        path.unlink() if content is None else path.write_text(json.dumps(content))
    return to


def test_wrong_tokenizers_are_refused_and_missing_ones_told(folder: Path, tmp_path: Path) -> None:
    gpt2 = folder / "gpt2"
    tokenizer = json.loads((gpt2 / "tokenizer.json").read_text())
    more = [
        {**tokenizer["added_tokens"][0], "id": 299 + extra, "content": f"<{extra}>"} for extra in range(9)
    ]
    config = json.loads((gpt2 / "config.json").read_text())
    cases: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "larger": (
            {"tokenizer": {**tokenizer, "added_tokens": [*tokenizer["added_tokens"], *more[1:]]}},
            ("tokenizer.json: has ids up to 307, and the embedding of the model 305 rows",),
        ),
        "broken": ({"tokenizer": {"added_tokens": []}}, ("tokenizer.json: is no tokenizer.json: Model missing",)),
        "end": (
            {"config": {**config, "eos_token_id": 50256}},
            ("config.json: eos_token_id is 50256, expected token ids from 0 to 304",),
        ),
    }  # fmt: skip
    for name, (files, reason) in cases.items():
        wrong = changed(gpt2, tmp_path / name, **files)
        assert_refused(run_here("pretrain", "import", wrong, "--out", tmp_path / "x"), *reason)
        assert not (tmp_path / "x").exists()
    without = changed(gpt2, tmp_path / "without", tokenizer=None)
    done = run_here("pretrain", "import", without, "--out", tmp_path / "ids")
    assert done.returncode == 0, done.stderr
    assert "it takes token ids: " in done.stdout and "has no tokenizer.json" in done.stdout
    assert_refused(run_here("predict", tmp_path / "ids", folder / "lines.txt"), "expected a file named .npy")


def settings(*more: str, length: int = 16) -> list[str]:
    given = (f"data.length={length}", "train.steps=4", "train.batch_size=4", *more)
    return options(given)


def test_a_training_from_a_folder_reads_its_text_by_the_folder_s_tokenizer(
    folder: Path, tmp_path: Path
) -> None:
    """And so does the next training, from its result, whose export transformers reads."""
    path = tmp_path / "own.txt"
    path.write_text("\n".join(LINES * 30))
    text = ("data.dataset=text", f"data.path={path}")
    for start, out in ((folder / "gpt2", tmp_path / "one"), (tmp_path / "one", tmp_path / "two")):
        done = run_cli("pretrain", *settings(f"model.init={start}", *text), "--out", out)
        assert done.returncode == 0, done.stderr
    done = run_here("pretrain", "export", tmp_path / "two", "--out", tmp_path / "back")
    assert done.returncode == 0, done.stderr

    tokenizer, model = theirs(tmp_path / "back")
    before = theirs(folder / "gpt2")[0]
    assert tokenizer.eos_token == before.eos_token
    ids = before(path.read_text()).input_ids
    tokens = [
        np.load(tmp_path / "one" / "data" / "arrays" / f"tokens_{part}.npy") for part in ("train", "test")
    ]
    decoded = before.decode(np.concatenate(tokens).tolist())
    assert decoded == path.read_text()
    assert abs(len(np.concatenate(tokens)) - len(ids)) <= 4  # where the text was cut in two
    predicted = run_here("predict", tmp_path / "two", folder / "lines.txt", "--json")
    logits = logits_of_theirs(tokenizer, model, LINES[0])[-1]
    assert json.loads(predicted.stdout)["predictions"][0]["label"] == int(logits.argmax())


@pytest.mark.extended
def test_token_files_of_a_folder_have_the_ids_of_its_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(
        "\n".join(f"{line} {number}" for number in range(60) for line in LINES[:2])
    )
    made = run_here(
        "pretrain", "tokenize", tmp_path / "own.txt", "--encoding", folder / "llama", "--documents", "line", "--out", tmp_path / "tokens"
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    header = json.loads((tmp_path / "tokens" / "header.json").read_text())
    tokenizer = theirs(folder / "llama")[0]
    assert (header["vocabulary"], header["end_of_document"]) == (len(tokenizer) + 5, tokenizer.eos_token_id)
    tokens = np.fromfile(tmp_path / "tokens" / "train.tokens", "<u2").tolist()
    first = tokens[: tokens.index(tokenizer.eos_token_id) + 1]
    assert first == [
        *tokenizer(tokenizer.decode(first, skip_special_tokens=True)).input_ids,
        tokenizer.eos_token_id,
    ]
    trained = ("data.dataset=tokens", f"data.path={tmp_path / 'tokens'}", f"model.init={folder / 'llama'}")
    done = run_cli("pretrain", *settings(*trained), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert run_here("predict", tmp_path / "run", folder / "lines.txt").returncode == 0


def test_an_exported_classifier_has_its_tokenizer_and_classes(folder: Path, tmp_path: Path) -> None:
    """Also where only the model and its schema are left, as of a version in the registry."""
    ours = folder / "ours" / "bert"
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("model.safetensors", "model.json", "schema.json"):
        shutil.copy(ours / name, bare)
    for source, out in ((ours, tmp_path / "back"), (bare, tmp_path / "from bare")):
        done = run_here("pretrain", "export", source, "--out", out)
        assert done.returncode == 0, done.stderr
        (tokenizer, model), (known, _) = theirs(out), theirs(folder / "bert")
        assert model.config.id2label == {0: "sad", 1: "neutral", 2: "glad"}
        for line in LINES:
            assert tokenizer(line).input_ids == known(line).input_ids


def test_another_tokenizer_than_that_of_the_texts_is_not_exported(folder: Path, tmp_path: Path) -> None:
    other = changed(folder / "ours" / "gpt2", tmp_path / "other")
    shutil.copy(folder / "bert" / "tokenizer.json", other)
    done = run_here("pretrain", "export", other, "--out", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    assert theirs(tmp_path / "back")[0](LINES[0]).input_ids == theirs(folder / "gpt2")[0](LINES[0]).input_ids


def test_a_classifier_is_trained_on_labelled_texts(folder: Path, tmp_path: Path) -> None:
    """Its classes keep the order of the folder it started from; without it they are sorted."""
    rows = [
        f'"{LINES[number % 2]}, {number}",{("sad", "neutral", "glad")[number % 3]}' for number in range(60)
    ]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,mood", *rows]))
    labelled = (
        "data.dataset=text", f"data.path={tmp_path / 'reviews.csv'}", "data.label=mood", 'data.features=["review"]'
    )  # fmt: skip
    started = (f"model.init={folder / 'bert'}", *labelled)
    done = run_cli("pretrain", *settings(*started), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    schema = json.loads((tmp_path / "run" / "schema.json").read_text())
    assert schema["classes"] == ["sad", "neutral", "glad"]
    x = np.load(tmp_path / "run" / "data" / "arrays" / "x_train.npy")
    tokenizer = theirs(folder / "bert")[0]
    first = tokenizer(LINES[0] + ", 0", truncation=True, max_length=16, padding="max_length").input_ids
    assert first in x.tolist() or first in np.load(tmp_path / "run/data/arrays/x_test.npy").tolist()
    predicted = run_here("predict", tmp_path / "run", folder / "lines.txt")
    assert predicted.returncode == 0, predicted.stderr
    assert {line.split()[0] for line in predicted.stdout.splitlines()} <= {"sad", "neutral", "glad"}
    for changes, reason in (
        (labelled, "texts with a label are encoded by a tokenizer"),
        ((*started, 'data.features=["review","mood"]'), "the label in one column"),
    ):
        assert_refused(run_here("pretrain", *settings(*changes), "--out", tmp_path / "x"), reason)
