"""Jobs for the training process on the converted `cnn`, and a plug-in whose connector misbehaves as told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data import DataConfig
from edge_client.train.process import TrainingJob
from edge_client.wire import arrays
from edge_client.wire.device import ModelRef, TaskMessage
from tests.support.artifacts import ARCHITECTURES, exported, spec_of
from tests.support.local_data import first_params

MODEL = "cnn"

PLUG_IN = """
import ctypes, os, time
import numpy as np
from edge_client.data import Preview
from edge_client.train.trainer import Examples

class Naughty:
    def __init__(self, does):
        self.does = does
    def train(self):
        getattr(self, self.does)()
        return Examples(np.zeros((4, 8, 8), np.float32), np.zeros(4, np.int32))
    held_out = train
    def preview(self):
        return Preview((), 4, 4, (8, 8), "float32", (), {"0": 4})
    def behave(self):
        pass
    def grab(self):
        np.ones(2_000_000_000, np.uint8)
    def grow(self):
        self.kept = np.ones(150_000_000, np.uint8)
        self.sleep()
    def spin(self):
        while True:
            pass
    def sleep(self):
        time.sleep(1000)
    def hold_interpreter(self):
        ctypes.PyDLL(None).sleep(1000)
    def abort(self):
        os.abort()
    def fail(self):
        raise RuntimeError("as told")

def connector(config):
    return Naughty(config.options["does"])

def bare(input_shape, classes):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), classes))
"""


def install_plug_in(folder: Path) -> Path:
    """An installed package in `folder`, to be put on PYTHONPATH: connector `naughty`, model `bare`."""
    entry_points = (
        "[fedloop.connectors]\nnaughty = naughty:connector\n[fedloop.models]\nbare = naughty:bare\n"
    )
    info = folder / "naughty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: naughty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / "naughty.py").write_text(PLUG_IN)
    return folder


def naughty(does: str) -> DataConfig:
    return DataConfig("naughty", options={"does": does})


def write_data(folder: Path, rows: int = 60) -> DataConfig:
    """Random examples as the `cnn` takes them."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((rows, 8, 8)).astype(np.float32), rng.integers(0, 10, rows)
    np.savez(folder / "data.npz", x=x, y=y)
    return DataConfig("numpy", folder / "data.npz")


def job(folder: Path, **changes: Any) -> TrainingJob:
    """A train job of 4 LiteRT steps, whose files are in `folder`; `changes` replace fields."""
    found, _ = exported(MODEL)
    request = ARCHITECTURES[MODEL]
    params = folder / "params"
    if not params.exists():
        params.write_bytes(arrays.encode(first_params(spec_of(request))))
    fields: dict[str, Any] = {
        "kind": "train",
        "runtime": "litert",
        "params": params,
        "streams": None,
        "tflite": found.tflite,
        "manifest": found.manifest,
        "model": ModelRef(MODEL, {}, request.input_shape, request.classes, "float32", "classification"),
        "message": message(),
        "data": changes.get("data") or write_data(folder),
        "state_in": None,
        "state_out": folder / "state_out",
        "result": folder / "result",
    }
    return TrainingJob(**{**fields, **changes})


def message(rule: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Four steps of the whole batch."""
    return TaskMessage(1, "device", "b" * 64, 3, 8, 0.05, None, 4, rule or {"name": "plain"}).to_json()
