"""The bench of the trainer on a GPU runs on a machine that has torch, numpy and safetensors only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# torch, what it cannot be without, numpy, safetensors, and the checkout
HAVE = (
    "torch", "torchgen", "functorch", "triton", "sympy", "mpmath", "typing_extensions", "filelock", "jinja2",
    "markupsafe", "networkx", "fsspec", "numpy", "safetensors", "models", "edge_client", "strategies", "tests",
)  # fmt: skip

BARE = f"""
import runpy, sys

class Only:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in {HAVE!r} or top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        return self.finder.find_spec(name, path, target) if known else None

sys.meta_path[:] = [Only(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]
runpy.run_module("tests.bench.gpu_pretrain", run_name="__main__", alter_sys=True)
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, *arguments], capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.slow
def test_trainer_and_plain_loop_train_alike_with_nothing_else_installed(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = bench("--device", "cpu", "--tiny", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    plain, by_block, ours = (found["losses"][way] for way in ("plain loop", "plain loop by block", "trainer"))
    assert plain == pytest.approx(ours, abs=1e-3)  # bfloat16; losses of the last batches of turns
    assert by_block == plain
    assert found["overhead"] == pytest.approx(
        found["step_seconds"]["trainer"] / found["step_seconds"]["plain loop"] - 1
    )
    assert "overhead" in done.stdout


@pytest.mark.extended
@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = bench()
    assert done.returncode == 0
    assert "no GPU here: nothing measured" in done.stdout
