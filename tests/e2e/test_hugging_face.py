"""Models of Hugging Face folders through the commands: trained further, written back, imported, exported."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from coordinator.demos.local_fleet import local_fleet
from models import zoo
from models.hugging_face.checkpoint import write
from models.pretrain.params import params_of
from models.zoo import ModelSpec
from tests.models.hugging_face import small_tokenizers
from tests.models.hugging_face.folders import ours
from tests.support.cli import assert_refused, options, run_cli, run_here
from tests.support.long import extended

pytestmark = pytest.mark.slow

QWEN: dict[str, Any] = {
    "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "bias": "qkv", "norm": "rms", "activation": "swiglu",
    "positions": "rope", "max_length": 32, "tie": True,
}  # fmt: skip
TRAINING = (
    "data.dataset=text",
    "data.encoding=bytes",
    "data.length=16",
    "train.steps=4",
    "train.batch_size=8",
)

_TOKENS = np.random.default_rng(0).integers(0, 260, (60, 17))
ROWS = {
    "x": _TOKENS[:40, :-1],
    "y": _TOKENS[:40, 1:],
    "x_test": _TOKENS[40:, :-1],
    "y_test": _TOKENS[40:, 1:],
}


def folder_of(path: Path, spec: ModelSpec) -> Path:
    params = params_of(spec.build(1))
    write(path, spec.described(), {name: value.shape for name, value in params.items()}, params.__getitem__)
    return small_tokenizers.save(small_tokenizers.byte_level(258), path)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With more tokens than the 256 of bytes."""
    spec = zoo.get("gpt", input_shape=(32,), classes=260, **QWEN)
    return folder_of(tmp_path_factory.mktemp("models") / "qwen", spec)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(f"{number} sheep, " for number in range(600)))
    return path


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


def test_a_training_starts_from_a_folder_and_is_written_as_one(
    qwen: Path, text: Path, tmp_path: Path
) -> None:
    started = (f"model.init={qwen}", f"data.path={text}", *TRAINING)
    done = run_cli("pretrain", *options(started), "--plan", "dp=2", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    model = json.loads((tmp_path / "run" / "model.json").read_text())
    assert {key: model["options"][key] for key in QWEN} == QWEN
    assert model["options"]["vocab"] == 260

    done = run_cli("pretrain", "export", tmp_path / "run", "--out", tmp_path / "back")

    assert done.returncode == 0, done.stderr
    assert "Qwen2ForCausalLM of 11,984 parameters" in done.stdout
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (qwen / "config.json").read_text()
    )
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (qwen / "tokenizer.json").read_bytes()
    before, after = tensors(qwen), tensors(tmp_path / "back")
    moved = {name: float(np.abs(after[name] - before[name]).max()) for name in before}
    assert before.keys() == after.keys()
    assert all(0 < distance < 0.05 for distance in moved.values()), moved  # a few steps away, not fresh


def test_a_job_at_a_coordinator_starts_from_a_folder(qwen: Path, text: Path, tmp_path: Path) -> None:
    """As the command does, to the last bit."""
    started = options([f"model.init={qwen}", f"data.path={text}", *TRAINING])
    done = run_cli("pretrain", *started, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    flags = ["--allow-path", str(qwen), "--data-dir", str(text.parent)]
    with local_fleet(tmp_path / "fleet", flags) as fleet:
        home = {"FEDLOOP_HOME": str(fleet.home), "FEDLOOP_COORDINATOR": fleet.operator_url}
        fedloop = partial(run_here, env=home)
        done = fedloop("jobs", "start", "--kind", "pretraining", *started, "--json")
        assert done.returncode == 0, done.stderr
        job = json.loads(done.stdout)["id"]
        done = fedloop("jobs", "logs", job, "--follow")
        assert done.returncode == 0, done.stdout + done.stderr + fedloop("jobs", "show", job).stdout
        assert fedloop("jobs", "fetch", job, "--out", tmp_path / "fetched").returncode == 0
        secret = folder_of(tmp_path / "secret", zoo.get("gpt", input_shape=(32,), classes=260, **QWEN))
        elsewhere = options([f"model.init={secret}", f"data.path={text}"])
        assert_refused(
            fedloop("jobs", "start", "--kind", "pretraining", *elsewhere), str(secret), "--allow-path"
        )
    for name, value in tensors(tmp_path / "run").items():
        np.testing.assert_array_equal(tensors(tmp_path / "fetched")[name], value)


def federated(folder: Path, init: str) -> list[str]:
    """Options of a simulation from `init`, whose rows are written into `folder`."""
    np.savez(folder / "rows.npz", **ROWS, classes=260, task="next_token")
    return options([
        f"model.init={init}", "data.dataset=npz", f"data.path={folder / 'rows.npz'}", "data.partition=iid",
        "federation.clients=2", "federation.clients_per_round=2", "federation.rounds=1", "federation.runtimes={torch=1}",
        "local.epochs=1", "simulation.workers=1",
    ])  # fmt: skip


def loss_of(folder: Path) -> float:
    module, _ = ours(folder)
    with torch.no_grad():
        logits = module(torch.from_numpy(ROWS["x_test"]).int())
    labels = torch.from_numpy(ROWS["y_test"]).flatten()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels))


def test_federated_clients_start_from_a_folder(qwen: Path, tmp_path: Path) -> None:
    done = run_cli("simulate", *federated(tmp_path, str(qwen)), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["start"]["test_loss"] == pytest.approx(loss_of(qwen), abs=1e-4)


@pytest.mark.extended
def test_a_simulation_at_a_coordinator_starts_from_a_folder_or_its_version(
    qwen: Path, tmp_path: Path
) -> None:
    (data := tmp_path / "data").mkdir()
    with local_fleet(tmp_path / "fleet", ["--allow-path", str(qwen), "--data-dir", str(data)]) as fleet:
        home = {"FEDLOOP_HOME": str(fleet.home), "FEDLOOP_COORDINATOR": fleet.operator_url}
        fedloop = partial(run_here, env=home)
        assert fedloop("model", "import", qwen, "--name", "qwen").returncode == 0
        for init in (str(qwen), "qwen:1"):
            done = fedloop("jobs", "start", *federated(data, init), "--json")
            assert done.returncode == 0, done.stderr
            job = json.loads(done.stdout)["id"]
            done = fedloop("jobs", "logs", job, "--follow")
            assert done.returncode == 0, done.stdout + done.stderr + fedloop("jobs", "show", job).stdout
            report = fleet.client.get(f"/jobs/{job}/report")
            assert report["start"]["test_loss"] == pytest.approx(loss_of(qwen), abs=1e-4)


def test_an_imported_model_is_exported_unchanged(qwen: Path, tmp_path: Path) -> None:
    for arguments in (
        ("import", qwen, "--out", tmp_path / "ours"),
        ("export", tmp_path / "ours", "--out", tmp_path / "back"),
    ):
        done = run_cli("pretrain", *arguments)
        assert done.returncode == 0, done.stderr
    before, after = tensors(qwen), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (qwen / name).read_bytes()


def test_byte_pairs_that_were_learnt_go_with_the_model(text: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    learnt = (f"data.path={text}", *TRAINING, "data.encoding=bpe(300)", "model.width=16", "model.layers=1")
    done = run_cli("pretrain", *options(learnt), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr

    done = run_cli("pretrain", "export", tmp_path / "run", "--out", tmp_path / "gpt2")

    assert done.returncode == 0, done.stderr
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "gpt2" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("17 sheep").ids) == "17 sheep"
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("gpt2", tokenizer.get_vocab_size())


@pytest.mark.extended
def test_bert_goes_on_with_its_own_mask(text: Path, tmp_path: Path) -> None:
    spec = zoo.get("bert", input_shape=(16,), classes=256, vocab=256, width=16, layers=1, objective="masked")
    bert = folder_of(tmp_path / "bert", spec)
    masked = (f"model.init={bert}", f"data.path={text}", *TRAINING)
    done = run_cli("pretrain", *options(masked), "--out", tmp_path / "masked")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "masked" / "model.json").read_text())["options"]["mask_token"] == 256


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("model.name=bert",), ("model.name = 'bert', but model.init = ", "is a gpt; leave the name out")),
        (
            ("model.kv_heads=4",),
            ("model.safetensors: tensor 'model.layers.0.self_attn.k_proj.bias' is [8] as", "expected [16]"),
        ),
        *extended((("model.vocab=100",), ("vocab is 100, but the data have 256 classes",))),
    ],
)
def test_settings_that_contradict_the_folder_are_refused(
    settings: tuple[str, ...], reason: tuple[str, ...], qwen: Path, text: Path, tmp_path: Path
) -> None:
    started = (f"model.init={qwen}", f"data.path={text}", *TRAINING, *settings)
    assert_refused(run_here("pretrain", *options(started), "--out", tmp_path / "run"), *reason)


def test_folders_that_are_none_are_refused(qwen: Path, tmp_path: Path) -> None:
    assert_refused(
        run_here("pretrain", "import", tmp_path, "--out", tmp_path / "x"), "config.json: No such file"
    )
    assert_refused(
        run_here("pretrain", "export", tmp_path, "--out", tmp_path / "x"),
        "has neither model.safetensors with its description",
    )
    assert_refused(run_here("pretrain", "import", qwen, "--out", qwen), "the folder is not empty")
