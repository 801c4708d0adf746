"""What is wrong with a user's own model is told with the file and the line that it is in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models import zoo
from models.datasets import own
from models.datasets.dataset import DataError
from models.user_code import UserCodeError
from models.zoo.resolve import ModelNotFound
from models.zoo.trial import ModelUnfit, require_answers

NET = """from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(64, 10)

    def forward(self, x):
        return {forward}

def build(input_shape, classes):
    return Net()
"""


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("def build(input_shape, classes):\n    x = (1,\n", UserCodeError, "FILE, line 2: SyntaxError"),
        ("import torch\n\nx = absent\n", UserCodeError, "FILE, line 3: NameError: name 'absent'"),
        ("\nimport absent_package\n", UserCodeError, "'absent_package', which is not installed at FILE, line 2"),
        (
            "from torch import nn\n\ndef part():\n    return nn.Linear(3, 'ten')\n\n"
            "def build(input_shape, classes):\n    return part()\n",
            ModelNotFound,
            "examples of shape (64,) at FILE, line 4: ",
        ),
        (
            "def build(input_shape, classes):\n    return {}['x']\n",
            ModelNotFound,
            "failed while built at FILE, line 2: KeyError: 'x'",
        ),
        ("\n\ndef build(input_shape, classes):\n    return 3\n", ModelNotFound, "(FILE, line 3) must return"),
        ("def build(shape):\n    pass\n", ModelNotFound, "(FILE, line 1): build() got an unexpected"),
        (NET.format(forward="self.dense(x[:, :3])"), ModelUnfit, "at FILE, line 9: RuntimeError"),
        (NET.format(forward="[x]"), ModelUnfit, "(FILE, line 8) returns list"),
        (NET.format(forward="x"), ModelUnfit, "(FILE, line 8) returns logits of shape"),
    ],
)  # fmt: skip
def test_an_error_in_a_users_model_has_file_and_line(
    code: str, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"net_{abs(hash(code))}.py"
    file.write_text(code)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(kind, match=re.escape(message.replace("FILE", str(file)))):
        require_answers(zoo.get(f"{file.stem}:build", input_shape=(64,), classes=10))


def test_an_error_in_a_shipped_model_has_no_line() -> None:
    with pytest.raises(
        ModelNotFound, match=r"^model 'cnn' cannot be built for examples of shape \(32,\): expected"
    ):
        zoo.get("cnn", input_shape=(32,), classes=10)


def test_a_loader_that_returns_something_else_has_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows_of_mine.py").write_text("\ndef load():\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=rf"\({re.escape(str(tmp_path))}/rows_of_mine\.py, line 2\) returned int"
    ):
        own.load("rows_of_mine:load", None, 0)
