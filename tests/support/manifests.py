"""A small manifest for tests that need no converted file: a linear layer with a frozen scale."""

from __future__ import annotations

import hashlib

from edge_client.wire.manifest import (
    ArraySummary,
    FileSpec,
    Fill,
    Golden,
    InputSpec,
    Lineage,
    Manifest,
    Operator,
    SignatureSpec,
    TensorSpec,
    Tolerance,
)


def linear(content: bytes = b"no real file") -> Manifest:
    """Of a model of 3 features, 2 classes and batches of 4; `content` is its file."""
    return Manifest(
        model="linear",
        options={"scaled": True},
        task="classification",
        classes=2,
        input=InputSpec((3,), "float32"),
        batch_size=4,
        tensors=(
            TensorSpec("fc.weight", "fc__weight", (2, 3), True),
            TensorSpec("fc.bias", "fc__bias", (2,), True),
            TensorSpec("scale", "scale", (3,), False),
        ),
        signatures={
            "train": SignatureSpec(
                ("x", "y", "lr", "fc__weight", "fc__bias", "scale"), ("loss", "fc__weight", "fc__bias")
            ),
            "infer": SignatureSpec(("x", "fc__weight", "fc__bias", "scale"), ("logits",)),
        },
        operators=(Operator("ADD", 1, 3),),
        minimum_runtime="2.3.0",
        file=FileSpec(hashlib.sha256(content).hexdigest(), len(content)),
        golden=Golden(
            fills={"fc.weight": Fill(0.0, 0.5), "fc.bias": Fill(0.0, 0.1), "scale": Fill(1.0, 0.1)},
            x=Fill(0.5, 0.5),
            lr=1.0,
            padded_rows=1,
            logits=ArraySummary(1.0, (0.5, 0.25)),
            loss=0.7,
            changes={"fc.weight": ArraySummary(1.0, (0.1,)), "fc.bias": ArraySummary(1.0, (0.1,))},
            tolerance=Tolerance(1e-5, 1e-4),
        ),
        lineage=Lineage(parent="0" * 64, pipeline_step="export"),
    )
