"""What makes two exports the same, and what counts as present."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from models.conversion import cache, request_cache
from models.conversion.trace import Traced, trace
from models.zoo import get
from models.zoo.spec import ModelSpec
from tests.support.manifests import linear

CONTENT = b"a converted file"
KEY = "0" * 64
ENTRY = f"{KEY}.json"


def key(graphs: Traced, description: str) -> str:
    return cache.key(cache.content(graphs), description, cache.MAKERS)


def test_tracing_the_same_model_again_gives_the_same_key() -> None:
    assert key(mlp(), "described") == key(mlp(), "described")


@pytest.mark.slow
def test_anything_that_changes_the_file_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        key(mlp(), "described"),
        key(mlp(), "otherwise"),
        key(mlp(batch_size=5), "described"),
        key(mlp(classes=4), "described"),
        key(mlp(hidden=(9,)), "described"),
        key(shifted(1.0), "described"),
        key(shifted(2.0), "described"),
    ]
    monkeypatch.setattr(cache, "EXPORT_FORMAT", cache.EXPORT_FORMAT + 1)
    keys.append(key(mlp(), "described"))
    monkeypatch.undo()
    monkeypatch.setattr(cache, "version_of", lambda package: "another")
    keys.append(key(mlp(), "described"))

    assert len(set(keys)) == len(keys)


def test_untrained_weights_are_no_part_of_the_key() -> None:
    """They are inputs: two initialisations share a file."""
    first = mlp()

    assert key(first, "") == key(replace(first, values=tuple(v + 1 for v in first.values)), "")


def test_stored_blobs_are_found(tmp_path: Path) -> None:
    stored = cache.store(tmp_path / ENTRY, CONTENT, linear(CONTENT))

    assert request_cache.read(tmp_path / ENTRY) == replace(stored, cached=True)
    assert stored.tflite.read_bytes() == CONTENT
    assert request_cache.read(tmp_path / "other.json") is None
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".tflite"}


@pytest.mark.parametrize("damage", ["tflite cut", "tflite gone", "manifest cut", "manifest gone"])
def test_a_damaged_entry_counts_as_absent_and_can_be_stored_again(tmp_path: Path, damage: str) -> None:
    stored = cache.store(tmp_path / ENTRY, CONTENT, linear(CONTENT))
    path = stored.tflite if damage.startswith("tflite") else stored.manifest
    if damage.endswith("gone"):
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])

    assert request_cache.read(tmp_path / ENTRY) is None
    assert (
        request_cache.read(tmp_path / ENTRY)
        or cache.store(tmp_path / ENTRY, CONTENT, linear(CONTENT)) == stored
    )
    assert request_cache.read(tmp_path / ENTRY) == replace(stored, cached=True)


def test_two_different_files_of_one_key_never_mix(tmp_path: Path) -> None:
    """A conversion need not give the same bytes twice; whichever manifest is there names its own file."""
    cache.store(tmp_path / ENTRY, CONTENT, linear(CONTENT))
    second = cache.store(tmp_path / ENTRY, CONTENT + b" again", linear(CONTENT + b" again"))

    assert request_cache.read(tmp_path / ENTRY) == replace(second, cached=True)
    assert second.tflite.read_bytes() == CONTENT + b" again"


def test_the_lock_of_a_key_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"

    def hold(name: str) -> None:
        for _ in range(20):
            with cache.locked(tmp_path, KEY), log.open("a") as file:
                file.write(f"{name} in\n")
                file.flush()
                file.write(f"{name} out\n")

    workers = [context.Process(target=hold, args=(name,)) for name in ("a", "b")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    lines = log.read_text().split("\n")[:-1]
    assert len(lines) == 80
    assert all(
        went_in.replace(" in", " out") == out for went_in, out in zip(lines[::2], lines[1::2], strict=True)
    )


def mlp(batch_size: int = 4, classes: int = 3, hidden: tuple[int, ...] = (8,)) -> Traced:
    return trace(get("mlp", input_shape=(5,), classes=classes, hidden=hidden), batch_size)


def shifted(by: float) -> Traced:
    """Two of these differ in a constant inside the graph only."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)
            self.register_buffer("shift", torch.tensor([by]), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.fc(x + self.shift)
            return logits

    return trace(ModelSpec("shifted", Shifted, (5,), 3), 4)
