"""Loss curves of every family of models under any plan: what their parity tests compare. Runs in the ranks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from models import zoo
from models.datasets.token_files.packing import pack
from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.data import documents
from models.pretrain.data.batches import Arrays, Source
from models.pretrain.data.images import Augmentation, augment
from models.pretrain.data.token_directory import PackedDocuments
from models.pretrain.data.tokens import Masked
from models.pretrain.training import TrainingOptions

STEPS, BATCH, LENGTH, VOCAB, CLASSES = 5, 8, 12, 30, 3
END = VOCAB - 1
"""Ends a document."""

OPTIONS: dict[str, dict[str, Any]] = {
    "bert": {"vocab": VOCAB, "width": 16, "layers": 2, "heads": 4},
    "bert masked": {
        "vocab": VOCAB,
        "width": 16,
        "layers": 2,
        "heads": 4,
        "objective": "masked",
        "tie": False,
    },
    "bert masked tied": {"vocab": VOCAB, "width": 16, "layers": 2, "heads": 4, "objective": "masked"},
    "lstm": {"width": 16, "layers": 2},
    "resnet": {"blocks": [1, 1], "width": 8},
    "resnet varied": {"blocks": [1, 1], "width": 8},
    "gpt llama": {
        "width": 16,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "norm": "rms",
        "activation": "swiglu",
        "hidden": 24,
        "positions": "rope",
        "bias": "qkv",
    },
    "gpt biased": {"width": 16, "layers": 2, "heads": 4, "bias": "all", "activation": "gelu"},
    "gpt tied": {"width": 16, "layers": 2, "heads": 4, "tie": True},
    "gpt packed": {"width": 16, "layers": 2, "heads": 4},
}


def curve(family: str, plan: str) -> list[float]:
    """Losses of a training of `family` under `plan`."""
    spec = zoo.get(
        family.split()[0],
        input_shape=(8, 8) if "resnet" in family else (LENGTH,),
        classes=CLASSES if family in ("bert", "resnet", "resnet varied") else VOCAB,
        **OPTIONS[family],
    )
    if family == "gpt packed":
        spec = documents.confined(spec, END, "a test")
    options = TrainingOptions(steps=STEPS, batch_size=BATCH, lr=1e-2, eps=1e-6)
    with world.join(plans.parse(plan)) as here:
        training = trainer.build(spec, source(family), options, here, seed=5)
        losses: list[float] = []
        for _ in range(training.steps):
            training.train_step()
            losses += training.losses()
        return losses


def source(family: str) -> Source:
    """20 rows, so that an epoch's last batch is a short one; texts end in padding."""
    rng = np.random.default_rng(3)
    labels = rng.integers(CLASSES, size=20).astype(np.int32)
    if "resnet" in family:
        images = Arrays(rng.random((20, 8, 8), np.float32), labels)
        return augment(images, Augmentation(flip=0.5, crop=1, erase=2)) if "varied" in family else images
    if family == "gpt packed":
        return packed(rng)
    text = rng.integers(1, VOCAB, size=(20, LENGTH)).astype(np.int32)
    if family.split()[0] in ("lstm", "gpt"):
        return Arrays(text, np.roll(text, -1, axis=1))
    text[np.arange(LENGTH) >= rng.integers(3, LENGTH + 1, size=(20, 1))] = 0
    texts = Arrays(text, labels)
    return Masked(texts, VOCAB) if "masked" in family else texts


def packed(rng: np.random.Generator) -> PackedDocuments:
    """60 documents of 1 to 11 tokens, the last of which is `END`, in windows of `LENGTH`."""
    ends = rng.integers(1, LENGTH, size=60).cumsum()
    text = rng.integers(0, END, size=ends[-1]).astype(np.uint16)
    text[ends - 1] = END
    with TemporaryDirectory() as folder:
        pack(ends, LENGTH, Path(folder) / "index.npy")
        return PackedDocuments(text, np.load(Path(folder) / "index.npy"), LENGTH, END)
