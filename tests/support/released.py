"""Releases that run: two small models of digits with the same body and other heads, and release folders of them.

    python -m tests.support.released

trains and converts them anew into `tests/golden/releases`, which takes longer than all tests that use them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edge_client.files import write_durably
from edge_client.infer import golden_check
from edge_client.infer.runtime import Model
from edge_client.wire.inference import GoldenRows, InferenceManifest, from_json
from edge_client.wire.manifest import FileSpec, Fill, InputSpec, Tolerance
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME

GOLDEN = Path(__file__).parents[1] / "golden" / "releases"
Kind = Literal["first", "second"]
HIDDEN = [128]


def release_folder(
    folder: Path,
    version: int,
    kind: Kind = "first",
    *,
    model: str = "digits",
    spoilt: Callable[[bytes], bytes] = lambda content: content,
    **changes: Any,
) -> Path:
    """A release folder with right golden answers.

    `spoilt`: what becomes of the file; `changes`: other keys of the manifest than would be right.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = (GOLDEN / f"{kind}.tflite").read_bytes()
    x, y = digits()
    draft = InferenceManifest(
        model=model,
        version=version,
        architecture="mlp",
        options={"hidden": HIDDEN},
        task="classification",
        classes=10,
        input=InputSpec((64,), "float32"),
        precision="float32",
        operators=(),
        minimum_runtime="2.0",
        runtimes=("litert", "tflite-runtime"),
        memory_bytes=2**20,
        file=FileSpec(hashlib.sha256(content).hexdigest(), len(content)),
        golden=GoldenRows(Fill(0.5, 0.5), (), Tolerance(1e-4, 1e-4)),
        dataset="digits",
    )
    runs = Model(content, draft)
    requested = golden_check.synthetic_rows(draft, 4)
    golden = GoldenRows(
        draft.golden.x,
        tuple(tuple(map(float, row)) for row in runs.predict(requested)),
        draft.golden.tolerance,
        tuple(tuple(map(float, row)) for row in x[:16]),
        tuple(map(int, y[:16])),
    )
    content = spoilt(content)
    file = FileSpec(hashlib.sha256(content).hexdigest(), len(content))
    (folder / MANIFEST_NAME).write_text(
        replace(draft, **{"golden": golden, "file": file, **changes}).to_json()
    )
    (folder / MODEL_NAME).write_bytes(content)
    return folder


@cache
def digits() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """scikit-learn's digits: [1797, 64] between 0 and 1, and their classes."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int32)


def bad_release(folder: Path, version: int) -> Path:
    """The release with the weights of its last layer gone: it runs as its manifest says, and answers nonsense."""
    from ai_edge_litert.interpreter import Interpreter

    content = (folder / MODEL_NAME).read_bytes()
    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    weights = next(
        interpreter.get_tensor(each["index"]).tobytes()
        for each in interpreter.get_tensor_details()
        if tuple(each["shape"]) == (10, HIDDEN[-1])
    )
    assert content.count(weights) == 1
    content = content.replace(weights, bytes(len(weights)))
    manifest = from_json((folder / MANIFEST_NAME).read_bytes())
    manifest = replace(
        manifest, version=version, file=FileSpec(hashlib.sha256(content).hexdigest(), len(content))
    )
    answers = Model(content, manifest).predict(golden_check.synthetic_rows(manifest, 4))
    golden = replace(manifest.golden, logits=tuple(tuple(map(float, row)) for row in answers))
    (folder / MODEL_NAME).write_bytes(content)
    (folder / MANIFEST_NAME).write_text(replace(manifest, golden=golden).to_json())
    return folder


def held_out_rows(name: str) -> dict[str, Any]:
    """Rows of digits for one device, half of them held out."""
    x, y = digits()
    chosen = np.random.default_rng(len(name) + ord(name[0])).permutation(len(x))[:120]
    return {"x": x[chosen[:60]], "y": y[chosen[:60]], "x_test": x[chosen[60:]], "y_test": y[chosen[60:]]}


def _main(folder: Path) -> None:
    import torch

    from models import zoo
    from models.compress.quantization.quantize import to_tflite

    torch.set_num_threads(1)
    spec = zoo.get("mlp", input_shape=(64,), classes=10, hidden=HIDDEN)
    x, y = (torch.from_numpy(each) for each in digits())
    module = spec.build(0)

    def trained(parameters: Any, seed: int) -> None:
        optimizer = torch.optim.Adam(parameters, lr=0.003)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(120):
            rows = torch.randint(0, 1400, (64,), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x[rows]), y[rows].long()).backward()
            optimizer.step()

    def write(name: Kind) -> None:
        write_durably(folder / f"{name}.tflite", to_tflite(module, spec))

    trained(module.parameters(), 1)
    write("first")
    head = [tensor for name, tensor in module.named_parameters()][-2:]
    trained(head, 2)
    write("second")


if __name__ == "__main__":
    _main(GOLDEN)
