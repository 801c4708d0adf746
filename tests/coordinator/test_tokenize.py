"""`fedloop pretrain tokenize`, and what is trained from its files."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.datacenter import hugging_face
from coordinator.datacenter.pretrain_config import resolve
from coordinator.datacenter.training_data import check_loaded
from coordinator.errors import UserError
from models.datasets.token_files.directory import open_directory
from tests.support.cli import assert_refused, options, report_of, run_cli, run_here, started
from tests.support.long import extended

PLAYS = [
    f"Enter {who}.\nTo be, or not to be: line {n}.\n" for n in range(150) for who in ("HAMLET", "Ophelia")
]
SMALL = (
    "data.length=24",
    "model.width=16",
    "model.layers=2",
    "model.heads=2",
    "train.steps=6",
    "checkpoint.every=3",
)


def write(folder: Path) -> Path:
    path = folder / "plays.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PLAYS))
    return path


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenised")
    out = folder / "tokens"
    done = run_cli(
        "pretrain", "tokenize", write(folder), "--encoding", "bpe(300)", "--test-share", "0.2", "--out", out
    )
    assert done.returncode == 0, done.stderr
    assert "tokens of" in done.stdout and f"--set data.path={out}" in done.stdout
    return out


def test_token_files_are_made_in_one_piece(tokens: Path) -> None:
    assert [path.name for path in tokens.parent.iterdir() if path.name.startswith(".")] == []
    found = open_directory(tokens)
    assert found.header.train.documents + found.header.test.documents == len(PLAYS)
    again = run_here("pretrain", "tokenize", tokens.parent / "plays.jsonl", "--out", tokens)
    assert_refused(again, f"--out {tokens}: the folder is not empty")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.txt"], "none.txt: there is no such file or folder"),
        (["plays.jsonl", "--text-key", "body"], "plays.jsonl, line 1: has no text under 'body'"),
        *extended(
            (["plays.jsonl", "--encoding", "words"], "encoding 'words': expected characters, bytes, bpe(n)"),
            (["plays.jsonl", "--encoding", "none.json"], "none.json: cannot be read: No such file"),
            (["plays.jsonl", "--documents", "page"], "documents is 'page', expected one of 'file', 'line', 'jsonl'"),
            (["plays.jsonl", "--end-of-document", "</s>"], "--end-of-document is of a tokenizer.json; the encoding is bytes"),
        ),
    ],
)  # fmt: skip
def test_a_wrong_request_leaves_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    write(tmp_path)
    done = run_cli("pretrain", "tokenize", *arguments, "--out", "tokens", cwd=tmp_path)
    assert_refused(done, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plays.jsonl"]


@pytest.mark.slow
def test_a_killed_tokenisation_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    path, out = tmp_path / "long.txt", tmp_path / "tokens"
    path.write_text("To be, or not to be: that is the question.\n" * 400_000)
    work = tmp_path / ".tokens.tokenizing"
    arguments = [
        "pretrain",
        "tokenize",
        path,
        "--documents",
        "line",
        "--encoding",
        "characters",
        "--out",
        out,
    ]
    with started(*arguments) as command:
        assert command.reaches((work / "tokens" / "train.tokens").exists)
        busy = run_cli(*arguments)
        assert_refused(busy, "another process is tokenising into it")
        command.send(signal.SIGKILL)
        assert command.ended() == -signal.SIGKILL
        assert command.all_gone()
    assert not out.exists()
    refused = run_cli(
        "pretrain", *options(["data.dataset=tokens", f"data.path={work / 'tokens'}"]), cwd=tmp_path
    )
    assert_refused(refused, "is no directory of token files: header.json")
    path.write_text("".join(PLAYS))
    assert run_cli(*arguments).returncode == 0
    assert not work.exists()
    assert open_directory(out).verify()


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    done = run_cli("pretrain", *options(["data.dataset=tokens", f"data.path={tokens}", *SMALL]), "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "curve.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_model_is_trained_from_token_files_and_reads_texts(
    trained: Path, tokens: Path, tmp_path: Path
) -> None:
    report, header = report_of(trained), open_directory(tokens).header
    assert report["data"]["fingerprint"] == report["lineage"]["data_fingerprint"] == header.sha256
    assert report["data"]["classes"] == header.vocabulary
    assert "SHA-256" in report["data"]["preview"][1] and "checked" in report["data"]["preview"][1]
    assert not open_directory(tokens).verify()  # the training did
    assert [path.name for path in (trained / "data" / "arrays").iterdir()] == ["tokenizer.json"]
    (tmp_path / "lines.txt").write_text("To be, or\nEnter HAM\n")
    predicted = run_cli("predict", trained, tmp_path / "lines.txt", "--json")
    assert predicted.returncode == 0, predicted.stderr
    assert len(json.loads(predicted.stdout)["predictions"]) == 2


@pytest.mark.slow
def test_packed_documents_resume_under_another_plan(tokens: Path, tmp_path: Path) -> None:
    """With the same losses as in one go."""
    packed = ["data.dataset=tokens", f"data.path={tokens}", *SMALL, "data.packing=documents"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_cli("pretrain", *options(packed), "--out", whole).returncode == 0
    begun = run_cli("pretrain", *options([*packed, "train.steps=3"]), "--out", parts)
    assert begun.returncode == 0, begun.stderr
    assert "% full" in begun.stderr
    for wrong, reason in (("cp=2", "a cp rank has a part"), ("pp=2", "later stages do not see")):
        refused = run_cli("pretrain", "--resume", parts, "--plan", wrong, *options(["train.steps=6"]))
        assert_refused(refused, reason, "packing = concatenate")
    resumed = run_cli("pretrain", "--resume", parts, "--plan", "dp=2,zero=3", *options(["train.steps=6"]))
    assert resumed.returncode == 0, resumed.stderr
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)  # all are in the warm-up
    assert len(losses(parts)) == 6


def test_files_that_were_touched_are_read_again_when_a_training_resumes(tokens: Path, tmp_path: Path) -> None:
    copied = tmp_path / "tokens"
    shutil.copytree(tokens, copied)
    loaded = {"tokens": {"directory": str(copied), "sha256": open_directory(copied).header.sha256}}
    open_directory(copied).verify()
    check_loaded(loaded)
    content = bytearray((copied / "train.tokens").read_bytes())
    content[7] ^= 1
    (copied / "train.tokens").write_bytes(content)
    with pytest.raises(UserError, match=r"train.tokens is damaged"):
        check_loaded(loaded)
    (copied / ".verified.json").unlink()  # as on read-only storage, where only sizes are compared
    check_loaded(loaded)
    shutil.rmtree(copied)
    with pytest.raises(UserError, match="is no directory of token files"):
        check_loaded(loaded)


@pytest.mark.slow
@pytest.mark.extended
def test_a_student_learns_from_token_files(trained: Path, tmp_path: Path) -> None:
    settings = options(["student.width=16", "distil.epochs=1", "rows=100"])
    done = run_cli("compress", trained, "--student", "charlm", *settings, "--out", tmp_path / "small")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "small" / "model.tflite").exists()


@pytest.mark.slow
@pytest.mark.extended
def test_its_tokenizer_is_exported_with_the_model(trained: Path, tokens: Path, tmp_path: Path) -> None:
    hugging_face.export_folder(trained, tmp_path / "exported")
    assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (tokens / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dataset": "tokens"}, "data.dataset = 'tokens' needs data.path, the folder that fedloop pretrain tokenize made"),
        ({"dataset": "text", "path": "x", "packing": "documents"}, "data.packing = 'documents' is for tokens, but"),
        ({"dataset": "tokens", "path": "x", "encoding": "bytes"}, "data.encoding = 'bytes' is for"),
        ({"dataset": "tokens", "path": "x", "packing": "tight"}, "data.packing = 'tight'"),
        ({"dataset": "tokens", "path": "x", "public_samples": 3}, "is one text"),
    ],
)  # fmt: skip
def test_wrong_keys_of_token_files_are_named(data: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve({"data": dict(data)}, "my.toml")
    assert message in str(refused.value)


def test_token_files_bring_a_model_and_their_packing() -> None:
    config = resolve({"data": {"dataset": "tokens", "path": "/data/tokens"}}, "x")
    assert (config.model.name, config.data.length, config.data.packing) == ("gpt", 64, "concatenate")
