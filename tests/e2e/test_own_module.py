"""A model and a data set of a user's own, from modules that know nothing of us, one of them named like our package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_client.infer import runtime
from tests.support.cli import assert_refused, options, report_of, run_cli, run_here
from tests.support.long import extended

pytestmark = pytest.mark.slow

MODELS = """
from torch import nn

from layers import Widened

def build(input_shape, classes, channels=6):
    height, width = input_shape
    return nn.Sequential(
        Widened(),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * (height // 2) * (width // 2), classes),
    )
"""
LAYERS = """
from torch import nn

class Widened(nn.Module):
    def forward(self, x):
        return x.unsqueeze(1)
"""
DATA = """
import numpy as np

def load(seed):
    rng = np.random.default_rng(seed)
    patterns = rng.normal(size=(3, 6, 6))
    y = rng.integers(0, 3, 300)
    return {"x": (patterns[y] + rng.normal(size=(300, 6, 6))).astype(np.float32), "y": y}
"""
SETTINGS = [
    "model.name=models:build",
    "model.channels=4",
    "data.dataset=data:load",
    "data.partition=iid",
    "federation.clients=4",
    "federation.rounds=5",
    "local.epochs=2",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's working directory."""
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "data.py").write_text(DATA)
    return tmp_path


def test_own_model_and_data_run_in_litert_and_pytorch(folder: Path) -> None:
    done = run_cli("simulate", "--out", "run", *options(SETTINGS), cwd=folder)
    assert done.returncode == 0, done.stderr
    report = report_of(folder / "run")
    assert report["runtimes"] == {"litert": 2, "torch": 2}
    assert report["rejections"] == {}
    assert report["final"]["test_accuracy"] > 0.8
    assert report["experiment"]["model"] == {"name": "models:build", "channels": 4}


def test_tensorflow_clients_are_refused_for_a_model_without_a_twin(folder: Path) -> None:
    requested = [*SETTINGS, "federation.runtimes={torch=1, tensorflow=1}"]
    done = run_here("simulate", "--out", "run", *options(requested), cwd=folder)
    assert_refused(done, "federation.runtimes", "tensorflow", "models:build", "tensorflow_twin")


BROKEN = {
    "does not import": ("import no_such_package\n", ["models", "no_such_package", "not installed"]),
    "fails on import": ("1 / 0\n", ["models", "ZeroDivisionError"]),
    "has no such function": ("def biuld():\n    pass\n", ["models", "build", "biuld"]),
    "takes no such option": (
        MODELS.replace("channels=6", "width=6").replace("channels", "width"),
        ["models:build", "channels"],
    ),
    "returns no model": (
        "def build(input_shape, classes, channels):\n    return 'a model'\n",
        ["models:build", "torch.nn.Module", "str"],
    ),
    "fails while built": (
        "def build(input_shape, classes, channels):\n    raise KeyError('weights')\n",
        ["models:build", "KeyError", "weights"],
    ),
    "fails in forward": (
        MODELS.replace("channels * (height", "3 * channels * (height"),
        ["models:build", "(6, 6)", "mat1 and mat2 shapes"],
    ),
    "answers with no tensor": (
        MODELS + "\nclass Two(nn.Linear):\n    def forward(self, x):\n        return x, x\n"
        "def build(input_shape, classes, channels):\n    return Two(6, 6)\n",
        ["models:build", "tuple", "[batch, 3]"],
    ),
    "answers with probabilities": (
        MODELS.replace("(width // 2), classes),", "(width // 2), classes), nn.Softmax(-1),"),
        ["models:build", "answers with probabilities, expected logits", "softmax"],
    ),
    "answers in another shape": (
        MODELS.replace("(width // 2), classes)", "(width // 2), classes + 1)"),
        ["models:build", "[batch, 4]", "[batch, 3]", "3 classes"],
    ),
}


_SOME = ("fails in forward",)
"""Of each step one: the import, the trial, what is particular to logits. The others: tests/models/test_user_code.py."""


@pytest.mark.parametrize("kind", [*_SOME, *extended(*(kind for kind in BROKEN if kind not in _SOME))])
def test_a_broken_model_is_reported_in_one_message(folder: Path, kind: str) -> None:
    text, arguments = BROKEN[kind]
    (folder / "models.py").write_text(text)
    requested = [*SETTINGS, "simulation.workers=1"]
    done = run_here("simulate", "--out", "run", *options(requested), cwd=folder)
    assert_refused(done, *arguments)


@pytest.mark.extended
def test_a_broken_loader_is_reported_with_its_line(folder: Path) -> None:
    (folder / "data.py").write_text("def load():\n    rows = []\n    return rows[0]\n")
    done = run_here("simulate", "--out", "run", *options(SETTINGS), cwd=folder)
    assert_refused(done, "data:load", "data.py", "line 3", "IndexError")


@pytest.mark.extended
def test_an_installed_package_offers_its_model_under_a_short_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    about = site / "othernets-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "othernets.py").write_text(MODELS.replace("from layers import Widened", LAYERS))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: othernets\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fedloop.models]\nothernet = othernets:build\n")
    requested = [
        "model.name=othernet",
        "model.channels=4",
        "federation.rounds=1",
        "federation.runtimes={torch=1}",
        "local.steps=2",
    ]

    done = run_cli(
        "simulate", "--out", "out", *options(requested), cwd=tmp_path, env={"PYTHONPATH": str(site)}
    )

    assert done.returncode == 0, done.stderr
    assert report_of(tmp_path / "out")["experiment"]["model"] == {"name": "othernet", "channels": 4}


WORDS = """
import numpy as np
import torch
from torch import nn

class Bag(nn.Module):
    def __init__(self, rows, places, classes):
        super().__init__()
        self.word, self.place, self.out = nn.Embedding(rows, 8), nn.Embedding(places, 8), nn.Linear(8, classes)

    def forward(self, x):
        return self.out((self.word(x) + self.place(torch.arange(x.shape[1]))).mean(1))

def build(input_shape, classes, rows=62):
    return Bag(rows, *input_shape, classes)

def load(seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, 300)
    return {"x": rng.integers(1, 21, (300, 10)) + 20 * y[:, None], "y": y}
"""


@pytest.mark.extended
def test_a_model_of_token_ids_comes_out_with_as_many_as_its_embedding_takes(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(WORDS)
    requested = [
        "model.name=words:build",
        "data.dataset=words:load",
        "data.partition=iid",
        "federation.clients=4",
        "federation.rounds=2",
        "federation.runtimes={torch=1}",
    ]
    done = run_cli("simulate", "--out", "run", *options(requested), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_cli(
        "export", "run", "--name", "words", "--precision", "float32", "--out", "release", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "release" / "manifest.json").read_bytes())
    assert manifest["input"] == {"shape": [10], "dtype": "int32", "vocab": 62}
    model = runtime.load(tmp_path / "release")
    x = np.full((1, 10), 61, np.int32)
    assert model.predict(x).shape == (1, 3)
    with pytest.raises(runtime.InvalidRows, match="takes 0 to 61"):
        model.predict(x + 1)

    done = run_here("simulate", "--out", "small", *options([*requested, "model.rows=40"]), cwd=tmp_path)
    assert_refused(done, "token ids 0 to 60", "words:build", "takes 0 to 39", "model.vocab")
